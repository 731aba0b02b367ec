"""Parts that all reports share: names of modules, ranges, counts, tables, the console."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

#: C0 without tab and line feed, DEL, and C1: what terminals obey
_CONTROL = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10})


class Terminal(Console):
    """A console on which text from files is text: no markup, and no control characters in it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments that are printed; rich's own controls are marked as such."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(segment.text.translate(_CONTROL), segment.style)


def modules(parameters: Sequence[str], ops: Sequence[str] = ()) -> str:
    """The modules that own the parameters, numbered ones as ranges, in natural order.

    Without parameters, the first and the last op.
    """
    if not parameters:
        return " … ".join(dict.fromkeys((ops[0], ops[-1]))) if ops else "nothing"
    ranges: dict[str, set[int]] = {}
    for name in sorted(parameters):
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is None:
            ranges.setdefault(parts[0], set())
        else:
            ranges.setdefault(".".join(parts[:at]), set()).add(int(parts[at]))
    return ", ".join(_ranges(stem, numbers) for stem, numbers in ranges.items())


def _ranges(stem: str, numbers: set[int]) -> str:
    shown = ",".join(ranges(numbers))
    return f"{stem}.{shown}" if stem and shown else stem or shown


def ranges(numbers: set[int]) -> tuple[str, ...]:
    """Runs of consecutive numbers: ``0–2`` and ``5``."""
    placed = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    runs = ([number for _, number in run] for _, run in placed)
    return tuple(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def ranks(numbers: Sequence[int]) -> str:
    """``0–3``, ``0,2,5``, or ``-`` for none."""
    return _ranges("", set(numbers)) if numbers else "-"


def counted(number: float, one: str, many: str | None = None) -> str:
    """``1 stage``, ``2 stages``."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def change(after: float, before: float) -> str:
    """``+1.2 %``, ``x 25``; ``±0 %`` for what is too small to see."""
    if before <= 0 or abs(after / before - 1) < 5e-6:
        return "±0 %"
    if after >= 10 * before:
        return f"x {after / before:,.0f}"
    percent = 100 * (after / before - 1)
    return f"{percent:+.2g} %" if abs(percent) < 10 else f"{percent:+.0f} %"


def table(*columns: str) -> Table:
    """A table without lines.

    The first letter of a column says how it is set: ``>`` on one line to the right, ``|`` on one
    line to the left, ``*`` folded in the room that the others leave; else folded.
    """
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        kind, name = (column[0], column[1:]) if column[:1] in (*">|*",) else ("", column)
        made.add_column(
            name,
            justify="right" if kind == ">" else "left",
            no_wrap=kind in (">", "|"),
            overflow="fold",
            ratio=1 if kind == "*" else None,
        )
    return made
