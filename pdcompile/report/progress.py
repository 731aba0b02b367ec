"""Progress on stderr: which pass runs, how far the measuring is, what the search found.

On a terminal it is a bar.  Elsewhere whatever takes long says so: a line after 10 seconds and then
every 30, with the pass, how far it is, and what is to come.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
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
            yield _Shown(console, title, bar=bar)
    else:
        shown, over = _Shown(console, title, lines=lines), threading.Event()
        # A thread, so that work which never calls back speaks too.
        thread = threading.Thread(
            target=shown.beat, args=(over,), name="pdcompile-progress", daemon=True
        )
        thread.start()
        try:
            yield shown
        finally:
            over.set()
            thread.join()


@contextmanager
def working(title: str, on: str) -> Iterator[Listener]:
    """`compiling` for one long piece of work of any verb, which ends with the context."""
    with compiling(lines=False, title=title) as listener:
        listener.starts(on)
        yield listener


class _Shown(Listener):
    """State of a compilation: its pass, the last word on that, and how many parts are over.

    It moves a bar, or else a thread tells it in lines; with `lines` each pass that has ended is one
    too.
    """

    def __init__(
        self, console: Console, title: str, *, bar: Progress | None = None, lines: bool = False
    ) -> None:
        self._console, self._title, self._began = console, title, time.monotonic()
        self._bar, self._lines = bar, lines
        self._task = None if bar is None else bar.add_task(title, total=None)
        self._pass = self._state = ""
        self._done, self._total = 0, 0

    def starts(self, name: str) -> None:
        self._pass, self._began = name, time.monotonic()
        self._tell("")

    def ended(self, name: str, seconds: float) -> None:
        self.starts(f"after {name}")
        if self._lines:
            self.show(f"{self._title}: {name} {seconds:.2f} s")

    def part(self, done: int, total: int, what: str) -> None:
        kind = "stages" if what.startswith("stage ") else "ops"
        self._tell(f"{done} of {total} {kind}", done, total)

    def steps(self, done: int, total: int, text: str) -> None:
        self._tell(f"step {done} of {total}" + (f", {text}" if text else ""), done, total)

    def found(self, text: str) -> None:
        self._tell(text)

    def told(self, text: str) -> None:
        if self._lines or self._bar:
            self.show(f"{self._title}: {text}")

    def show(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def beat(self, over: threading.Event) -> None:
        """Shows a line after 10 seconds and then every 30, until it is over."""
        wait = FIRST
        while not over.wait(wait):
            wait = EVERY
            if (text := self._line()) is not None:
                self.show(text)

    def _line(self) -> str | None:
        """``training: step 12 of 100, loss 2.3050, 40 s so far, about 293 s to come``; None for a
        pass that has just begun."""
        seconds, left = time.monotonic() - self._began, ""
        if seconds < min(FIRST, EVERY) / 2:
            return None
        if self._pass in PASSES[:-1]:
            left = f"then {', '.join(PASSES[PASSES.index(self._pass) + 1 :])}"
        elif self._done:
            left = f"about {seconds * (self._total / self._done - 1):.0f} s to come"
        return self._said(f"{seconds:.0f} s so far", left)

    def _tell(self, state: str, done: int = 0, total: int = 0) -> None:
        self._state, self._done, self._total = state, done, total
        if self._bar is not None and self._task is not None:
            text = self._said()
            self._bar.update(self._task, description=text, total=total or None, completed=done)

    def _said(self, *more: str) -> str:
        return f"{self._title}: {', '.join(filter(None, (self._pass, self._state, *more)))}"
