"""Progress on stderr: which pass runs, how far the measuring is, what the search found."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pdcompile.passes.published.solution import Progress as Reporter
from pdcompile.passes.published.solution import relative_gap
from pdcompile.steps import Listener

TITLE = "compiling"
EVERY = 5.0  # seconds between lines about one search


@contextmanager
def compiling(*, lines: bool, quiet: bool = False, title: str = TITLE) -> Iterator[Listener]:
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
            yield _Bar(bar, title)
    else:
        yield _Lines(console, title) if lines else Listener()


@contextmanager
def searching() -> Iterator[Reporter]:
    """A callback for solvers, which shows the best objective so far and the bound."""
    with compiling(lines=False, title="planning") as listener:
        yield lambda objective, bound: listener.found(found_text(objective, bound))


def found_text(objective: float | None, bound: float) -> str:
    """``best 3, bound 2, gap 33 %``."""
    parts = ["no plan yet" if objective is None else f"best {objective:.6g}"]
    if math.isfinite(bound) and bound > 0:
        parts.append(f"bound {bound:.6g}")
        if objective is not None:
            parts.append(f"gap {100 * relative_gap(objective, bound):.2g} %")
    return ", ".join(parts) + "  (Ctrl-C: stop with the best)"


class _Bar(Listener):
    def __init__(self, bar: Progress, title: str):
        self._bar = bar
        self._title = title
        self._task = bar.add_task(title, total=None)

    def starts(self, name: str) -> None:
        self._bar.update(self._task, description=f"{self._title}: {name}", total=None, completed=0)

    def part(self, done: int, total: int, what: str) -> None:
        name = what.rpartition(".")[2]
        parts = "stages" if what.startswith("stage ") else "ops"
        self._bar.update(
            self._task,
            description=f"{self._title}: measuring {done} of {total} {parts}, {name}",
            total=total,
            completed=done,
        )

    def found(self, text: str) -> None:
        self._bar.update(self._task, description=f"{self._title}: searching, {text}")

    def better(self, text: str) -> None:
        self._bar.console.print(f"plan after {text}", soft_wrap=True)


class _Lines(Listener):
    def __init__(self, console: Console, title: str):
        self._console = console
        self._title = title
        self._told = time.monotonic()

    def ended(self, name: str, seconds: float) -> None:
        self._console.print(f"{self._title}: {name} {seconds:.2f} s", soft_wrap=True)
        self._told = time.monotonic()

    def found(self, text: str) -> None:
        if time.monotonic() - self._told >= EVERY:
            self._told = time.monotonic()
            self._console.print(f"{self._title}: searching, {text}", soft_wrap=True)

    def better(self, text: str) -> None:
        self._console.print(f"plan after {text}", soft_wrap=True)
