"""Why no placement exists: the nodes or the sum that does not fit, and what memory would do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.published.placement.search import Found, memory_problem, solve
from pdcompile.passes.published.placement_file import DeviceClass, LoadProblem, PlacementProblem


def impossible(problem: PlacementProblem, groups: LoadProblem) -> str:
    """The reason when one group, or the sum of all, shows that there is no placement; or ""."""
    present = [c for c, kind in enumerate(problem.classes) if kind.count]
    if not present:
        names = " and no ".join(kind.name for kind in problem.classes)
        return f"there is no {names}"
    for v, row in enumerate(groups.seconds):
        runs = [c for c in present if math.isfinite(row[c])]
        held = _names(problem, groups.members[v])
        if not runs:
            lacking = [kind.name for kind in problem.classes if not kind.count]
            hint = f", and there is no {' or '.join(lacking)}" if lacking else ""
            where = " or ".join(problem.classes[c].name for c in present)
            return f"{held} cannot run on one {where}{hint}"
        if all(groups.sizes[v] > groups.classes[c].memory for c in runs):
            kind = max((problem.classes[c] for c in runs), key=lambda kind: kind.memory)
            return f"{held} of size {groups.sizes[v]:.12g} does not fit: {_limit(kind)}"
    room = math.fsum(
        kind.count * kind.memory if math.isfinite(kind.memory) else math.inf
        for kind in groups.classes
        if kind.count
    )
    total = math.fsum(groups.sizes)
    if total > room * (1 + 1e-12):
        limits = " and ".join(
            f"{kind.count} × {kind.memory:.12g}" for kind in problem.classes if kind.count
        )
        return f"all nodes together have size {total:.12g}, more than {limits}"
    return ""


def reason(problem: PlacementProblem, groups: LoadProblem, *, budget: Budget, seed: int = 0) -> str:
    """Why there is no placement, and the least memory that would help where that is proved."""
    known = impossible(problem, groups)
    limited = [kind for kind in groups.classes if kind.count and math.isfinite(kind.memory)]
    if len(limited) != 1:
        return known or "no order of the groups fits the limits of the devices"
    memory, limit = memory_problem(groups)
    least = solve(memory, budget=budget, seed=seed)
    if not known:
        known = (
            f"no pipeline of {_devices(problem)} fits: what has to stay together or in order "
            f"does not divide into parts of {limit:.12g}"
        )
    return known + _relief(least, limited[0])


def _relief(least: Found, kind: DeviceClass) -> str:
    if least.placement is None or not least.proved or not least.objective > kind.memory:
        return ""
    return f"; the least memory of one {kind.name} that is enough is {least.objective:.12g}"


def _limit(kind: DeviceClass) -> str:
    return f"one {kind.name} has {kind.memory:.12g}"


def _devices(problem: PlacementProblem) -> str:
    return " and ".join(f"{kind.count} {kind.name}" for kind in problem.classes if kind.count)


def _names(problem: PlacementProblem, members: Sequence[int]) -> str:
    ids = [repr(problem.nodes[v].id) for v in members]
    if len(ids) == 1:
        return f"node {ids[0]}"
    shown = ", ".join(ids if len(ids) <= 6 else [*ids[:5], f"… ({len(ids)} in all)"])
    return f"what has to share a device (nodes {shown})"
