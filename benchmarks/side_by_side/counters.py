"""Counters of what a process has sent, and of the most that it held."""

from __future__ import annotations

import gc
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from pdcompile.runtime.transport import parts_group, reductions

_BYTES_SENT = 200  # where struct tcp_info has tcpi_bytes_sent, and after it tcpi_bytes_retrans
_INFO_BYTES = 216
TRAINING = "training"  # from the first call on


def socket_bytes() -> int:
    """Bytes that this process has put on its open TCP connections, as the kernel counts them."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        with one:
            inet = one.family in (socket.AF_INET, socket.AF_INET6)
            if inet and one.type == socket.SOCK_STREAM:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(info) >= _INFO_BYTES:
                    sent, sent_again = struct.unpack_from("2Q", info, _BYTES_SENT)
                    found += sent - sent_again
    return found


def interface_bytes(interface: str) -> int:
    """Bytes that this network namespace has sent on an interface, headers and all."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    raise ValueError(f"no interface {interface!r} in /proc/self/net/dev")


@contextmanager
def frees_here() -> Iterator[None]:
    """Context in which exchanges between parts, and collectives of replicas, wait until gloo's
    thread has let go of memory.

    torch's profiler hears of what this thread frees alone.
    """
    before = parts_group.begun

    def begun(group: Any, x: Tensor, kind: str, count: int) -> tuple[Tensor, Any]:
        own = _uses(x)
        if kind == "scatter":  # gloo's thread lets go of a copy of x that it has summed
            whole, work = before(group, x, "sum", count)
            result = x.new_empty(x.shape[1:])
            done = _LetsGo(work, [(x, own), (whole, _uses(torch.empty(1)))])
            return result, _Scattered(done, whole, group.rank(), result)
        result, work = before(group, x, kind, count)
        return result, _LetsGo(work, [(x, own), (result, _uses(torch.empty(1)))])

    collective = reductions.unrecorded

    def unrecorded(begin: Callable[..., Any], flat: Tensor, *where: Any) -> Any:
        own = _uses(flat)
        return _LetsGo(collective(begin, flat, *where), [(flat, own)])

    parts_group.begun, reductions.unrecorded = begun, unrecorded  # type: ignore[assignment]
    try:
        yield
    finally:
        parts_group.begun, reductions.unrecorded = before, collective


class _LetsGo:
    """Work of a group that is over when it holds no memory: of tensors with so many other uses."""

    def __init__(self, work: Any, tensors: list[tuple[Tensor, tuple[int, int]]]) -> None:
        self._work, self._tensors = work, tensors

    def wait(self) -> None:
        self._work.wait()
        self._work = None
        for tensor, others in self._tensors:
            while any(now > own for now, own in zip(_uses(tensor), others, strict=True)):
                time.sleep(1e-4)


class _Scattered:
    """A sum of which each part takes its share."""

    def __init__(self, work: _LetsGo, whole: Tensor, part: int, result: Tensor) -> None:
        self._work, self._whole, self._part, self._result = work, whole, part, result

    def wait(self) -> None:
        self._work.wait()
        self._result.copy_(self._whole[self._part])


def _uses(tensor: Tensor) -> tuple[int, int]:
    """Uses of a tensor, and of its memory by this one and others."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class Peak:
    """The most bytes that torch's CPU allocator had given out at one time, since training began."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def read(self, seen: profile) -> None:
        assert seen.profiler is not None
        events = sorted(seen.profiler.kineto_results.events(), key=lambda one: one.start_ns())
        now, trains = 0, False
        for event in events:
            trains = trains or event.name() == TRAINING
            if event.name() == "[memory]":
                now += event.nbytes()
            if trains:
                self.num_bytes = max(self.num_bytes, now)


@contextmanager
def peak_memory() -> Iterator[tuple[Peak, Callable[[], record_function]]]:
    """Around what makes a model and trains it: a peak, filled in at the end, and the mark of the
    training, a context manager.  Weights count, and so does what kernels allocate inside."""
    gc.collect()
    found = Peak()
    with frees_here(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:

        def training() -> record_function:
            gc.collect()
            return record_function(TRAINING)

        yield found, training
    found.read(seen)
