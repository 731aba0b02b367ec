"""A cluster from measurements: devices with their speeds, and the levels that were found."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.hardware import host
from pdcompile.hardware.devices import is_host
from pdcompile.passes.probe.levels import PairTimes, block_sizes, levels
from pdcompile.passes.probe.links import DeviceSpeed, measure_at_once, measure_device, measure_pairs
from pdcompile.passes.probe.links import gathered as from_all
from pdcompile.units import three_digits

if TYPE_CHECKING:
    import torch

ALIKE = 0.2  # speeds that differ by less are one speed: measurements repeat no better


@dataclass(frozen=True, slots=True)
class Probed:
    """Measurements, and the cluster that they make."""

    cluster: Cluster
    devices: tuple[DeviceSpeed, ...]
    times: PairTimes | None  # None: one device


def probe(
    rank: int, ranks: int, device: torch.device, said: Callable[[str], None] = lambda _: None
) -> Probed:
    """Measures devices and links; every rank calls it and gets the same.

    Args:
        device: of this rank.
        said: called with what is being measured.
    """
    said("devices")
    speeds = tuple(from_all(measure_device(device)))
    crowded = any(from_all(is_host(device) and cores_are_shared()))
    if ranks == 1:
        level = Level("host", 1, math.inf)
        found = Cluster(devices_of(speeds), (level,), notes=tuple(_notes(speeds, crowded)))
        return Probed(found, speeds, None)
    times = measure_pairs(rank, ranks, device, said)
    sizes = block_sizes(times)
    said("all at once")
    at_once = measure_at_once(rank, sizes, device)
    joined, notes = levels(times, sizes, at_once, [one.host for one in speeds])
    devices = devices_of(speeds, crowded=crowded)
    cluster = Cluster(devices, joined, notes=(*_notes(speeds, crowded), *notes))
    return Probed(cluster, speeds, times)


def cores_are_shared() -> bool:
    """True if the processes of this host have more threads than it has cores."""
    import torch

    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return local > 1 and local * torch.get_num_threads() > host.cores()


def devices_of(speeds: Sequence[DeviceSpeed], *, crowded: bool = False) -> tuple[Device, ...]:
    """Devices with speeds relative to the first: the mean, in ratios, of products and copies.

    `crowded`: they took each other's time, so that those of one name count as equal.
    """
    first = speeds[0]
    found = []
    for one in speeds:
        ratio = math.sqrt(
            one.machine.flops_per_second / first.machine.flops_per_second
            * one.machine.bytes_per_second / first.machine.bytes_per_second
        )  # fmt: skip
        same = abs(math.log(ratio)) < ALIKE or (crowded and one.name == first.name)
        speed = 1.0 if same else float(f"{ratio:.2g}")
        memory = three_digits(one.memory_bytes, up=False)[0] if one.memory_bytes else None
        found.append(Device(one.kind, memory, speed))
    return tuple(found)


def _notes(speeds: Sequence[DeviceSpeed], crowded: bool) -> Iterator[str]:
    names = ", ".join(dict.fromkeys(one.name for one in speeds))
    hosts = len({one.host for one in speeds})
    yield (
        f"measured by pdcompile probe: {len(speeds)} x {names} on {hosts} "
        f"host{'s' if hosts > 1 else ''}"
    )
    if crowded:
        yield (
            "ranks of a host share its cores, and took each other's time while they were measured: "
            "devices of one name count as equally fast, and links are slower than they could be"
        )
