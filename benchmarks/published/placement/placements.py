"""Placement: a pipeline over groups, its loads, and bounds that need no search.

Loads are computed in exact sums (math.fsum), rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.published.placement_model import LoadProblem
from pdcompile.passes.partition import lattice


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
    return lattice.neighbours(len(problem.sizes), problem.arcs)


ROUNDED = 1e-12  # relative; sums and divisions err by less
HALVINGS = 60
Floats = npt.NDArray[np.float64]


def simple_bound(problem: LoadProblem) -> float:
    """A lower bound of all placements; inf when a group runs nowhere, or there is no device."""
    kinds = [c for c, kind in enumerate(problem.classes) if kind.count]
    if not kinds:
        return math.inf
    seconds = np.array(problem.seconds)[:, kinds].T
    counts = [problem.classes[c].count for c in kinds]
    best = float(seconds.min(axis=0).max(initial=0.0))
    if not math.isfinite(best):
        return math.inf
    if len(kinds) == 2:
        best = max(best, _shared(seconds[0], counts[0], seconds[1], counts[1]))
    else:
        best = max(best, float(seconds.min(axis=0).sum()) / sum(counts))
    return best * (1 - ROUNDED)


def _shared(first: Floats, firsts: int, second: Floats, seconds: int) -> float:
    """The least largest load when groups may be divided between devices of two classes.

    Within T, devices of the second class take the groups that save the first class most for
    their time; T is enough when the first class can do what is left.  It is found by halving.
    """
    only_first, only_second = np.isinf(second), np.isinf(first)
    needed = float(first[only_first].sum())
    taken = float(second[only_second].sum())
    free = ~(only_first | only_second)
    a, b = first[free], second[free]
    with np.errstate(over="ignore"):  # of times next to nothing, any order will do
        order = np.argsort(-a / np.maximum(b, 1e-300), kind="stable")
    saved = np.concatenate(([0.0], np.cumsum(a[order])))
    spent = np.concatenate(([0.0], np.cumsum(b[order])))
    total = needed + taken + float(saved[-1] + spent[-1])
    low, high = 0.0, total
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        room = seconds * middle - taken
        left = needed + float(saved[-1] - np.interp(room, spent, saved))
        if room >= 0 and left <= firsts * middle:
            high = middle
        else:
            low = middle
    # A sum of n terms errs by less than n roundings of the whole.
    return low - (len(first) + 4) * 4e-16 * total


SLACK = 1e-9  # sums are rounded, and a range must never lose a stage


def stage_ranges(problem: LoadProblem, upper: float, stages: int) -> list[tuple[int, int]] | None:
    """(earliest, latest) stage of every group in pipelines of `stages` stages with all loads
    ≤ `upper`; None when some group has none, which proves that there is no such pipeline.

    All ancestors of v lie on stages up to v's own.  A stage of any class holds at most `upper` of
    the summed least seconds of its groups, hence v and its ancestors, which need A(v), fill at
    least ⌈A(v) / upper⌉ stages; the same with descendants from the end.  Where every class has a
    limit, the same holds for memory.
    """
    present = [c for c, kind in enumerate(problem.classes) if kind.count]
    work = [min((row[c] for c in present), default=math.inf) for row in problem.seconds]
    early = [1] * len(work)
    late = [1] * len(work)
    if upper > 0:
        _raise(problem, work, upper, early, late)
    limit = max((kind.memory for kind in problem.classes if kind.count), default=0.0)
    if 0 < limit < math.inf:
        _raise(problem, list(problem.sizes), limit, early, late)
    if any(a + z > stages + 1 for a, z in zip(early, late, strict=True)):
        return None
    return [(a - 1, stages - z) for a, z in zip(early, late, strict=True)]


def _raise(
    problem: LoadProblem, amount: list[float], capacity: float, early: list[int], late: list[int]
) -> None:
    """Stages that each group needs up to itself and from itself on (at least the known ones)."""
    before, after = neighbours(problem)
    for found, totals in (
        (early, lattice.accumulated(before, amount, from_end=False)),
        (late, lattice.accumulated(after, amount, from_end=True)),
    ):
        for v, total in enumerate(totals):
            needed = total / capacity * (1 - SLACK)
            found[v] = max(found[v], math.ceil(min(needed, 1e9)))
