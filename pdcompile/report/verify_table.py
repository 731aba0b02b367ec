"""A verification as a table: what was compared, and what differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdcompile.report import labels

if TYPE_CHECKING:
    from pdcompile.passes.verify import Difference, Verification


def verify_report(found: Verification) -> Group:
    """One row for each step and mode, then the verdict, where differences begin, and notes."""
    style = "bold red" if found.differences else "yellow" if found.unverified else "green"
    verdict, *rest = str(found).splitlines()
    parts: list[RenderableType] = [_table(found)] if found.rows else []
    return Group(*parts, Text(verdict, style=style), *map(Text, rest))


def _table(found: Verification) -> Table:
    numbers = (">step", ">samples", ">outputs and loss", ">gradients", ">buffers")
    table = labels.table("|mode", *numbers, "|stages")
    for row in found.rows:
        wrong = [one for one in found.differences if (one.mode, one.step) == (row.mode, row.step)]
        table.add_row(
            "training" if row.mode == "train" else "evaluation",
            str(row.step + 1),
            str(row.samples),
            _share(row.outputs, wrong, ("output", "loss")),
            _share(row.gradients, wrong, ("gradient",)) if row.mode == "train" else "",
            _share(row.buffers, wrong, ("buffer",)),
            Text("differ", style="bold red") if wrong else Text("equal", style="green"),
        )
    return table


def _share(count: int, wrong: list[Difference], kinds: tuple[str, ...]) -> str:
    """``3 of 4``: how many are equal."""
    bad = sum(one.what in kinds for one in wrong)
    return f"{max(count - bad, 0)} of {count}" if bad else str(count)
