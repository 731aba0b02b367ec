"""Fit: keep memory limits by the schedule's own ledger, not only by the planner's formula.

The planner works with a formula that adds up what ops save; the ledger, read off the schedule's
instructions, also counts look-ahead receive slots, sends in flight and what the optimizer's step
needs for a moment.  A plan has to keep both: the scope of its certificate says so.  Where a plan's
ledger exceeds a device, that stage's limit is lowered and the problem is solved again.  The bound
of the first solution stays the bound: it had the loosest limits, so nothing that keeps both can be
better.  Where no lower limit leads to a plan, that is no proof that there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pdcompile.errors import InfeasibleError, NotFoundError
from pdcompile.passes.planning.enough import enough, with_remedy
from pdcompile.plan import Certificate, Plan
from pdcompile.problem import Partition, PartitionProblem
from pdcompile.units import format_bytes

ATTEMPTS = 8
SCOPE = "memory by formula and by the ledger of the schedule"
LOOSER = "the bound is by the formula"


def fit(
    problem: PartitionProblem, solve: Callable[[PartitionProblem], tuple[Plan, Partition]]
) -> Plan:
    """The best plan found whose ledgers keep every stage's memory limit.

    Args:
        solve: from a problem to a plan with a forecast, and the partition that it is made of;
            raises InfeasibleError.

    Raises:
        InfeasibleError: no plan keeps the formula.
        NotFoundError: none was found that keeps the ledgers as well; names the stage, its limit
            and what its schedule needs.  Both name a limit under which a plan was found.
    """
    try:
        plan = _fit(problem, solve)
        if all(stage.memory_bytes is None for stage in problem.stages):
            return plan
        return replace(plan, certificate=_scoped(plan.certificate, SCOPE))
    except InfeasibleError as error:
        raise advised(error, problem, solve) from error.__cause__


def advised(
    error: InfeasibleError,
    problem: PartitionProblem,
    solve: Callable[[PartitionProblem], tuple[Plan, Partition]],
) -> InfeasibleError:
    """The refusal, with a limit on memory that was tried, where one would do."""

    def trial(changed: PartitionProblem) -> tuple[int, bool]:
        plan = _fit(changed, solve)
        if plan.forecast is None:  # too long a schedule for a ledger
            raise error
        held = [plan.forecast.ledgers[rank].total_bytes for s in plan.stages for rank in s.ranks]
        return max(held), not excess(changed, plan)

    found = enough(problem, trial)
    return error if found is None else with_remedy(error, found)


def _fit(
    problem: PartitionProblem, solve: Callable[[PartitionProblem], tuple[Plan, Partition]]
) -> Plan:
    first, partition = solve(problem)
    if not excess(problem, first):
        return first
    failure: InfeasibleError | None = None
    for lower in (by_overhead, by_excess):
        plan, current, found = first, problem, partition
        for _ in range(ATTEMPTS):
            current = lower(current, problem, plan, found)
            try:
                plan, found = solve(current)
            except InfeasibleError as error:
                failure = error
                break
            if not excess(problem, plan):
                return replace(plan, certificate=_weaker(plan, first))
    raise _does_not_fit(problem, first, excess(problem, first)) from failure


def by_overhead(
    current: PartitionProblem, problem: PartitionProblem, plan: Plan, partition: Partition
) -> PartitionProblem:
    """Keep free on a stage what its ledger has beyond the formula: converges in a few rounds."""
    assert plan.forecast is not None
    room = {}
    for s in excess(problem, plan):
        ledger = max(plan.forecast.ledgers[rank].total_bytes for rank in plan.stages[s].ranks)
        room[s] = ledger - partition.memory_bytes[s]
    return _with_limits(
        current,
        {
            s: min(current.stages[s].memory_bytes or 0, (problem.stages[s].memory_bytes or 0) - n)
            for s, n in room.items()
        },
    )


def by_excess(
    current: PartitionProblem, problem: PartitionProblem, plan: Plan, partition: Partition
) -> PartitionProblem:
    """Lower the limit by no more than the excess: slower, and gives less away."""
    over = excess(problem, plan)
    return _with_limits(
        current, {s: (current.stages[s].memory_bytes or 0) - n for s, n in over.items()}
    )


def excess(problem: PartitionProblem, plan: Plan) -> dict[int, int]:
    """Bytes by which the worst ledger of a stage exceeds its limit, where it does."""
    assert plan.forecast is not None
    found = {}
    for stage in plan.stages:
        limit = problem.stages[stage.index].memory_bytes
        if limit is None:
            continue
        needed = max(plan.forecast.ledgers[rank].total_bytes for rank in stage.ranks)
        if needed > limit:
            found[stage.index] = needed - limit
    return found


def _with_limits(problem: PartitionProblem, limits: dict[int, int]) -> PartitionProblem:
    stages = tuple(
        replace(stage, memory_bytes=max(0, limits[s])) if s in limits else stage
        for s, stage in enumerate(problem.stages)
    )
    return replace(problem, stages=stages)


def _weaker(plan: Plan, first: Plan) -> Certificate:
    ours, loosest = plan.certificate, first.certificate
    bound = min(loosest.bound_seconds, ours.objective_seconds)
    certificate = replace(
        _scoped(ours, LOOSER), bound_seconds=bound, seconds=ours.seconds + loosest.seconds
    )
    return replace(certificate, status="optimal" if certificate.gap == 0 else "feasible")


def _scoped(certificate: Certificate, words: str) -> Certificate:
    return replace(certificate, scope=f"{certificate.scope}; {words}")


def _does_not_fit(problem: PartitionProblem, plan: Plan, over: dict[int, int]) -> NotFoundError:
    assert plan.forecast is not None
    stage = max(over, key=lambda s: over[s])
    limit = problem.stages[stage].memory_bytes
    return NotFoundError(
        f"stage {stage} has {format_bytes(limit or 0)} of memory, and the schedule of the best "
        f"plan by the planner's formula needs {format_bytes((limit or 0) + over[stage])} there: "
        "weights, gradients, optimizer state and activations fit, but not what comes on top for a "
        "moment (receive slots, sends in flight, temporaries of the optimizer's step); no other "
        "plan was found that fits, and it is not proved that there is none",
        where=f"stage {stage}",
        remedy=f"add {format_bytes(over[stage])} of memory on stage {stage}",
    )
