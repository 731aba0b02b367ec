"""Progress of a compilation: which pass runs, how far the measuring is, what the search found."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pdcompile.steps import Listener

TITLE = "compiling"


@contextmanager
def compiling(*, lines: bool, quiet: bool = False) -> Iterator[Listener]:
    """A listener for `Steps`: on a terminal a bar that disappears when all is done.

    Elsewhere `lines` chooses between one line a pass and nothing.  All of it goes to stderr,
    and under torchrun only rank 0 shows it.  `quiet`: nothing anywhere.
    """
    console = Console(file=sys.stderr, highlight=False)
    if quiet or os.environ.get("RANK", "0") != "0":
        yield Listener()
    elif console.is_terminal:
        with Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24),
            TimeElapsedColumn(), console=console, transient=True,
        ) as bar:  # fmt: skip
            yield _Bar(bar)
    else:
        yield _Lines(console) if lines else Listener()


class _Bar(Listener):
    def __init__(self, bar: Progress):
        self._bar = bar
        self._task = bar.add_task(TITLE, total=None)

    def starts(self, name: str) -> None:
        self._bar.update(self._task, description=f"{TITLE}: {name}", total=None, completed=0)

    def part(self, done: int, total: int, what: str) -> None:
        parts = "stages" if what.startswith("stage ") else "ops"
        self._bar.update(
            self._task,
            description=f"{TITLE}: measuring {done} of {total} {parts}, {what.rpartition('.')[2]}",
            total=total,
            completed=done,
        )

    def found(self, text: str) -> None:
        self._bar.update(self._task, description=f"{TITLE}: searching, {text}")


class _Lines(Listener):
    def __init__(self, console: Console):
        self._console = console

    def ended(self, name: str, seconds: float) -> None:
        self._console.print(f"{TITLE}: {name} {seconds:.2f} s", soft_wrap=True)
