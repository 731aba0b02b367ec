"""A GPU: one stream to compute on, and one for copies in each direction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from pdcompile.hardware import devices
from pdcompile.runtime.device.fetched import Event, Fetched, Starter
from pdcompile.runtime.device.rank_device import DeviceMemory, Landing, RankDevice


class QueuedDevice(RankDevice):
    """One GPU of a process.

    All memory is from the allocator of the present stream, that of computing while a program runs:
    what is freed there is used again by what is queued there later.  Copies beside it touch memory
    only between a `fork` of that stream and an event that it waits for, or, outwards, as long as
    somebody keeps the source.  Memory of the host is torch's own pool of pinned memory, which uses
    none again before the copies that were begun with it are over.
    """

    queued = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """`cuda`: has the streams and events."""
        self.device = device
        self._cuda = cuda
        self._compute, self._outward, self._inward = (cuda.Stream(device=device) for _ in range(3))
        self._starter = Starter()

    @contextmanager
    def computing(self) -> Iterator[None]:
        users = self._cuda.current_stream(self.device)
        self._compute.wait_stream(users)
        try:
            with self._cuda.stream(self._compute):
                yield
        finally:
            users.wait_stream(self._compute)

    def making(self) -> AbstractContextManager[object]:
        return self.device

    def on_host(self, tensor: Tensor) -> bool:
        return devices.on_host(tensor)

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    @torch.no_grad()
    def place(self, tensor: Tensor) -> Tensor:
        if not self.on_host(tensor):
            return tensor
        target = torch.empty_like(tensor, device=self.device, requires_grad=False)
        source = self.pinned_like(tensor).copy_(tensor)
        self.fill(target, source, self.fork())
        return target

    @torch.no_grad()
    def fetch(self, tensor: Tensor) -> Fetched:
        if self.on_host(tensor):
            return Fetched(tensor, starter=self._starter)
        copy = self.pinned_like(tensor)
        self._outward.wait_event(self.fork())
        with self._cuda.stream(self._outward):
            copy.copy_(tensor, non_blocking=True)
        return Fetched(copy, self._past(self._outward), tensor, self._starter)

    def landing(self, target: Tensor) -> Landing:
        return Landing(target) if self.on_host(target) else _Beside(self, target)

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Memory of the host for a copy that goes on while the host does."""
        return torch.empty_like(
            tensor, device=devices.HOST, pin_memory=True, requires_grad=False
        )  # fmt: skip

    def fork(self) -> Event:
        """Event behind all that has been queued so far."""
        return self._past(self._cuda.current_stream(self.device))

    def fill(self, target: Tensor, source: Tensor, free: Event) -> None:
        """Copy from pinned memory when the device is past `free`; what is queued from now on finds
        it there."""
        self._inward.wait_event(free)
        with self._cuda.stream(self._inward):
            target.copy_(source, non_blocking=True)
        self._cuda.current_stream(self.device).wait_event(self._past(self._inward))

    def _past(self, stream: Any) -> Event:
        found: Event = self._cuda.Event(blocking=True)  # who waits for it sleeps
        found.record(stream)  # type: ignore[attr-defined]
        return found

    def memory(self) -> DeviceMemory:
        free, total = self._cuda.mem_get_info(self.device)
        reserved = self._cuda.max_memory_reserved(self.device)
        return DeviceMemory(self._cuda.max_memory_allocated(self.device), reserved, free, total)

    def drain(self) -> None:
        self._past(self._compute).synchronize()

    def abandon(self) -> None:
        for copies in (self._outward, self._inward):
            self._compute.wait_stream(copies)  # what they work on is about to be freed
        self._starter.abandon()


class _Beside(Landing):
    """A message arrives in pinned memory, and goes on to the device."""

    beside = True

    def __init__(self, device: QueuedDevice, target: Tensor) -> None:
        super().__init__(device.pinned_like(target))
        self._device, self._target, self._free = device, target, device.fork()

    def arrived(self) -> None:
        self._device.fill(self._target, self.memory, self._free)
