"""Placement: a pipeline over the groups of a LoadProblem, and what each stage costs.

Loads are computed in exact sums (math.fsum), rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdcompile.passes.published.placement_file import LoadProblem


@dataclass(frozen=True, slots=True)
class Placement:
    """`stage_of[group]`, and the class of the device of every stage; stages may be empty."""

    stage_of: tuple[int, ...]
    kinds: tuple[int, ...]


def stage_loads(problem: LoadProblem, placement: Placement) -> list[float]:
    """The load of every stage, inf where a device cannot run a group or has too little memory."""
    parts: list[list[float]] = [[] for _ in placement.kinds]
    sizes: list[list[float]] = [[] for _ in placement.kinds]
    for v, s in enumerate(placement.stage_of):
        parts[s].append(problem.seconds[v][placement.kinds[s]])
        sizes[s].append(problem.sizes[v])
    for pins, cost in zip(problem.pins, problem.costs, strict=True):
        touched = {placement.stage_of[v] for v in pins}
        if len(touched) > 1:
            for s in touched:
                if problem.classes[placement.kinds[s]].transfers:
                    parts[s].append(cost)
    return [
        math.fsum(parts[s]) if math.fsum(sizes[s]) <= problem.classes[kind].memory else math.inf
        for s, kind in enumerate(placement.kinds)
    ]


def objective(problem: LoadProblem, placement: Placement) -> float:
    """The largest load; inf when the placement breaks the order, a count or a limit."""
    stage_of = placement.stage_of
    if any(stage_of[a] > stage_of[b] for a, b in problem.arcs):
        return math.inf
    used = [placement.kinds[s] for s in set(stage_of)]
    if any(used.count(c) > kind.count for c, kind in enumerate(problem.classes)):
        return math.inf
    return max(stage_loads(problem, placement), default=0.0)


def compact(stage_of: Sequence[int], kinds: Sequence[int]) -> Placement:
    """The same without empty stages."""
    used = sorted(set(stage_of))
    number = {s: i for i, s in enumerate(used)}
    return Placement(tuple(number[s] for s in stage_of), tuple(kinds[s] for s in used))


def neighbours(problem: LoadProblem) -> tuple[list[list[int]], list[list[int]]]:
    """Direct predecessors and direct successors of every group."""
    before: list[list[int]] = [[] for _ in problem.sizes]
    after: list[list[int]] = [[] for _ in problem.sizes]
    for a, b in problem.arcs:
        before[b].append(a)
        after[a].append(b)
    return before, after
