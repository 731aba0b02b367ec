"""Device of a process: where its tensors live, and in what order work on them is done.

On the CPU work is done when a call returns.  On a GPU it is queued, and a rank's program is the
order of one stream, on which all of its stages compute.  Only copies to the host go on beside that:
they begin after what the stream had queued when their instruction came.  So what a program is
proved to do in its order is done in that order on the device.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from threading import Event as Flag
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from pdcompile.errors import LaunchError, PdcompileError
from pdcompile.hardware import devices
from pdcompile.plan import Plan


class DeviceFailed(PdcompileError):
    """Error with which something queued on the device ended."""


class Handle:
    """A message in flight.  `wait` returns its tensor."""

    def ready(self) -> bool:
        """True if wait returns at once."""
        return False

    def wait(self) -> Tensor:
        raise NotImplementedError


class Fetched(Handle):
    """A tensor in host memory that may be on its way there; `source` is kept until it has come."""

    def __init__(
        self, tensor: Tensor, done: Any = None, source: Tensor | None = None,
        starter: Starter | None = None,
    ) -> None:  # fmt: skip
        self.tensor = tensor
        self._done, self._source, self._starter = done, source, starter

    def ready(self) -> bool:
        return self._done is None or self._done.query()

    def wait(self) -> Tensor:
        if self._done is not None:
            self._done.synchronize()
            self._done = self._source = None
        return self.tensor

    def then(self, start: Callable[..., Any], *what: Any) -> Any:
        """Begin what reads the tensor when it has come, and go on; returns the Work of that.

        With a starter it begins after all that the starter was given before: what a peer gets comes
        in the order of the program, whether it was on the device or not.
        """
        if self._starter is None:
            return start(*what)
        return self._starter.begin(self._done, partial(start, *what))


class Deferred:
    """The Work of something that begins when a device is past an event."""

    def __init__(self, done: Any, start: Callable[[], Any]) -> None:
        self._done = done
        self._start: Callable[[], Any] | None = start
        self.over = Flag()
        self._work: Any = None
        self._failed: str | None = None

    def run(self) -> None:
        """Wait for the event, and begin."""
        done = self._done
        try:
            if done is not None:
                done.synchronize()
            start = self._start
            self._work = None if start is None else start()
        except RuntimeError as error:  # its frames hold the Work: keep the text alone
            self._failed = str(error)
        self.drop()

    def drop(self) -> None:
        """Let go of everything; who waits goes on."""
        self._done = self._start = None
        self.over.set()

    def wait(self) -> None:
        self.over.wait()
        if self._failed is not None:
            raise RuntimeError(self._failed)
        work, self._work = self._work, None
        if work is not None:
            work.wait()


class Starter:
    """Begins things on a thread of its own, in order, so that no program waits for its device."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Deferred] = SimpleQueue()
        self._waiting: list[Deferred] = []
        self._thread: Thread | None = None

    def begin(self, done: Any, start: Callable[[], Any]) -> Any:
        """Begin when the device is past `done`, or at once if nothing before waits; returns the
        Work of that."""
        self._waiting = [one for one in self._waiting if not one.over.is_set()]
        if done is None and not self._waiting:
            return start()
        found = Deferred(done, start)
        self._waiting.append(found)
        if self._thread is None:
            self._thread = Thread(
                target=_run_all, args=(self._queue,), name="pdcompile fetches", daemon=True
            )
            self._thread.start()
        self._queue.put(found)
        return found

    def abandon(self) -> None:
        """Begin nothing more, so that connections can close."""
        for one in self._waiting:
            one.drop()
        self._waiting.clear()


def _run_all(queue: SimpleQueue[Deferred]) -> None:
    while True:
        one = queue.get()
        if not one.over.is_set():
            one.run()
        del one  # while nothing comes


class RankDevice:
    """The device of a process: the CPU, where what is computed is there when a call returns."""

    device = devices.HOST
    queued = False  # work is queued, and is not done when a call returns

    def computing(self) -> AbstractContextManager[None]:
        """Context of a program: runs it between what the user has queued and will queue."""
        return nullcontext()

    def making(self) -> AbstractContextManager[object]:
        """Context of a forward: tensors that it makes of nothing are on the device."""
        return devices.making(self.device)

    def empty(self, num_bytes: int) -> Tensor:
        """Memory on the device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def place(self, tensor: Tensor, *, pinned: bool = False) -> Tensor:
        """The tensor on the device; what is computed from now on finds it there.

        `pinned`: it is in memory of `pinned`, which nobody writes any more.
        """
        return devices.to_host(tensor)

    def fetch(self, tensor: Tensor) -> Fetched:
        """The tensor in host memory, as soon as it has been computed."""
        return Fetched(devices.to_host(tensor))

    def pinned(self, num_bytes: int) -> Tensor:
        """Memory of the host from which `place` copies while the host goes on."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def drain(self) -> None:
        """Wait for what is queued."""

    def abandon(self) -> None:
        """Begin nothing that still waits for the device."""


class QueuedDevice(RankDevice):
    """One GPU of a process.

    All memory is from the allocator of the present stream, that of computing while a program runs:
    what is freed there is used again by what is queued there later.  Copies to the device are
    queued there too; copies to the host go on beside it, while somebody keeps the source.  Memory
    of the host is torch's own pool of pinned memory, which uses none again before the copies that
    were begun with it are over.
    """

    queued = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """`cuda`: has the streams and events."""
        self.device = device
        self._cuda = cuda
        self._compute, self._outward = (cuda.Stream(device=device) for _ in range(2))
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

    @torch.no_grad()
    def place(self, tensor: Tensor, *, pinned: bool = False) -> Tensor:
        if not devices.on_host(tensor):
            return tensor
        source = tensor if pinned else self.pinned_like(tensor).copy_(tensor)
        target = torch.empty_like(tensor, device=self.device, requires_grad=False)
        return target.copy_(source, non_blocking=True)

    @torch.no_grad()
    def fetch(self, tensor: Tensor) -> Fetched:
        if devices.on_host(tensor):
            return Fetched(tensor, starter=self._starter)
        copy = self.pinned_like(tensor)
        self._outward.wait_stream(self._cuda.current_stream(self.device))
        with self._cuda.stream(self._outward):
            copy.copy_(tensor, non_blocking=True)
        return Fetched(copy, self._past(self._outward), tensor, self._starter)

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Memory of the host for a copy that goes on while the host does."""
        return torch.empty_like(tensor, device=devices.HOST, pin_memory=True, requires_grad=False)

    def pinned(self, num_bytes: int) -> Tensor:
        return self.pinned_like(torch.empty(num_bytes, dtype=torch.uint8, device="meta"))

    def _past(self, stream: Any) -> Any:
        """Event behind all that the stream has."""
        found = self._cuda.Event(blocking=True)  # who waits for it sleeps
        found.record(stream)
        return found

    def drain(self) -> None:
        self._past(self._compute).synchronize()

    def abandon(self) -> None:
        self._compute.wait_stream(self._outward)  # what it reads is about to be freed
        self._starter.abandon()


def keep_freed_memory() -> None:
    """Lets glibc keep what tensors free for the next ones, unless the environment tunes it: at the
    end of a step more is free than it keeps, and the next one waits for pages to be mapped anew."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(n.startswith(("MALLOC_", "GLIBC_T")) for n in os.environ):
        for threshold in (-1, -3):  # of trimming, and of blocks that are mapped one by one
            mallopt(threshold, (1 << 31) - 1)  # bytes


def device_of(plan: Plan, ranks: Collection[int], *, alone: bool) -> RankDevice:
    """The device of a process that has these ranks.

    The processes of a host have GPUs by their numbers (LOCAL_RANK), in turn where there are fewer;
    a process that is `alone` has all stages on the first one that torch sees.

    Raises:
        LaunchError: torch finds no GPU.
    """
    own = [plan.machines.devices[rank] for rank in ranks]
    others = {device.kind for device in own if not device.on_host}
    if not others:
        keep_freed_memory()
        return RankDevice()
    if not (count := devices.gpus()):
        raise LaunchError(
            f"the plan has this process on {', '.join(sorted(others))}, and torch finds no GPU",
            where="plan: cluster",
            remedy="run it on such machines, or plan again for what is here: --cluster auto",
        )
    number = 0 if alone else int(os.environ.get("LOCAL_RANK", "0"))
    return QueuedDevice(devices.gpu(number % count))
