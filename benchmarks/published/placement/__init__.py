"""Contiguous device placement: the smallest largest load, with its proof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.published.placement.node_groups import grouped, memory_problem
from benchmarks.published.placement.placement_search import PlacementFound, solve, solve_large
from benchmarks.published.placement.placements import Placement, objective
from benchmarks.published.placement_model import (
    DeviceClass,
    LoadProblem,
    PlacedDevice,
    PlacementProblem,
    allowed,
    device_loads,
    memories,
    violations,
)
from benchmarks.published.solution import Progress, Solution, StageSolution
from pdcompile.errors import PlanError
from pdcompile.passes.partition.budget import Budget

MOST_GROUPS = 1_500
MOST_CELLS = 20_000  # groups × devices; above, the integer program is too large to build


def place(
    problem: PlacementProblem,
    *,
    time_limit: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Solution:
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
            found = PlacementFound(None, math.inf, math.inf, "no device is large enough")
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


def _solve(
    groups: LoadProblem, budget: Budget, seed: int, progress: Progress | None
) -> PlacementFound:
    devices = sum(min(kind.count, len(groups.sizes)) for kind in groups.classes)
    if len(groups.sizes) > MOST_GROUPS or len(groups.sizes) * devices > MOST_CELLS:
        return solve_large(groups, budget=budget, seed=seed, report=progress)
    return solve(groups, budget=budget, seed=seed, report=progress)


def devices_of(
    problem: PlacementProblem, groups: LoadProblem, placement: Placement
) -> list[PlacedDevice]:
    """The devices in pipeline order, empty ones left out, nodes in the file's order."""
    held: list[list[int]] = [[] for _ in placement.kinds]
    for group, stage in zip(groups.members, placement.stage_of, strict=True):
        held[stage] += group
    return [
        PlacedDevice(kind, tuple(sorted(nodes)))
        for kind, nodes in zip(placement.kinds, held, strict=True)
        if nodes
    ]


def _answer(
    problem: PlacementProblem, groups: LoadProblem, found: PlacementFound, why: str, seconds: float
) -> Solution:
    scope = "all contiguous placements on " + " and ".join(
        f"{kind.count} {kind.name}{'' if kind.count == 1 else 's'}" for kind in problem.classes
    )
    if found.placement is None:
        return Solution.of(None, found.bound, found.prover, seconds, scope, reason=why)
    devices = devices_of(problem, groups, found.placement)
    if broken := violations(problem, devices):
        raise PlanError(
            f"internal error: the placement found is not valid: {broken[0]}",
            remedy="report this file: the search and the check disagree",
        )
    loads = device_loads(problem, devices)
    stages = tuple(
        StageSolution(
            tuple(problem.nodes[v].id for v in device.nodes),
            details={
                "device": problem.classes[device.kind].name,
                "load": load,
                "memory": memory,
            },
        )
        for device, load, memory in zip(devices, loads, memories(problem, devices), strict=True)
    )
    return Solution.of(max(loads), found.bound, found.prover, seconds, scope, stages=stages)


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
    """Reason why there is no placement, with the least memory that helps where it is proved."""
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


def _relief(least: PlacementFound, kind: DeviceClass) -> str:
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
