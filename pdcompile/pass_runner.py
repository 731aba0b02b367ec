"""Runs the passes one by one, with timing, progress and numbered dumps.

Under ``PDCOMPILE_DUMP=dir`` each form that a pass returns is written to a numbered file
(``dir/03_problem.txt``, or ``.json`` where the form has ``to_json``), so that two
compilations can be compared with diff, pass by pass.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from pdcompile.errors import ConfigError, errors_as

Form = TypeVar("Form")
#: passes that run no real tensors, or few
WITHOUT_TENSORS = frozenset(("graph", "parts", "problem", "plan", "proof", "forecast", "sources"))
ALLOCATIONS = 500_000  # net of deallocations, between two collections of the youngest objects


class Listener:
    """Receives the progress of a compilation; this one ignores it."""

    def starts(self, name: str) -> None:
        """A pass starts."""

    def ended(self, name: str, seconds: float) -> None:
        """A pass has ended."""

    def part(self, done: int, total: int, what: str) -> None:
        """The running pass has done so many of its parts and starts the next."""

    def steps(self, done: int, total: int, text: str) -> None:
        """Note that so many steps of a training are over; `text` is news of the last one."""

    def found(self, text: str) -> None:
        """The running search has found something better."""

    def told(self, text: str) -> None:
        """The running pass has something to say about its result."""


class PassRunner:
    """Runs passes by name: ``graph = step("graph", lambda: trace(model, inputs))``.

    `listener` is told when a pass starts and ends; `seconds` holds the duration of each pass,
    in order.
    """

    def __init__(self, listener: Listener | None = None):
        self.listener = listener or Listener()
        self.seconds: dict[str, float] = {}
        self.folder = os.environ.get("PDCOMPILE_DUMP")

    def __call__(self, name: str, run: Callable[[], Form]) -> Form:
        self.listener.starts(name)
        began = time.perf_counter()
        with collecting_seldom() if name in WITHOUT_TENSORS else nullcontext():
            form = run()
        self.seconds[name] = time.perf_counter() - began
        self.listener.ended(name, self.seconds[name])
        if self.folder:
            self._write(Path(self.folder), name, form)
        return form

    def _write(self, folder: Path, name: str, form: Any) -> None:
        to_json = getattr(form, "to_json", None)
        suffix, text = ("json", to_json()) if to_json else ("txt", str(form))
        path = folder / f"{len(self.seconds):02d}_{name}.{suffix}"
        remedy = "point PDCOMPILE_DUMP at a folder that can be written, or unset it"
        with errors_as(ConfigError, f"cannot write the form of pass '{name}'", path, remedy):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Makes Python's garbage collector run less often; afterwards as before.

    Graphs, schedules and plans are a million small objects that stay alive: collecting every 700
    took a fifth of the time of planning a large model.  Not for passes that run real tensors, as a
    circle of references may keep many bytes alive.
    """
    first, *later = gc.get_threshold()
    if 0 < first < ALLOCATIONS:
        gc.set_threshold(ALLOCATIONS, *later)
    try:
        yield
    finally:
        gc.set_threshold(first, *later)
