"""The line on a terminal while a search runs: best plan, bound, gap, seconds."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pdcompile.problem.answer import Progress, relative_gap


@dataclass(slots=True)
class SearchLine:
    """What the search has reported last; as text it says how long it has been going on."""

    objective: float | None = None
    bound: float = -math.inf
    begin: float = field(default_factory=time.monotonic)

    def update(self, objective: float | None, bound: float) -> None:
        self.objective, self.bound = objective, bound

    def __str__(self) -> str:
        parts = ["no plan yet" if self.objective is None else f"best {self.objective:.6g}"]
        if math.isfinite(self.bound) and self.bound > 0:
            parts.append(f"bound {self.bound:.6g}")
            if self.objective is not None:
                parts.append(f"gap {100 * relative_gap(self.objective, self.bound):.2g} %")
        parts.append(f"{time.monotonic() - self.begin:.0f} s")
        return ", ".join(parts) + "  (Ctrl-C: stop with the best)"

    def __rich__(self) -> str:
        return str(self)


@contextmanager
def searching() -> Iterator[Progress | None]:
    """What a solver reports to: a line on stderr while it runs; None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    line = SearchLine()
    console = Console(file=sys.stderr, highlight=False, markup=False)
    with Live(line, console=console, transient=True, refresh_per_second=4):
        yield line.update
