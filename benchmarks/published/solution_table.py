"""The solution of an imported problem as tables: stages, loads, memory, proof."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.published.solution import LevelSolution, Solution, StageSolution
from pdcompile.report import labels
from pdcompile.report.labels import ranges
from pdcompile.units import format_bytes, format_seconds

WIDTH = 44  # columns that a stage's members may take
STYLES = {"optimal": "bold green", "feasible": "bold yellow"}

# Details of a stage with a heading of their own, in this order; others follow by their names.
HEADINGS = {
    "device": "device",
    "replicas": "replicas",
    "data_parallel": "data",
    "tensor_parallel": "tensor",
    "compute_seconds": "compute",
    "seconds": "time",
    "load": "load",
    "memory": "memory",
    "memory_bytes": "memory",
}


def solution_report(answer: Solution, *, unit: str, limit: float | None = None) -> Group:
    """Stages, levels and certificate.

    `unit` is ``s``, or empty where the file has none; then the memory `limit` of a device, which
    is bytes otherwise, has no unit either.
    """
    parts: list[RenderableType] = []
    if answer.stages:
        parts.append(stage_table(answer.stages, unit))
    if limit is not None and math.isfinite(limit):
        shown = format_bytes(limit) if unit else f"{limit:.8g}"
        parts.append(Text(f"memory limit of a device: {shown}"))
    if answer.levels:
        parts.append(Text("levels, outermost first:"))
        parts += [Text(line) for line in level_lines(answer.levels)]
    return Group(*parts, verdict(answer, unit))


def stage_table(stages: Sequence[StageSolution], unit: str) -> Table:
    """One row a stage, one column for each detail that is a number or a word."""
    rows = [_shown(stage) for stage in stages]
    used = {name for row in rows for name in row}
    if {row["replicas"] for row in rows} == {1}:
        used.discard("replicas")
    columns = [name for name in HEADINGS if name in used] + sorted(used - set(HEADINGS))
    heads = [
        HEADINGS.get(name, name.removesuffix("_seconds").replace("_", " ")) for name in columns
    ]
    words = ("device", "variants")
    table = labels.table(
        ">stage", "*holds", ">nodes",
        *(head if name in words else f">{head}" for name, head in zip(columns, heads, strict=True)),
    )  # fmt: skip
    for index, (stage, row) in enumerate(zip(stages, rows, strict=True)):
        table.add_row(
            str(index),
            members(stage.members),
            str(len(stage.members)),
            *(_cell(name, row.get(name), unit) for name in columns),
        )
    return table


def members(ids: Sequence[int | str], width: int = WIDTH) -> str:
    """Numbered ids as ranges, ``node2–9, node11``; a long list keeps its beginning."""
    numbered: dict[str, set[int]] = {}
    for member in ids:
        match = re.fullmatch(r"(.*?)(0|[1-9][0-9]{0,8})", str(member), re.DOTALL)
        stem, numbers = (match[1], {int(match[2])}) if match else (str(member), set[int]())
        numbered.setdefault(stem, set()).update(numbers)
    parts = [
        f"{stem}{part}" for stem, numbers in numbered.items() for part in (ranges(numbers) or ("",))
    ]
    shown: list[str] = []
    for part in parts:
        if shown and len(", ".join([*shown, part])) > width:
            return ", ".join(shown) + ", …"
        shown.append(part)
    return ", ".join(shown) or "nothing"


def level_lines(levels: Sequence[LevelSolution], depth: int = 1) -> list[str]:
    """The nested pipelines, two columns of indentation a level."""
    lines: list[str] = []
    for level in levels:
        times = "" if level.replicas == 1 else f"{level.replicas} × "
        lines.append(f"{'  ' * depth}{times}{members(level.members)}")
        lines += level_lines(level.inner, depth + 1)
    return lines


def verdict(answer: Solution, unit: str) -> Text:
    """Status, objective, bound, gap, prover, scope and seconds, as one sentence."""
    text = Text()
    text.append(answer.status, style=STYLES.get(answer.status, "bold red"))
    if answer.objective is not None:
        assert answer.gap is not None
        shown = [f"{value:.8g} {unit}".strip() for value in (answer.objective, answer.bound)]
        text.append(f": {shown[0]}, lower bound {shown[1]}, gap {100 * answer.gap:.2g} %")
    if answer.reason:
        text.append(f": {answer.reason}")
    text.append(f"; by {answer.prover} in {format_seconds(answer.seconds)}, among {answer.scope}")
    return text


def _shown(stage: StageSolution) -> Mapping[str, Any]:
    """The details that get a cell; variants are counted by kind."""
    row: dict[str, Any] = {"replicas": stage.replicas}
    for name, value in stage.details.items():
        if name == "variants":
            chosen = [str(variant) for variant in value.values()]
            row[name] = ", ".join(f"{chosen.count(kind)} {kind}" for kind in dict.fromkeys(chosen))
        elif value is None or isinstance(value, str | int | float):
            row[name] = value
    if row.get("data_parallel") == stage.replicas:
        del row["replicas"]
        row["replicas"] = 1  # one column says it
    return row


def _cell(name: str, value: Any, unit: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, str | bool):
        return str(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    in_seconds = name.endswith("seconds") or (name == "load" and unit == "s")
    return format_seconds(value) if in_seconds else f"{value:.8g}"
