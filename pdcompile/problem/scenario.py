"""Scenario: other machines than those of a plan, and the new cluster."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pdcompile.cluster import MAX_DEVICES, NETWORK, Cluster, Level
from pdcompile.errors import ConfigError, some
from pdcompile.options.row import Flag, option
from pdcompile.units import format_rate, parse_bytes, parse_rate, parse_seconds

NEW_BYTES_PER_SECOND = 12.5e9  # what `Cluster.parse` assumes between hosts
INNER, OUTER = "intra", "inter"
BY_HAND = "describe the machines in a cluster.toml and plan with it"


@dataclass(frozen=True, slots=True)
class Scenario:
    """Changed machines in the texts of the command line; what is left out stays as it is."""

    devices: str | None = option(
        None,
        "As many machines of the same kind: 4x8.",
        flag=Flag("HOSTSxDEVICES"),
        panel="Machines",
    )
    memory: str | None = option(
        None,
        "Memory limit of every device, for example 24GB; none: no limit.",
        flag=Flag("BYTES"),
        panel="Machines",
    )
    bandwidth: Sequence[str] | None = option(
        None,
        "Bandwidth of links, for example inter=12.5GB/s or 25Gbit/s. NAME is a level of the plan's "
        "cluster, intra (innermost) or inter (outermost); none: all. May be given several times.",
        flag=Flag("[NAME=]RATE", type=list[str]),
        panel="Machines",
    )
    latency: Sequence[str] | None = option(
        None,
        "Latency of a message, for example inter=5us. Named as --bandwidth.",
        flag=Flag("[NAME=]TIME", type=list[str]),
        panel="Machines",
    )
    speed: Sequence[str] | None = option(
        None,
        "Speed of devices relative to that of the costs: 2, or 3=0.5 for device 3.",
        flag=Flag("[DEVICE=]FACTOR", type=list[str]),
        panel="Machines",
    )

    @property
    def changes(self) -> bool:
        """True if any of it was said."""
        return any((self.devices, self.memory, self.bandwidth, self.latency, self.speed))


def changed_cluster(cluster: Cluster, scenario: Scenario) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster of the scenario, and what had to be assumed.

    Raises:
        ConfigError: a text has another form, a level or device is not there or named twice, or
            devices that are unlike would have to be made more or fewer.
    """
    notes: tuple[str, ...] = ()
    if scenario.devices is not None:
        cluster, notes = _resized(cluster, scenario.devices)
    levels, last = [level.name for level in cluster.levels], len(cluster.levels) - 1
    ends = {INNER: 0, OUTER: last}
    rates = _numbers(scenario.bandwidth, "--bandwidth", "level", levels, _rate, ends)
    times = _numbers(scenario.latency, "--latency", "level", levels, parse_seconds, ends)
    numbers = [*map(str, range(len(cluster.devices)))]
    speeds = _numbers(scenario.speed, "--speed", "device", numbers, _factor, {})
    devices = tuple(
        replace(one, speed=speeds.get(i, one.speed)) for i, one in enumerate(cluster.devices)
    )
    if scenario.memory is not None:
        none = scenario.memory.strip().lower() == "none"
        limit = None if none else parse_bytes(scenario.memory, what="--memory")
        devices = tuple(replace(device, memory_bytes=limit) for device in devices)
    joined = tuple(
        replace(
            level,
            bytes_per_second=rates.get(i, level.bytes_per_second),
            latency_seconds=times.get(i, level.latency_seconds),
        )
        for i, level in enumerate(cluster.levels)
    )
    return replace(cluster, levels=joined, devices=devices), () if last in rates else notes


def _resized(cluster: Cluster, text: str) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster with levels of other sizes, and perhaps one more, of which a note tells."""

    def refused(message: str, remedy: str) -> ConfigError:
        return ConfigError(f"--devices {text!r} {message}", where="--devices", remedy=remedy)

    parts = [part.strip() for part in text.lower().replace("×", "x").split("x")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,5}", part) for part in parts):
        remedy = "--devices 4x8 for 4 hosts of 8 devices, --devices 8 for one host"
        raise refused("is not HOSTSxDEVICES", remedy)
    sizes = [int(part) for part in reversed(parts)]  # innermost first, as levels are
    count, levels, devices = math.prod(sizes), list(cluster.levels), cluster.devices
    if count > MAX_DEVICES:
        raise refused(f"is {count} devices", f"1 to {MAX_DEVICES}, as HOSTSxDEVICES: --devices 4x8")
    if count != len(devices) and len(set(devices)) > 1:
        message = f"changes their number, but the plan's {len(devices)} devices are unlike"
        raise refused(message, BY_HAND)
    notes: tuple[str, ...] = ()
    if len(sizes) == len(levels) + 1:
        name = NETWORK
        while name in {level.name for level in levels}:
            name += "'"
        levels.append(Level(name, 1, NEW_BYTES_PER_SECOND))
        notes = (
            f"the plan's cluster has one level of links less: assumed "
            f"{format_rate(NEW_BYTES_PER_SECOND)} over {name!r}; --bandwidth {OUTER}=… says "
            "otherwise",
        )
    if len(sizes) > len(levels):
        names = ", ".join(repr(level.name) for level in levels)
        raise refused(f"has {len(sizes)} levels, and the plan's cluster {names}", BY_HAND)
    sizes += [1] * (len(levels) - len(sizes))
    resized = tuple(replace(one, size=size) for one, size in zip(levels, sizes, strict=True))
    if count != len(devices):
        devices = devices[:1] * count
    return replace(cluster, levels=resized, devices=devices), notes


def _numbers(
    texts: Sequence[str] | None,
    option: str,
    what: str,
    names: Sequence[str],
    parse: Callable[..., float],
    aliases: Mapping[str, int],
) -> dict[int, float]:
    """New numbers of levels or devices by their index, of ``NAME=NUMBER`` or ``NUMBER`` for all;
    one by name goes before one for all."""
    found: dict[int | None, float] = {}
    for text in texts or ():
        name, sign, number = map(str.strip, text.rpartition("="))
        where = [i for i, one in enumerate(names) if one == name]
        if not where and name in aliases:
            where = [aliases[name]]
        key = where[0] if where else None
        trouble = {
            f"{text!r} is not NAME=NUMBER": sign and not (name and number),
            f"{text!r}: no {what} is named {name!r}": sign and not where,
            f"{text!r}: several {what}s are named {name!r}": len(where) > 1,
            f"{text!r} is given twice for {f'{what} {name!r}' if sign else 'all'}": key in found,
        }
        for message in (said for said, is_so in trouble.items() if is_so):
            others = f", {INNER} (innermost) or {OUTER} (outermost)" if aliases else ""
            raise ConfigError(
                f"{option} {message}",
                where=option,
                remedy=f"once {option} NAME=NUMBER for each, or a number for all; names are "
                f"{some([*map(repr, names)], 8)}{others}",
            )
        found[key] = parse(number, what=option, where=option)
    everywhere = [found.get(i, found.get(None)) for i in range(len(names))]
    return {i: number for i, number in enumerate(everywhere) if number is not None}


def _rate(text: str, *, what: str, where: str) -> float:
    unlimited = text.lower() == "unlimited"
    rate = math.inf if unlimited else parse_rate(text, what=what, where=where)
    return _above_0(rate, text, where, f"{where} 12.5GB/s")


def _factor(text: str, *, what: str, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    finite = number if math.isfinite(number) else 0.0
    return _above_0(finite, text, where, f"{what} 2, or {what} 3=0.5 for device 3, from 0")


def _above_0(number: float, text: str, option: str, remedy: str) -> float:
    if not number > 0:
        message = f"{option} {text!r} is not a number above 0"
        raise ConfigError(message, where=option, remedy=remedy)
    return number
