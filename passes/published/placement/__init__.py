"""Contiguous device placement: the smallest largest load, with its proof."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from pdcompile.errors import PlanError
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.published.placement.evaluate import (
    Device,
    allowed,
    device_loads,
    memories,
    violations,
)
from pdcompile.passes.published.placement.first_fit import first_fit
from pdcompile.passes.published.placement.group import grouped
from pdcompile.passes.published.placement.infeasible import impossible, reason
from pdcompile.passes.published.placement.loads import Placement
from pdcompile.passes.published.placement.search import Found, solve
from pdcompile.passes.published.placement_file import LoadProblem, PlacementProblem
from pdcompile.problem.answer import Answer, Progress, StageAnswer, relative_gap

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
MOST_GROUPS = 1_500
MOST_CELLS = 20_000  # groups × devices; above, the integer program is too large to build


def place(
    problem: PlacementProblem,
    *,
    time_limit: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Answer:
    """The best contiguous placement, in the units of the problem.

    Args:
        time_limit: wall seconds; without one the search goes on until the proof is complete.
        seed: of random orders and of CP-SAT; without a time limit, equal seeds give equal answers.
        progress: called with (objective or None, bound) as they improve.

    Ctrl-C ends the search with the best placement so far.  "infeasible" is always proved; its
    reason names what does not fit.
    """
    with Budget(time_limit) as budget:
        groups = grouped(problem)
        groups = replace(
            groups,
            classes=tuple(
                replace(kind, memory=memory)
                for kind, memory in zip(groups.classes, allowed(problem), strict=True)
            ),
        )
        if impossible(problem, groups):
            found = Found(None, math.inf, math.inf, "no device is large enough")
        else:
            found = _solve(groups, budget, seed, progress)
            if found.placement is None and math.isfinite(found.bound):
                found = replace(found, placement=first_fit(groups))
        why = ""
        if found.placement is None:
            why = "the search ended before it found a placement or proved that there is none"
            if math.isinf(found.bound):
                why = reason(problem, groups, budget=budget, seed=seed)
        return _answer(problem, groups, found, why, budget.spent)


def _solve(groups: LoadProblem, budget: Budget, seed: int, progress: Progress | None) -> Found:
    devices = sum(min(kind.count, len(groups.sizes)) for kind in groups.classes)
    if len(groups.sizes) > MOST_GROUPS or len(groups.sizes) * devices > MOST_CELLS:
        from pdcompile.passes.published.placement import large

        return large.solve(groups, budget=budget, seed=seed, report=progress)
    return solve(groups, budget=budget, seed=seed, report=progress)


def devices_of(
    problem: PlacementProblem, groups: LoadProblem, placement: Placement
) -> list[Device]:
    """The devices in pipeline order, empty ones left out, nodes in the file's order."""
    held: list[list[int]] = [[] for _ in placement.kinds]
    for group, stage in zip(groups.members, placement.stage_of, strict=True):
        held[stage] += group
    return [
        Device(kind, tuple(sorted(nodes)))
        for kind, nodes in zip(placement.kinds, held, strict=True)
        if nodes
    ]


def _answer(
    problem: PlacementProblem, groups: LoadProblem, found: Found, why: str, seconds: float
) -> Answer:
    scope = "all contiguous placements on " + " and ".join(
        f"{kind.count} {kind.name}{'' if kind.count == 1 else 's'}" for kind in problem.classes
    )
    if found.placement is None:
        none = math.isinf(found.bound)
        status: Status = "infeasible" if none else "unknown"
        return Answer(status, None, found.bound, found.prover, seconds, scope, reason=why)
    devices = devices_of(problem, groups, found.placement)
    if broken := violations(problem, devices):
        raise PlanError(
            f"the placement found is none: {broken[0]}",
            remedy="report this file: the search and the check disagree",
        )
    loads = device_loads(problem, devices)
    value = max(loads)
    bound = min(found.bound, value)
    stages = tuple(
        StageAnswer(
            tuple(problem.nodes[v].id for v in device.nodes),
            details={
                "device": problem.classes[device.kind].name,
                "load": load,
                "memory": memory,
            },
        )
        for device, load, memory in zip(devices, loads, memories(problem, devices), strict=True)
    )
    status = "optimal" if relative_gap(value, bound) == 0 else "feasible"
    return Answer(status, value, bound, found.prover, seconds, scope, stages)
