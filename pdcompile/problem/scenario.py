"""Scenario: other machines and another schedule for a plan's problem, and the new cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from pdcompile.cluster import MAX_DEVICES, Cluster, Device, Level
from pdcompile.errors import ConfigError
from pdcompile.units import format_rate

NEW_LEVEL = "network"
NEW_BYTES_PER_SECOND = 12.5e9  # what `Cluster.parse` assumes between hosts
INNER, OUTER = "intra", "inter"
T = TypeVar("T")

Named = tuple[tuple[str | None, float], ...]  # (level, its new number); None: every level


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is left out stays as it is.

    `devices` are the sizes of the levels, outermost first (hosts x devices).  `memory_bytes` is
    of every device.  Bandwidths in bytes per second and latencies in seconds by the name of a
    level, ``intra`` and ``inter`` (innermost and outermost), or None for all.  `speed` by device,
    None for all.  `batch_size` are samples of a minibatch.
    """

    devices: tuple[int, ...] | None = None
    memory_bytes: int | Literal["none"] | None = None
    bandwidth: Named = ()
    latency: Named = ()
    speed: tuple[tuple[int | None, float], ...] = ()
    schedule: str | None = None
    microbatches: int | None = None
    batch_size: int | None = None

    @property
    def of_machines(self) -> bool:
        """Whether it changes what the stages run on."""
        limits = (self.bandwidth, self.latency, self.speed)
        return self.devices is not None or self.memory_bytes is not None or any(limits)


def changed_cluster(cluster: Cluster, scenario: Scenario) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster of the scenario, and what had to be assumed.

    Raises:
        ConfigError: a level or device is not there or named twice, or devices that are unlike
            would have to be made more or fewer.
    """
    notes: tuple[str, ...] = ()
    if scenario.devices is not None:
        cluster, notes = _resized(cluster, scenario.devices)
    rates = _by_level(cluster.levels, scenario.bandwidth, "--bandwidth", "12.5GB/s")
    times = _by_level(cluster.levels, scenario.latency, "--latency", "5us")
    if notes and len(cluster.levels) - 1 in rates:
        notes = ()
    levels = tuple(
        replace(
            level,
            bytes_per_second=rates.get(i, level.bytes_per_second),
            latency_seconds=times.get(i, level.latency_seconds),
        )
        for i, level in enumerate(cluster.levels)
    )
    devices = _sped(cluster.devices, scenario.speed)
    if scenario.memory_bytes is not None:
        limit = None if scenario.memory_bytes == "none" else scenario.memory_bytes
        devices = tuple(replace(device, memory_bytes=limit) for device in devices)
    return replace(cluster, levels=levels, devices=devices), notes


def _resized(cluster: Cluster, sizes: tuple[int, ...]) -> tuple[Cluster, tuple[str, ...]]:
    count = math.prod(sizes)
    if not sizes or min(sizes) < 1 or count > MAX_DEVICES:
        raise ConfigError(
            f"--devices {_text(sizes)} is {count} devices",
            where="--devices",
            remedy=f"1 to {MAX_DEVICES}, as HOSTSxDEVICES: --devices 4x8",
        )
    if count != len(cluster.devices) and len(set(cluster.devices)) > 1:
        raise ConfigError(
            f"--devices {_text(sizes)}: the plan's {len(cluster.devices)} devices are unlike, so "
            "it cannot be told which would be added or left out",
            where="--devices",
            remedy="describe the machines in a cluster.toml and plan with it",
        )
    levels = list(cluster.levels)
    notes: tuple[str, ...] = ()
    inner_first = list(reversed(sizes))
    if len(inner_first) == len(levels) + 1:
        name = NEW_LEVEL
        while name in {level.name for level in levels}:
            name += "'"
        levels.append(Level(name, 1, NEW_BYTES_PER_SECOND))
        notes = (
            f"the plan's cluster has one level of links less: assumed "
            f"{format_rate(NEW_BYTES_PER_SECOND)} over {name!r}; --bandwidth {OUTER}=… says "
            "otherwise",
        )
    if len(inner_first) > len(levels):
        raise ConfigError(
            f"--devices {_text(sizes)} has {len(sizes)} levels, and the plan's cluster "
            f"{len(cluster.levels)}: {_names(cluster.levels)}",
            where="--devices",
            remedy="describe the machines in a cluster.toml and plan with it",
        )
    inner_first += [1] * (len(levels) - len(inner_first))
    resized = tuple(
        replace(level, size=size) for level, size in zip(levels, inner_first, strict=True)
    )
    devices = cluster.devices
    if count != len(devices):
        devices = devices[:1] * count
    return replace(cluster, levels=resized, devices=devices), notes


def _by_level(levels: Sequence[Level], given: Named, option: str, example: str) -> dict[int, float]:
    """New numbers by the level's index."""
    indices = ((None if key is None else _level(levels, key, option, example)) for key, _ in given)
    remedy = f"name levels: {option} {levels[0].name}={example}; there are {_names(levels)}"
    names = [f"level {level.name!r}" for level in levels]
    return _numbered(zip(indices, given, strict=True), names, option, remedy)


def _numbered(
    given: Iterable[tuple[int | None, tuple[object, float]]],
    names: Sequence[str],
    option: str,
    remedy: str,
) -> dict[int, float]:
    """Numbers by index; one that is given for an index goes before one for all (None)."""
    named: dict[int | None, tuple[object, float]] = {}
    for index, (key, number) in given:
        if index in named:
            if index is None:
                message = f"{option} is given 2 times for all"
                raise ConfigError(message, where=option, remedy=remedy)
            other = named[index][0]
            spelled = f": as {other!r} and as {key!r}" if other != key else ""
            raise ConfigError(
                f"{option} is given twice for {names[index]}{spelled}",
                where=option,
                remedy="give it once",
            )
        named[index] = key, number
    everywhere = [named.get(i, named.get(None)) for i in range(len(names))]
    return {i: found[1] for i, found in enumerate(everywhere) if found is not None}


def _level(levels: Sequence[Level], name: str, option: str, example: str) -> int:
    own = [i for i, level in enumerate(levels) if level.name == name]
    if len(own) == 1:
        return own[0]
    aliases = {INNER: 0, OUTER: len(levels) - 1}
    if not own and name in aliases:
        return aliases[name]
    trouble = "several levels are" if own else "no level is"
    raise ConfigError(
        f"{trouble} named {name!r}: the plan's cluster has {_names(levels)}",
        where=option,
        remedy=f"{option} {OUTER if own else levels[0].name}={example} "
        f"({INNER}: the innermost level, {OUTER}: the outermost)",
    )


def _sped(
    devices: tuple[Device, ...], given: tuple[tuple[int | None, float], ...]
) -> tuple[Device, ...]:
    for device, _ in given:
        if device is not None and device >= len(devices):
            raise ConfigError(
                f"there is no device {device}: there are {len(devices)}",
                where="--speed",
                remedy=f"0 to {len(devices) - 1}",
            )
    names = [f"device {i}" for i in range(len(devices))]
    pairs = ((device, (device, speed)) for device, speed in given)
    speeds = _numbered(pairs, names, "--speed", "name devices: --speed 0=0.5")
    return tuple(replace(one, speed=speeds.get(i, one.speed)) for i, one in enumerate(devices))


def parse_named(text: str, option: str, parse: Callable[[str], T]) -> tuple[str | None, T]:
    """``inter=12.5GB/s`` or ``25Gbit/s`` (None: all levels).

    Raises:
        ConfigError: nothing before or after the sign, or a unit that is none.
    """
    name, sign, number = text.partition("=")
    if not sign:
        return None, parse(text)
    if not name.strip() or not number.strip():
        raise ConfigError(
            f"{option} {text!r} is not NAME=NUMBER",
            where=option,
            remedy="a level's name, = and a number with its unit; or the number alone for all",
        )
    return name.strip(), parse(number)


def parse_devices(text: str) -> tuple[int, ...]:
    """``4x8``: sizes of the levels, outermost first.  Raises ConfigError for other texts."""
    parts = text.lower().replace("×", "x").split("x")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise ConfigError(
            f"--devices {text!r} is not HOSTSxDEVICES",
            where="--devices",
            remedy="--devices 4x8 for 4 hosts of 8 devices, --devices 8 for one host",
        )
    if any(len(part.strip()) > 6 for part in parts):
        raise ConfigError(
            f"--devices {text!r} is too many", where="--devices", remedy="for example 4x8"
        )
    return tuple(int(part) for part in parts)


def _names(levels: Sequence[Level]) -> str:
    return ", ".join(repr(level.name) for level in levels) + " (innermost first)"


def _text(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
