"""A first placement in one pass, for searches that end before they have looked at any order."""

from __future__ import annotations

import math

from pdcompile.passes.published.placement.loads import Placement, objective
from pdcompile.passes.published.placement_file import LoadProblem


def first_fit(problem: LoadProblem) -> Placement | None:
    """Groups in topological order, device after device: each takes an equal share of the work.

    A device also ends where its memory is full or a group cannot run on it.  None when the
    groups do not fit like that, which proves nothing.
    """
    kinds = [c for c, kind in enumerate(problem.classes) for _ in range(kind.count)]
    kinds = kinds[: max(1, len(problem.sizes))]
    if not kinds:
        return None
    total = math.fsum(min(seconds) for seconds in problem.seconds)
    share = total / len(kinds)
    stage_of: list[int] = []
    stage, done, filled = 0, 0.0, 0.0
    for seconds, size in zip(problem.seconds, problem.sizes, strict=True):
        while stage < len(kinds):
            own = seconds[kinds[stage]]
            fits = filled + size <= problem.classes[kinds[stage]].memory and math.isfinite(own)
            last = stage + 1 == len(kinds)  # takes what is left
            if fits and (last or done + own / 2 <= share):
                break
            stage, done, filled = stage + 1, 0.0, 0.0
        if stage == len(kinds):
            return None
        stage_of.append(stage)
        done, filled = done + own, filled + size
    placement = Placement(tuple(stage_of), tuple(kinds))
    return placement if math.isfinite(objective(problem, placement)) else None
