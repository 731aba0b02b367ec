"""Differences between two plans, as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdcompile.plan.diff import Changed, Moved, PlanDiff
from pdcompile.report import labels
from pdcompile.schedule.registry import name_of, names
from pdcompile.units import format_bytes, format_rate, format_seconds

NO_CHANGE = ("seed", "bubble", "moving_seconds", "host_seconds")  # in percent they say nothing
SHOWN = 3  # ops of a move by name
MOST_ROWS = 24
PRINTS = {
    "model": "the graphs differ: of two models, or of one that is another with microbatches of the "
    "other size",
    "costs": "their costs differ: of microbatches of another size, or measured or estimated anew",
    "cluster": "they are for different clusters",
    "all": "they were made by different versions of pdcompile, or edited",
}
SECTIONS = ("training", "cluster", "forecast", "certificate", "memory", "stages", "edges")
OF_UPDATES: dict[str, tuple[str, Callable[[Any], str]]] = {  # what costs of an update are called
    "optimizer_factor": ("optimizer state", lambda x: f"{x:g} x weights"),
    "step": ("update holds", lambda x: "{:g} x one, {:g} x previous, {:g} x all".format(*x)),
    "step_moved": ("update moves", lambda x: f"{x:g} x weights"),
    "moving_seconds": ("update moves at", lambda x: format_rate(1 / x) if x else "no cost"),
    "host_seconds": ("Python of an update", lambda x: format_seconds(x) if x else "not counted"),
}
FORMATS: tuple[tuple[str, Callable[[Any], str]], ...] = (  # by the end of a name, the longest first
    ("bytes_per_second", format_rate),
    ("samples_per_second", lambda x: f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"),
    ("seconds", format_seconds),
    ("bytes", format_bytes),
    ("bubble", lambda x: f"{100 * x:.1f} %"),
)


def diff_report(found: PlanDiff, a: str, b: str) -> Group:
    """Fingerprints, moved ops, one table of all that differs; `a` and `b` are names of files."""
    if found.identical:
        return Group(Text("the plans are identical (the planner's own running time apart)"))
    parts: list[RenderableType] = [Text(f"a: {a}\nb: {b}")]
    parts += [Text(PRINTS[part], style="yellow") for part in found.prints]
    if found.unlike:
        parts.append(Text("few of their ops have the same names: where they are is not compared"))
    if found.moved:
        parts += [Text(""), moved_table(found.moved)]
    rows = [
        ({"edges": "traffic"}.get(name, name), one)
        for name in SECTIONS
        for one in getattr(found, name)
        if one.what != "scope"  # sentences
    ]
    if rows:
        parts += [Text(""), changed_table(rows)]
    if any(one.what == "scope" for one in found.certificate):
        parts.append(Text("the proofs hold in different scopes: pdcompile explain shows each"))
    if any(one.what == "schedule" for one in found.training):
        flush = ", ".join(names(lambda kind: not kind.stream))
        parts.append(Text(f"objectives are of a step with a flush ({flush}), else a microbatch"))
    parts += [Text(f"only in {'a' if n.a else 'b'}: {n.b or n.a}") for n in found.notes]
    if found.says_nothing:
        parts.append(Text("only figures inside differ: costs, or the problem that the plans hold"))
    return Group(*parts)


def moved_table(moved: Sequence[Moved]) -> Table:
    """One row for all ops that go the same way."""
    table = labels.table("ops on another stage", "from", "to", "ops")
    for one in moved:
        ops = one.ops if len(one.ops) <= SHOWN else (f"{one.ops[0]} … {one.ops[-1]}",)
        table.add_row(", ".join(ops), _stage(one.source), _stage(one.target), str(len(one.ops)))
    return table


def changed_table(rows: Sequence[tuple[str, Changed]]) -> Table:
    """One row a fact; long lists are cut, and say so."""
    table = labels.table("", "", "a", "b", "change")
    for title, one in rows[:MOST_ROWS]:
        sides = (_shown(one.what, side) for side in (one.a, one.b))
        table.add_row(title, _label(one.what), *sides, _change(one, rows))
    if len(rows) > MOST_ROWS:
        table.add_row("…", f"{len(rows) - MOST_ROWS} more: --json lists them", "", "", "")
    return table


def _label(what: str) -> str:
    """``stages[0].forward_seconds`` as ``stage 0 forward``: the unit is in the figure."""
    if what in OF_UPDATES:
        return OF_UPDATES[what][0]
    text = what.replace("stages[", "stage ").replace("].", " ")
    return text.removesuffix("_seconds").removesuffix("_bytes").replace("_", " ")


def _stage(stage: int | None) -> str:
    return "not there" if stage is None else f"stage {stage}"


def _shown(name: str, value: Any) -> str:
    """A fact in the unit that its name ends in."""
    if value is None or value == ():
        return "-"
    if name in OF_UPDATES:
        return OF_UPDATES[name][1](value)
    if isinstance(value, tuple):
        return ", ".join("none" if part is None else _shown(name, part) for part in value)
    if name == "schedule":
        return name_of(value)
    unit = "bytes" if name.startswith("rank ") else name
    how = next((how for end, how in FORMATS if unit.endswith(end)), None)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return how(value) if how and number else str(value)


def _change(one: Changed, rows: Sequence[tuple[str, Changed]]) -> str:
    """Relative, where both are numbers that compare."""
    if one.what == "schedule" and name_of(one.a) == name_of(one.b):
        return "other tasks"
    numbers = [x for x in (one.a, one.b) if isinstance(x, int | float) and not isinstance(x, bool)]
    if len(numbers) < 2 or one.a <= 0 or one.what in NO_CHANGE:
        return ""
    unlike = any(other.what == "schedule" for _, other in rows)
    if unlike and one.what in ("objective_seconds", "bound_seconds"):
        return ""
    return labels.change(one.b, one.a)
