"""The model as a graph that fits on a page: its modules by stage, and what crosses stages.

Items of the planner's problem are drawn by the module that they are in, as deep as there is room
for; equal modules in a row, ``layers.0`` to ``layers.9``, become one box where that is too much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdcompile.errors import PlanError, some
from pdcompile.plan import Plan
from pdcompile.plan.embedded import assignment
from pdcompile.problem import PartitionProblem
from pdcompile.report import labels
from pdcompile.report.labels import counted
from pdcompile.units import format_bytes, format_seconds

MOST_NODES = 72
MOST_ROWS = 12  # of a stage
NAMED = 8  # items of a box that are named one by one


@dataclass
class _Box:
    stage: int
    name: str
    items: list[int] = field(default_factory=list)


def model_map(plan: Plan) -> dict[str, Any] | None:
    """The graph of a plan, a column a stage; None where the plan has no problem, or other parts of
    items than that."""
    problem = plan.problem
    try:
        stage_of = assignment(plan)
    except PlanError:
        return None
    assert problem is not None
    boxes, note = _boxes(problem, stage_of)
    box_of = {item: n for n, box in enumerate(boxes) for item in box.items}
    rows: dict[int, int] = defaultdict(int)
    nodes = []
    for box in boxes:
        place = {"stage": box.stage, "row": rows[box.stage]}  # from the top of its column
        nodes.append(place | {"name": box.name, "detail": _detail(problem, box)})
        rows[box.stage] += 1
    columns = [
        (
            f"stage {stage.index} · {'ranks' if len(stage.ranks) > 1 else 'rank'} "
            + labels.ranks(stage.ranks or (stage.index,)),
            labels.modules(stage.parameters, stage.ops),
        )
        for stage in plan.stages
    ]
    edges = [*_edges(problem, stage_of, box_of)]
    return {"columns": columns, "nodes": nodes, "edges": edges, "note": note}


def _boxes(problem: PartitionProblem, stage_of: Sequence[int]) -> tuple[list[_Box], str]:
    """The deepest division that fits, and what it is in words."""
    paths = [_path(item.name) for item in problem.items]
    deepest = max(map(len, paths))
    for depth in range(deepest, 0, -1):
        for runs in (False, True):
            boxes = _grouped(paths, stage_of, depth, runs=runs)
            if _fits(boxes):
                if len(boxes) == len(problem.items):
                    return boxes, "Every box is an item: what may not be divided."
                what = "equal modules in a row are one box" if runs else "by module"
                count = counted(len(problem.items), "item")
                return boxes, f"{len(boxes)} boxes for {count} of the model, {what}."
    stages = sorted(set(stage_of))
    boxes = [_Box(s, f"stage {s}", [i for i, t in enumerate(stage_of) if t == s]) for s in stages]
    count = counted(len(problem.items), "item")
    return boxes, f"One box a stage: the model's {count} are too many to draw."


def _fits(boxes: Sequence[_Box]) -> bool:
    rows: dict[int, int] = defaultdict(int)
    for box in boxes:
        rows[box.stage] += 1
    return len(boxes) <= MOST_NODES and max(rows.values()) <= MOST_ROWS


def _path(name: str) -> tuple[str, ...]:
    """``blocks.0:add_1`` is an op of its own in ``blocks.0``."""
    module, _, op = name.partition(":")
    return (*module.split("."), *([op] if op else ()))


def _grouped(
    paths: Sequence[tuple[str, ...]], stage_of: Sequence[int], depth: int, *, runs: bool
) -> list[_Box]:
    """Items of one stage with the same beginning of their paths; in a row, where `runs`, those
    that differ in its last number only."""
    found: dict[tuple[int, tuple[str, ...]], _Box] = {}
    numbers: dict[int, set[int]] = defaultdict(set)
    for item, (path, stage) in enumerate(zip(paths, stage_of, strict=True)):
        start = path[:depth]
        key = (*start[:-1], "#") if runs and start[-1].isdigit() else start
        box = found.setdefault((stage, key), _Box(stage, ".".join(start)))
        box.items.append(item)
        if key is not start:
            numbers[id(box)].add(int(start[-1]))
            shown = ",".join(labels.ranges(numbers[id(box)]))
            box.name = ".".join((*start[:-1], shown))
    return sorted(found.values(), key=lambda box: (box.stage, box.items[0]))


def _detail(problem: PartitionProblem, box: _Box) -> str:
    items = [problem.items[i] for i in box.items]
    parts = [
        f"forward {format_seconds(sum(one.forward_seconds for one in items))}",
        f"backward {format_seconds(sum(one.backward_seconds for one in items))} a microbatch",
        f"{format_bytes(sum(one.parameter_bytes for one in items))} of parameters",
    ]
    if len(items) > 1:
        names = some([one.name for one in items], NAMED)
        parts.append(f"{counted(len(items), 'item')}: {names}")
    return f"{box.name}, stage {box.stage}: " + "; ".join(parts)


def _edges(
    problem: PartitionProblem, stage_of: Sequence[int], box_of: dict[int, int]
) -> Iterator[dict[str, Any]]:
    """One a pair of boxes, with a label where it crosses stages; a value that several items of a
    stage read is sent there once."""
    inside: set[tuple[int, int]] = set()
    crossing: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
    for value in problem.traffic:
        source, sent = box_of[value.producer], set()
        for item in sorted(value.consumers):
            target = box_of[item]
            if stage_of[item] == stage_of[value.producer]:
                if target != source:
                    inside.add((source, target))
            elif stage_of[item] not in sent:
                sent.add(stage_of[item])
                size = (value.value, value.forward_bytes, value.backward_bytes)
                crossing[source, target].append(size)
    for source, target in sorted(inside):
        yield {"source": source, "target": target, "label": "", "detail": ""}
    for (source, target), values in sorted(crossing.items()):
        total = sum(forward + backward for _, forward, backward in values)
        parts = [
            f"{name} {format_bytes(forward)}"
            + (f" and its gradient {format_bytes(backward)}" if backward else "")
            for name, forward, backward in values
        ]
        yield {
            "source": source,
            "target": target,
            "label": format_bytes(total),
            "detail": f"a microbatch: {some(parts, NAMED)}",
        }
