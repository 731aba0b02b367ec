"""A verification as a table: what was compared, and what differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdcompile.report import labels

if TYPE_CHECKING:
    from pdcompile.passes.verify import Difference, Verification

ROUNDED = "1 in 100000; of bfloat16 1.6 %, of float16 1 in 1000"
SHOWN = 10  # differences, of the many that one wrong op makes


def verify_report(found: Verification) -> Group:
    """One row for each step and mode, then what differs and where that begins, then notes."""
    parts: list[RenderableType] = [_table(found)] if found.rows else []
    parts.append(_verdict(found))
    for place in found.places:
        parts.append(Text(f"  first at {place}", style="bold"))
    if found.differences:
        parts += [Text(f"  {difference}") for difference in found.differences[:SHOWN]]
        more = len(found.differences) - SHOWN
        parts += [Text(f"  and {more} more")] if more > 0 else []
    parts += [Text(f"note: {note}", style="dim") for note in found.notes]
    return Group(*parts)


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


def _verdict(found: Verification) -> Text:
    if found.unverified and not found.differences:
        edited = f"edited ({', '.join(found.edited)}): " if found.edited else ""
        return Text(f"{edited}{found.verdict} ({found.compared})", style="yellow")
    who = "captured graph and stages" if found.graph else "the stages"
    who = f"edited ({', '.join(found.edited)}): {who}" if found.edited else who
    if found.differences:
        return Text(f"{who} differ from eager in {found.share}", style="bold red")
    how = ("bit for bit" if found.exact else f"up to rounding ({ROUNDED})") + found.place
    text = f"{who} equal eager {how}"
    text += f", {found.steps} steps on {found.steps} inputs" if found.steps > 1 else ""
    return Text(text, style="green")
