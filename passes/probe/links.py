"""Links and devices of a torchrun job, measured: messages between each pair of ranks, one pair at a
time and all at once, and what one device computes.

Every rank calls the same functions in the same order.  Nothing but torch.distributed's own group of
all ranks is used, so what is measured is what any program has.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from pdcompile.cluster import HOST_KIND
from pdcompile.errors import LaunchError, store_errors
from pdcompile.hardware import devices, host
from pdcompile.hardware.data_sheets import kind_of_name
from pdcompile.passes.costs.machines import Machine, calibrate
from pdcompile.passes.probe.levels import PairTimes, partner

SMALL, LARGE = 8, 4_000_000  # bytes of a message, for latency and for bandwidth
TRIPS, LARGE_TRIPS = 20, 5  # there and back
BUDGET = 0.3  # seconds to measure a device


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """One rank's device: what it is, and what it reaches in float32."""

    host: str
    name: str
    kind: str  # as clusters and cost models name it
    memory_bytes: int
    machine: Machine


@contextmanager
def job() -> Iterator[tuple[int, int, torch.device]]:
    """(rank, ranks, device) of this process, connected to the others: each rank has the GPU of its
    number where every rank of a host has one, else the CPU.

    Raises:
        LaunchError: not started by torchrun, or its store cannot be reached.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in os.environ]
    if missing:
        raise LaunchError(
            f"{', '.join(missing)} not set: links are measured between processes",
            remedy="torchrun --nproc-per-node=4 -m pdcompile probe -o cluster.toml",
        )
    local, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = devices.of_process(local, ranks)
    ours = not dist.is_initialized()
    if ours:
        devices.apart_for_nccl()
        with store_errors():
            dist.init_process_group("gloo" if devices.is_host(device) else devices.BACKENDS)
    try:
        yield dist.get_rank(), dist.get_world_size(), device
        together()  # who leaves early looks like a failure to the others
    finally:
        if ours:
            dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[tuple[int, int, torch.device]]:
    """Place as `job` gives it, for one process that nobody else has started."""
    yield 0, 1, devices.of_process(0, 1)


def together() -> None:
    """Waits for all ranks; over the host's memory, whatever the device."""
    dist.all_reduce(torch.zeros(1))


def gathered(value: Any) -> list[Any]:
    """The values of each rank, on all ranks."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def measure_pairs(
    rank: int, ranks: int, device: torch.device, said: Callable[[str], None] = lambda _: None
) -> PairTimes:
    """Times between each pair of ranks, while all others wait.  Needs about a third of a second a
    pair where links are slow."""
    mine: dict[tuple[int, int], tuple[float, float, float]] = {}
    for a in range(ranks):
        for b in range(a + 1, ranks):
            together()
            if rank in (a, b):
                said(f"ranks {a} and {b} of {ranks}")
                mine[a, b] = _pair(rank == a, b if rank == a else a, device)
    together()
    found = {pair: times for one in gathered(mine) for pair, times in one.items()}

    def matrix(which: int) -> list[list[float]]:
        return [
            [found[min(a, b), max(a, b)][which] if a != b else 0.0 for b in range(ranks)]
            for a in range(ranks)
        ]

    return PairTimes(matrix(0), matrix(1), matrix(2))


def _pair(first: bool, other: int, device: torch.device) -> tuple[float, float, float]:
    """Latency, bytes per second one way, and each way where both send."""
    small = torch.zeros(SMALL, dtype=torch.uint8, device=device)
    large, back = (torch.zeros(LARGE, dtype=torch.uint8, device=device) for _ in range(2))

    def there_and_back(message: torch.Tensor) -> None:
        if first:
            dist.send(message, other)
            dist.recv(message, other)
        else:
            dist.recv(message, other)
            dist.send(message, other)

    latency = _typical(lambda: there_and_back(small), device, TRIPS) / 2
    alone = _typical(lambda: there_and_back(large), device, LARGE_TRIPS) / 2
    both = _typical(lambda: _exchange(large, other, back, other), device, LARGE_TRIPS)
    return latency, LARGE / max(alone - latency, alone / 10), LARGE / both


def measure_at_once(rank: int, sizes: Sequence[int], device: torch.device) -> tuple[float, ...]:
    """Bytes per second of the slowest device at each level, while all send on that level.

    Args:
        sizes: devices in a block of each level, innermost first.
    """
    found = []
    for inner, outer in zip((1, *sizes), sizes, strict=False):
        to, origin = partner(rank, inner, outer)
        out, into = (torch.zeros(LARGE, dtype=torch.uint8, device=device) for _ in range(2))

        def shift(to: int = to, origin: int = origin, out: Any = out, into: Any = into) -> None:
            _exchange(out, to, into, origin)

        together()
        found.append(LARGE / max(gathered(_typical(shift, device, LARGE_TRIPS))))
    return tuple(found)


def _exchange(out: torch.Tensor, to: int, into: torch.Tensor, origin: int) -> None:
    """Sends and receives at the same time.  NCCL wants to know of both before it begins."""
    if not devices.on_host(out):
        send, receive = dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, into, origin)
        works = dist.batch_isend_irecv([send, receive])
    else:
        works = [work for work in (dist.isend(out, to), dist.irecv(into, origin)) if work]
    for work in works:
        work.wait()


def _typical(run: Callable[[], None], device: torch.device, times: int) -> float:
    """Median seconds of so many runs after a first one, which connects.  Both ends count alike, so
    that none waits for a message that the other does not send."""
    run()
    taken = []
    for _ in range(times):
        devices.synchronize(device)
        began = time.perf_counter()
        run()
        devices.synchronize(device)
        taken.append(time.perf_counter() - began)
    return median(taken)


def measure_device(device: torch.device) -> DeviceSpeed:
    """Rates that this rank's device reaches; takes some tenths of a second."""
    if not devices.is_host(device):
        name = devices.gpu_name(device)
        kind, memory = kind_of_name(name), devices.gpu_memory_bytes(device)
    else:
        threads = torch.get_num_threads()
        kind, name = HOST_KIND, f"CPU, {f'{threads} threads' if threads > 1 else 'one thread'}"
        memory = (host.memory_bytes() or 0) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return DeviceSpeed(
        host=os.uname().nodename,
        name=name,
        kind=kind,
        memory_bytes=memory,
        machine=calibrate(BUDGET, str(device)),
    )
