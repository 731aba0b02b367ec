"""Copies that are on their way from a device, and what begins when they are there."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event as Flag
from threading import Thread
from typing import Any, Protocol

from torch import Tensor

from pdcompile.errors import PdcompileError


class DeviceFailed(PdcompileError):
    """Error with which something queued on the device ended."""


def device_failed(text: str) -> DeviceFailed:
    """The error for what torch said."""
    said = text.partition("\n")[0]
    return DeviceFailed(
        f"what was queued on the device failed: {said}",
        remedy="CUDA_LAUNCH_BLOCKING=1 names the op that did",
    )


class Event(Protocol):
    """A place in what a device has queued."""

    def query(self) -> bool:
        """True once the device is past it."""

    def synchronize(self) -> None:
        """Wait for that."""


class Fetched:
    """A tensor in host memory that may be on its way there; `source` is kept until it has come."""

    def __init__(
        self, tensor: Tensor, done: Event | None = None, source: Tensor | None = None,
        starter: Starter | None = None,
    ) -> None:  # fmt: skip
        self.tensor = tensor
        self._done, self._source, self._starter = done, source, starter

    def ready(self) -> bool:
        """True once `wait` returns at once."""
        return self._done is None or self._done.query()

    def wait(self) -> Tensor:
        if self._done is not None:
            self._done.synchronize()
            self._done = self._source = None
        return self.tensor

    def then(self, start: Callable[[], Any]) -> Any:
        """Begin what reads the tensor when it has come, and go on; returns the Work of that.

        With a starter it begins after all that the starter was given before: what a peer gets comes
        in the order of the program, whether it was on the device or not.
        """
        return start() if self._starter is None else self._starter.begin(self._done, start)


class Deferred:
    """The Work of something that begins when a device is past an event."""

    def __init__(self, done: Event | None, start: Callable[[], Any]) -> None:
        self._done = done
        self._start: Callable[[], Any] | None = start
        self._over = Flag()
        self._work: Any = None
        self._failed: Exception | None = None

    @property
    def begun(self) -> bool:
        return self._over.is_set()

    def run(self) -> None:
        """Wait for the event, and begin."""
        done = self._done
        try:
            if done is not None:
                done.synchronize()
        except Exception as error:
            self._failed = device_failed(str(error))
        else:
            self._begin()
        self.drop()

    def _begin(self) -> None:
        start = self._start
        try:
            self._work = None if start is None else start()
        except RuntimeError as error:  # its frames hold the Work: keep the text alone
            self._failed = RuntimeError(str(error))

    def drop(self) -> None:
        """Let go of everything; who waits goes on."""
        self._done = self._start = None
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self._failed is not None:
            raise self._failed
        work, self._work = self._work, None
        if work is not None:
            work.wait()


class Starter:
    """Begins things on a thread of its own, in order, so that no program waits for its device."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Deferred] = SimpleQueue()
        self._waiting: list[Deferred] = []
        self._thread: Thread | None = None

    def begin(self, done: Event | None, start: Callable[[], Any]) -> Any:
        """Begin when the device is past `done`, or at once if nothing before waits; returns the
        Work of that."""
        self._waiting = [one for one in self._waiting if not one.begun]
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
        if not one.begun:
            one.run()
        del one  # while nothing comes
