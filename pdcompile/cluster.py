"""Cluster: the machines that a plan is for.

Read from ``cluster.toml``::

    [[devices]]              # in rank order; count is 1 when left out
    count = 8
    kind = "cuda"
    memory = "80 GB"         # left out: no limit
    speed = 1.0              # relative to the device that the costs were measured on
    host_bandwidth = "25 GB/s"  # of copies to and from its host; left out: what its kind has

    [[levels]]               # innermost first; sizes multiply to the number of devices
    name = "nvlink"
    size = 4
    bandwidth = "100 GB/s"   # per device and direction
    latency = "5 us"
    duplex = "full"          # or "half"
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, Literal, TypeAlias, TypeVar

from pdcompile.errors import ClusterError, ConfigError, errors_as
from pdcompile.files import read_limited
from pdcompile.hardware.data_sheets import SHEETS, host_bytes_per_second, misspelt
from pdcompile.jsonio import decode, loads, toml_tree
from pdcompile.problem import StageLimits
from pdcompile.units import (
    exact_bytes,
    exact_rate,
    exact_seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
)

MAX_DEVICES = 65_536
HOST_KIND = "cpu"  # of devices that compute in the memory of their host
NETWORK = "network"  # the level of links between hosts
GPU_KIND = "cuda"  # what torch calls all others, AMD's too
KNOWN_KINDS = (HOST_KIND, GPU_KIND, *SHEETS)
BARE_NOTE = (
    "cluster {text!r} says nothing of links: assumed 100 GB/s inside a host and 12.5 GB/s between "
    "hosts, full duplex, and no time for each message ('auto' under torchrun has what gloo takes, "
    "pdcompile probe measures it); and no memory limit but the one that memory= gives"
)
# What gloo does between two processes of one host (benchmarks/links.py measures it here).
GLOO_BYTES_PER_SECOND = 1e9
GLOO_SECONDS = 100e-6
AUTO_NOTE = (
    "cluster 'auto' says nothing of links: assumed 1 GB/s and 100 us a message between ranks, "
    "about what gloo does on one host; and no memory limit but the one that memory= gives"
)


@dataclass(frozen=True, slots=True)
class Device:
    """One worker. `speed` is relative to the reference device; `memory_bytes` None: no limit;
    `host_bytes_per_second`: of copies to and from its host; None: what its kind has.

    A kind with a data sheet, "cuda" (any GPU), or any other name, of a GPU of which nothing is
    known.  Raises ClusterError: another spelling of one that is known, or no name at all.
    """

    kind: str = HOST_KIND
    memory_bytes: int | None = None
    speed: float = 1.0
    host_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for message, remedy in misspelt(self.kind, HOST_KIND, GPU_KIND):
            raise ClusterError(message, remedy=remedy)
        # 8e9 bytes and a speed of 2 are what a file would say: plans compare the texts
        rate = "host_bytes_per_second"
        for name, exact in (("memory_bytes", int), ("speed", float), (rate, float)):
            if isinstance(given := getattr(self, name), int | float) and math.isfinite(given):
                object.__setattr__(self, name, exact(given))

    @property
    def on_host(self) -> bool:
        """True if it computes in the memory of its host, and is no GPU."""
        return self.kind == HOST_KIND

    @property
    def host_rate(self) -> float:
        """Bytes a second of copies between its memory and its host's."""
        return self.host_bytes_per_second or host_bytes_per_second(self.kind)


@dataclass(frozen=True, slots=True)
class Level:
    """One level of links, innermost first: `size` children joined by equal links.

    `bytes_per_second` is per device and direction.
    """

    name: str
    size: int
    bytes_per_second: float
    latency_seconds: float = 0.0
    full_duplex: bool = True


GLOO = Level("gloo", 1, GLOO_BYTES_PER_SECOND, GLOO_SECONDS)  # between processes of one host
#: a link that messages travel on; of `StageLimits` that to the next stage
Link: TypeAlias = Level | StageLimits
Amount = TypeVar("Amount", bound=Any)  # a number, or an array of them


def message_seconds(link: Link, num_bytes: Amount, messages: float = 1.0) -> Amount:
    """Seconds of a message on a link, or of several of so many bytes together."""
    seconds: Amount = num_bytes / link.bytes_per_second + messages * link.latency_seconds
    return seconds


def ring_seconds(link: Link, num_bytes: Amount, members: int) -> Amount:
    """Seconds of a ring all-reduce among the members, `link` being the slowest between them."""
    rounds = 2 * (members - 1)
    seconds: Amount = rounds * message_seconds(link, num_bytes / members)
    return seconds


def slowest(links: Iterable[Link]) -> Level:
    """The lowest rate and the highest latency of some links; free where there are none."""
    listed = list(links)
    return Level(
        "slowest",
        1 + len(listed),
        min((link.bytes_per_second for link in listed), default=math.inf),
        max((link.latency_seconds for link in listed), default=0.0),
        all(link.full_duplex for link in listed),
    )


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices in rank order, and the levels that join them (their sizes multiply to the count).

    `in_process` marks `Cluster.local(n)`: all stages run in one process.  `notes` say what was
    assumed; `explain` repeats them.  `parts`: each device stands for so many as its size says, the
    parts of a stage, which are joined by this link (see `grouped`).
    """

    devices: tuple[Device, ...]
    levels: tuple[Level, ...]
    in_process: bool = False
    notes: tuple[str, ...] = ()
    parts: Level | None = None

    @property
    def hosts(self) -> int:
        """Hosts that its levels speak of."""
        return math.prod(level.size for level in self.levels if level.name == NETWORK)

    @staticmethod
    def local(n: int, *, memory: int | str | None = None, kind: str = HOST_KIND) -> Cluster:
        """n stages in this process: no links to speak of, optional memory limit each.

        Args:
            kind: of the device that they share: the CPU, or a GPU ("cuda", "a100-80", …).

        Raises:
            ClusterError: n is not a positive whole number.
            ConfigError: `memory` is not a number of bytes.
        """
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_DEVICES:
            raise ClusterError(
                f"a local cluster of {n!r} stages",
                remedy=f"give a whole number from 1 to {MAX_DEVICES}: local(2)",
            )
        limit = None if memory is None else parse_bytes(memory, what="memory")
        level = Level("memory", n, math.inf)
        return Cluster((Device(kind, limit),) * n, (level,), in_process=True)

    @staticmethod
    def parse(text: str) -> Cluster:
        """``2x4`` (hosts x devices) or ``4`` (one host), with assumed links and no memory limit.

        Raises:
            ClusterError: any other text.
        """
        hosts, devices = counts_of(text)
        if not devices:
            raise ClusterError(
                f"cluster {text!r} is neither HOSTSxDEVICES nor a number of devices",
                remedy='write "2x4" for 2 hosts of 4 devices, "4" for one host, '
                "or name a .toml file",
            )
        levels = [Level("host", devices, 100e9)]
        if hosts > 1:
            levels.append(Level(NETWORK, hosts, 12.5e9))
        note = BARE_NOTE.format(text=text.strip())
        return Cluster((Device(),) * (hosts * devices), tuple(levels), notes=(note,))

    @staticmethod
    def auto(environ: Mapping[str, str] | None = None) -> Cluster:
        """torchrun's processes (WORLD_SIZE, LOCAL_WORLD_SIZE), else one stage in this process.

        Args:
            environ: the variables; None: this process's.

        Raises:
            ClusterError: the variables are not positive numbers that divide.
        """
        environ = os.environ if environ is None else environ
        if "WORLD_SIZE" not in environ:
            return Cluster.local(1)
        world, local = environ["WORLD_SIZE"], environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"])
        digits = world.isdecimal() and local.isdecimal() and int(local) > 0 and int(world) > 0
        if not digits or int(world) % int(local):
            raise ClusterError(
                f"WORLD_SIZE={world!r} and LOCAL_WORLD_SIZE={local!r} describe no cluster",
                remedy="start with torchrun, with equally many processes on every host",
            )
        cluster = Cluster.parse(f"{int(world) // int(local)}x{local}")
        levels = tuple(
            replace(level, bytes_per_second=GLOO_BYTES_PER_SECOND, latency_seconds=GLOO_SECONDS)
            for level in cluster.levels
        )
        return replace(cluster, levels=levels, notes=(AUTO_NOTE,))

    @staticmethod
    def load(path: str) -> Cluster:
        """Read cluster.toml.

        Raises:
            ClusterError: unreadable file, unknown key or unit, level sizes that do not multiply
                to the number of devices; names the file and the key.
        """
        remedy = "give the path of a cluster.toml, or '2x4' (hosts x devices)"
        with errors_as(ClusterError, "cannot read the cluster file", path, remedy):
            text = read_limited(path)
        return Cluster.from_toml(text, where=str(path))

    @staticmethod
    def from_toml(text: str | bytes, *, where: str = "cluster.toml") -> Cluster:
        """Inverse of `to_toml`.  Raises ClusterError that names file and key."""
        remedy = "write [[devices]] and [[levels]] tables of key = value lines"
        data = loads(text, where=where, error=ClusterError, parse=toml_tree, remedy=remedy)
        try:
            return _read(data, where)
        except ConfigError as error:  # a unit: the parser of units knows no clusters
            raise ClusterError(error.message, where=error.where, remedy=error.remedy) from error

    def to_toml(self) -> str:
        """Canonical text; `from_toml` gives an equal cluster."""
        lines = []
        if self.in_process:
            lines.append("in_process = true")
        if self.notes:
            lines.append(f"notes = [{', '.join(_quote(note) for note in self.notes)}]")
        for device, equal in groupby(self.devices):
            lines += ["", "[[devices]]", f"count = {len(list(equal))}"]
            lines.append(f"kind = {_quote(device.kind)}")
            if device.memory_bytes is not None:
                lines.append(f'memory = "{exact_bytes(device.memory_bytes)}"')
            lines.append(f"speed = {device.speed!r}")
            if device.host_bytes_per_second is not None:
                lines.append(f'host_bandwidth = "{exact_rate(device.host_bytes_per_second)}"')
        tables = [("[[levels]]", level) for level in self.levels]
        for table, level in tables + [("[parts]", one) for one in (self.parts,) if one]:
            lines += ["", table, f"name = {_quote(level.name)}", f"size = {level.size}"]
            if not math.isinf(level.bytes_per_second):
                lines.append(f'bandwidth = "{exact_rate(level.bytes_per_second)}"')
            lines.append(f'latency = "{exact_seconds(level.latency_seconds)}"')
            lines.append(f'duplex = "{"full" if level.full_duplex else "half"}"')
        return "\n".join(lines).lstrip("\n") + "\n"

    def grouped(self, parts: int | Sequence[int]) -> Cluster:
        """The cluster of groups of `parts` devices that follow each other, as the parts of a stage;
        of several numbers the size of each group, whose links count as the slowest between them.

        Raises:
            ClusterError: devices or levels do not divide, or devices of a group are unlike.
        """
        if not isinstance(parts, int):
            return self._in_groups(parts)
        if parts == 1:
            return self
        remedy = f"parts= a divisor of the devices of the innermost level, {self.levels[0].size}"
        left, inside, outside = parts, list[Level](), list[Level]()
        for level in self.levels:
            if left > 1:
                inside.append(level)
            joined = math.gcd(left, level.size)
            if joined < min(left, level.size):
                raise ClusterError(
                    f"parts={parts}: groups of {parts} devices do not divide the {level.size} that "
                    f"{level.name!r} joins",
                    remedy=remedy,
                )
            left //= joined
            outside += [replace(level, size=level.size // joined)] * (joined < level.size)
        groups = [self.devices[i : i + parts] for i in range(0, len(self.devices), parts)]
        unlike = next((group for group in groups if len(set(group)) > 1), None)
        if left > 1 or unlike:
            said = f"a group of unlike devices: {unlike}" if unlike else f"{len(self.devices)} are"
            raise ClusterError(f"parts={parts} devices a group, and {said}", remedy=remedy)
        return replace(
            self,
            devices=tuple(group[0] for group in groups),
            levels=tuple(outside or [replace(self.levels[-1], size=1)]),
            parts=replace(slowest(inside), name=inside[-1].name, size=parts),
        )

    def _in_groups(self, sizes: Sequence[int]) -> Cluster:
        ends = [*accumulate(sizes)]
        runs = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        unlike = [run for run in runs if len(set(self.devices[slice(*run)])) > 1]
        if unlike or len(self.devices) != ends[-1]:
            said = f"{len(self.devices)} are there, not {ends[-1]}"
            if unlike:
                said = f"devices {unlike[0][0]} to {unlike[0][1] - 1}, of one group, are unlike"
            raise ClusterError(
                f"stages of {', '.join(map(str, sizes))} devices, and {said}",
                remedy=f"a cluster of {ends[-1]} devices, alike where they are parts of one stage",
            )
        inside = [self.level_between(a, end - 1) for a, end in runs if end - a > 1]
        outside = [self.level_between(0, a) for a, _ in runs[1:]]
        return replace(
            self,
            devices=tuple(self.devices[a] for a, _ in runs),
            levels=(replace(slowest(outside), name=outside[-1].name, size=len(runs)),),
            parts=replace(slowest(inside), name=inside[-1].name, size=max(sizes)),
        )

    @property
    def on_host(self) -> bool:
        """True if all devices compute in the memory of their hosts."""
        return all(device.on_host for device in self.devices)

    @property
    def apart(self) -> bool:
        """True if none of them does."""
        return not any(device.on_host for device in self.devices)

    def level_between(self, a: int, b: int) -> Level:
        """The level that joins devices a and b: the innermost one whose block holds both.

        Raises:
            ClusterError: no such device.
        """
        for rank in (a, b):
            if not 0 <= rank < len(self.devices):
                raise ClusterError(
                    f"there is no device {rank}: the cluster has {len(self.devices)}",
                    remedy=f"a number from 0 to {len(self.devices) - 1}",
                )
        block = 1
        for level in self.levels:
            block *= level.size
            if a // block == b // block:
                break
        return level


def counts_of(text: str) -> tuple[int, int]:
    """Hosts and devices of each in ``2x4`` or ``4``; (0, 0) for another text, or too many."""
    match = re.fullmatch(r"(?:([1-9][0-9]{0,5})[x×])?([1-9][0-9]{0,5})", text.strip())
    hosts, devices = (int(match[1] or 1), int(match[2])) if match else (0, 0)
    return (hosts, devices) if hosts * devices <= MAX_DEVICES else (0, 0)


@dataclass(frozen=True, slots=True)
class _DeviceRow:
    count: int = 1
    kind: str = HOST_KIND
    memory: Any = None
    speed: float = 1.0
    host_bandwidth: Any = None


@dataclass(frozen=True, slots=True)
class _LevelRow:
    name: str = "link"
    size: int = 0
    bandwidth: Any = math.inf
    latency: Any = 0.0
    duplex: Literal["full", "half"] = "full"


@dataclass(frozen=True, slots=True)
class _File:
    """The contents of a cluster.toml."""

    devices: tuple[_DeviceRow, ...] = ()
    levels: tuple[_LevelRow, ...] = ()
    notes: tuple[str, ...] = ()
    in_process: bool = False
    parts: _LevelRow | None = None


def _read(data: Any, where: str) -> Cluster:
    file = decode(_File, data, where=where, error=ClusterError)
    _refuse(_wrong_rows(file), where)
    devices: list[Device] = []
    for i, row in enumerate(file.devices):
        devices += [_device(row, f"{where}: devices[{i}]")] * row.count
    levels = [_level(row, f"{where}: levels[{i}]") for i, row in enumerate(file.levels)]
    parts = None if file.parts is None else _level(file.parts, f"{where}: parts")
    _refuse(_wrong_counts(len(devices), [level.size for level in levels]), where)
    levels = levels or [Level("host", 1, math.inf)]
    return Cluster(tuple(devices), tuple(levels), file.in_process, file.notes, parts)


def _refuse(found: Iterable[tuple[str, str, str]], where: str) -> None:
    for path, message, remedy in found:
        raise ClusterError(message, where=f"{where}: {path}" if path else where, remedy=remedy)


def _wrong_rows(file: _File) -> Iterator[tuple[str, str, str]]:
    """Path, message and remedy of what no row has; units are left to their parsers."""
    some = f"a number from 1 to {MAX_DEVICES}"
    for i, device in enumerate(file.devices):
        if not 1 <= device.count <= MAX_DEVICES:
            yield f"devices[{i}].count", f"{device.count} devices of a kind", some
        if not 1e-6 <= device.speed <= 1e6:  # searches square seconds: they are to stay finite
            remedy = "1.0 is as fast as where the costs were measured, 2.0 twice as fast"
            yield f"devices[{i}].speed", f"speed is {device.speed!r}, not from 1e-6 to 1e6", remedy
        wrong = misspelt(device.kind, HOST_KIND, GPU_KIND)
        yield from ((f"devices[{i}].kind", *found) for found in wrong)
    rows = [*((f"levels[{i}]", row) for i, row in enumerate(file.levels)), ("parts", file.parts)]
    for place, row in rows:
        if row is not None and not 1 <= row.size <= MAX_DEVICES:
            remedy = f"{some}: how many blocks it joins"
            yield f"{place}.size", f"size is {row.size}, not from 1", remedy


def _wrong_counts(count: int, sizes: Sequence[int]) -> Iterator[tuple[str, str, str]]:
    """The same of so many devices, and of levels of these sizes."""
    if not count:
        yield "", "the cluster has no devices", "add a [[devices]] table"
    if count > 1 and not sizes:
        message = f"{count} devices, and nothing of the links between them"
        yield "", message, f"add a [[levels]] table with name, size = {count} and bandwidth"
    if sizes and math.prod(sizes) != count:
        message = f"level sizes {' x '.join(map(str, sizes))} multiply to {math.prod(sizes)}, but "
        remedy = "make the product of the sizes equal to the number of devices"
        yield "levels", f"{message}there are {count} devices", remedy


def _device(row: _DeviceRow, where: str) -> Device:
    memory = row.memory
    if memory is not None:
        memory = parse_bytes(memory, what="memory", where=f"{where}.memory")
    rate = row.host_bandwidth
    rate = None if rate is None else _rate(rate, "host_bandwidth", where)
    return Device(row.kind, memory, row.speed, rate)


def _rate(given: Any, name: str, where: str) -> float:
    rate = parse_rate(given, what=name, where=f"{where}.{name}")
    if rate < 1:
        raise ClusterError(
            f"{name} is {rate:.3g} bytes per second",
            where=f"{where}.{name}",
            remedy='give what a device can send per second, such as "12.5 GB/s"',
        )
    return rate


def _level(row: _LevelRow, where: str) -> Level:
    rate = row.bandwidth
    if rate is not math.inf:
        rate = _rate(rate, "bandwidth", where)
    seconds = parse_seconds(row.latency, what="latency", where=f"{where}.latency")
    return Level(row.name, row.size, rate, seconds, row.duplex == "full")


def _quote(text: str) -> str:
    """A TOML basic string: JSON's escapes, and DEL, which TOML wants escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
