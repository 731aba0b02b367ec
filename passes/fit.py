"""Fit: keep memory limits by the schedule's own ledger, not only by the planner's formula.

The planner works with a formula that is a lower bound of what a rank holds; the ledger, read
off the schedule's instructions, also counts look-ahead receive slots and sends under way.
Where a plan's ledger exceeds a device, that stage's limit is lowered by the excess and the
problem is solved again.  The bound of the first solution stays the bound: it had the loosest
limits, so nothing that fits can be better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pdcompile.errors import InfeasibleError
from pdcompile.plan import Certificate, Plan
from pdcompile.problem import PartitionProblem
from pdcompile.units import format_bytes

ATTEMPTS = 8
SCOPE = "; memory by the ledger of the schedule: {}"


def fit(problem: PartitionProblem, solve: Callable[[PartitionProblem], Plan]) -> Plan:
    """The best plan found whose ledgers keep every stage's memory limit.

    Args:
        solve: from a problem to a plan with a forecast; raises InfeasibleError.

    Raises:
        InfeasibleError: no plan fits; names the stage, its limit and what the schedule needs.
    """
    plan = first = solve(problem)
    current = problem
    for _ in range(ATTEMPTS):
        over = excess(problem, plan)
        if not over:
            return plan if plan is first else replace(plan, certificate=_weaker(plan, first))
        current = tighten(current, over)
        try:
            plan = solve(current)
        except InfeasibleError as error:
            raise _does_not_fit(problem, plan, over) from error
    raise _does_not_fit(problem, plan, excess(problem, plan))


def excess(problem: PartitionProblem, plan: Plan) -> dict[int, int]:
    """Bytes by which the worst ledger of a stage exceeds its limit, for the stages where it does."""
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


def tighten(problem: PartitionProblem, over: dict[int, int]) -> PartitionProblem:
    """The same problem with lower limits for these stages."""
    stages = tuple(
        replace(limits, memory_bytes=max(0, (limits.memory_bytes or 0) - over[s]))
        if s in over
        else limits
        for s, limits in enumerate(problem.stages)
    )
    return replace(problem, stages=stages)


def _weaker(plan: Plan, first: Plan) -> Certificate:
    ours, loosest = plan.certificate, first.certificate
    bound = min(loosest.bound_seconds, ours.objective_seconds)
    certificate = replace(
        ours,
        bound_seconds=bound,
        seconds=ours.seconds + loosest.seconds,
        scope=ours.scope + SCOPE.format("the bound is that of the looser formula"),
    )
    return replace(certificate, status="optimal" if certificate.gap == 0 else "feasible")


def _does_not_fit(problem: PartitionProblem, plan: Plan, over: dict[int, int]) -> InfeasibleError:
    assert plan.forecast is not None
    stage = max(over, key=lambda s: over[s])
    limit = problem.stages[stage].memory_bytes
    return InfeasibleError(
        f"stage {stage} has {format_bytes(limit or 0)} of memory, and its schedule needs "
        f"{format_bytes((limit or 0) + over[stage])}: weights, gradients, optimizer state and "
        "activations fit, but not the receive slots and sends under way as well",
        where=f"stage {stage}",
        remedy=f"add {format_bytes(over[stage])} of memory, or use more stages, more "
        "microbatches, or a schedule with fewer weight versions (1f1b instead of 2bw)",
    )
