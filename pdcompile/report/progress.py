"""Progress on stderr: which pass runs, how far the measuring is, what the search found.

On a terminal it is a bar.  Elsewhere whatever takes long says so: a line after 10 seconds and then
every 30, with the pass, how far it is, and what is to come.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pdcompile.pass_runner import Listener

TITLE = "compiling"
FIRST, EVERY = 10.0, 30.0  # seconds until the first line about one pass, and between further ones
PASSES = (
    "graph", "costs", "problem", "plan", "refined", "proof", "forecast", "sources", "verified",
)  # fmt: skip


@contextmanager
def compiling(*, lines: bool, quiet: bool = False, title: str = TITLE) -> Iterator[Listener]:
    """A listener for `Steps`: on a terminal a bar that disappears when all is done.

    Elsewhere passes that take long say so, and with `lines` each one that has ended too.  All of
    it goes to stderr, and under torchrun only rank 0 shows it.  `quiet`: nothing anywhere.
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
        shown = _Lines(console, title, ended=lines)
        with beating(shown.line, shown.show):
            yield shown


@contextmanager
def beating(line: Callable[[], str | None], show: Callable[[str], None]) -> Iterator[None]:
    """Shows what `line` gives after 10 seconds and then every 30, where that is not None.

    A thread does it, so that work which never calls back speaks too.
    """
    over = threading.Event()

    def beat() -> None:
        wait = FIRST
        while not over.wait(wait):
            wait = EVERY
            if (text := line()) is not None:
                show(text)

    thread = threading.Thread(target=beat, name="pdcompile-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def working(title: str, on: str) -> Iterator[Listener]:
    """`compiling` for one long piece of work of any verb, which ends with the context."""
    with compiling(lines=False, title=title) as listener:
        listener.starts(on)
        yield listener


class _Bar(Listener):
    def __init__(self, bar: Progress, title: str):
        self._bar = bar
        self._title = title
        self._task = bar.add_task(title, total=None)

    def starts(self, name: str) -> None:
        self._bar.update(self._task, description=f"{self._title}: {name}", total=None, completed=0)

    def part(self, done: int, total: int, what: str) -> None:
        name = what.rpartition(".")[2]
        self._bar.update(
            self._task,
            description=f"{self._title}: measuring {done} of {total} {_parts_of(what)}, {name}",
            total=total,
            completed=done,
        )

    def steps(self, done: int, total: int, text: str) -> None:
        self._bar.update(
            self._task, description=f"{self._title}: {_step(done, total, text)}",
            total=total, completed=done,
        )  # fmt: skip

    def found(self, text: str) -> None:
        self._bar.update(self._task, description=f"{self._title}: searching, {text}")

    def better(self, text: str) -> None:
        self._bar.console.print(f"plan after {text}", soft_wrap=True)

    def told(self, text: str) -> None:
        self._bar.console.print(f"{self._title}: {text}", soft_wrap=True, markup=False)


class _Lines(Listener):
    """Lines in a log; the methods are called by the compilation, `line` by the beating thread."""

    def __init__(self, console: Console, title: str, *, ended: bool):
        self._console, self._title, self._each = console, title, ended
        self._began = time.monotonic()
        self._pass = self._state = ""
        self._share = 0.0  # of the steps of a training that are over

    def show(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def line(self) -> str | None:
        """``training: step 12 of 100, loss 2.3050, 40 s so far, about 293 s to come``; None for a
        pass that has just begun."""
        seconds = time.monotonic() - self._began
        if seconds < min(FIRST, EVERY) / 2:
            return None
        parts = [self._pass, self._state, f"{seconds:.0f} s so far", self._left(seconds)]
        return f"{self._title}: {', '.join(part for part in parts if part)}"

    def _left(self, seconds: float) -> str:
        if self._share:
            return f"about {seconds * (1 / self._share - 1):.0f} s to come"
        if self._pass not in PASSES[:-1]:
            return ""
        return f"then {', '.join(PASSES[PASSES.index(self._pass) + 1 :])}"

    def starts(self, name: str) -> None:
        self._pass, self._state, self._began = name, "", time.monotonic()

    def ended(self, name: str, seconds: float) -> None:
        self._pass, self._state, self._began = f"after {name}", "", time.monotonic()
        if self._each:
            self.show(f"{self._title}: {name} {seconds:.2f} s")

    def part(self, done: int, total: int, what: str) -> None:
        self._state = f"{done} of {total} {_parts_of(what)}"

    def steps(self, done: int, total: int, text: str) -> None:
        self._state, self._share = _step(done, total, text), done / max(total, 1)

    def found(self, text: str) -> None:
        self._state = text

    def better(self, text: str) -> None:
        if self._each:
            self.show(f"plan after {text}")

    def told(self, text: str) -> None:
        if self._each:
            self.show(f"{self._title}: {text}")


def _step(done: int, total: int, text: str) -> str:
    return f"step {done} of {total}" + (f", {text}" if text else "")


def _parts_of(what: str) -> str:
    """Kind of the parts of a pass; `what` names the one that begins."""
    return "stages" if what.startswith("stage ") else "ops"
