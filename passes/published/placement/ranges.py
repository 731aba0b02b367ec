"""Which stages a group can be on, in any pipeline no slower than one that is known."""

from __future__ import annotations

import math

from pdcompile.passes.published.placement.loads import neighbours
from pdcompile.passes.published.placement_file import LoadProblem

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
    for found, sums in (
        (early, _gathered(before, amount, False)),
        (late, _gathered(after, amount, True)),
    ):
        for v, total in enumerate(sums):
            needed = total / capacity * (1 - SLACK)
            found[v] = max(found[v], math.ceil(min(needed, 1e9)))


def _gathered(neighbours_of: list[list[int]], amount: list[float], from_end: bool) -> list[float]:
    """The summed amount of every group and all that it reaches."""
    n = len(amount)
    reach = [0] * n
    sums = [0.0] * n
    for v in reversed(range(n)) if from_end else range(n):
        mask = 1 << v
        for u in neighbours_of[v]:
            mask |= reach[u]
        reach[v] = mask
        sums[v] = math.fsum(amount[u] for u in _bits(mask))
    return sums


def _bits(mask: int) -> list[int]:
    text = bin(mask)[:1:-1]
    found, at = [], text.find("1")
    while at >= 0:
        found.append(at)
        at = text.find("1", at + 1)
    return found
