"""Memory limits kept by the schedule's own ledger, not only by the planner's formula.

The planner works with a formula that adds up what ops save; the ledger, read off the schedule's
instructions, also counts look-ahead receive slots, sends in flight and what the optimizer's step
needs for a moment.  A plan has to keep both: the scope of its certificate says so.  Where a plan's
ledger exceeds a device, that stage's limit is lowered and the problem is solved again.  The bound
of the first solution stays the bound: it had the loosest limits, so nothing that keeps both can be
better.  Where no lower limit leads to a plan, this does not prove that there is none; the error
then names a limit under which a plan was found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pdcompile.cluster import Cluster
from pdcompile.errors import InfeasibleError, NotFoundError
from pdcompile.passes.partition.answer import claimed
from pdcompile.passes.partition.budget import Budget
from pdcompile.plan import Certificate, Plan
from pdcompile.problem import Partition, PartitionProblem
from pdcompile.units import format_bytes, three_digits

ATTEMPTS = 6
CLOSE = 0.02  # relative: how near the least limit the search goes
SECONDS = 10.0  # for all of it; a search that has begun is not broken off

ROUNDS, GENTLE = 16, 8  # in which limits fall, at first by no more than what is too much
OTHER_WAYS = "microbatches, schedule or recomputation"
SCOPE = "memory by the planner's formula and by the schedule's ledger"
LOOSER = "a bound by the formula alone"

#: from a problem to a plan with a forecast, and the partition that it is made of
Solve = Callable[[PartitionProblem], tuple[Plan, Partition]]


def within_ledgers(problem: PartitionProblem, solve: Solve, *, advises: bool = True) -> Plan:
    """The best plan found whose ledgers keep every stage's memory limit.

    A plan without a forecast, of a schedule too long for ledgers, keeps the formula alone.

    Raises:
        InfeasibleError: no plan keeps the formula, as `solve` says.
        NotFoundError: none was found that keeps the ledgers as well; names the stage, its limit
            and what its schedule needs.  Where this `advises`, which takes as long as many plans,
            both name a limit under which a plan was found.
    """
    try:
        plan, _ = _planned_within(problem, solve)
        if plan.forecast is None or all(one.memory_bytes is None for one in problem.stages):
            return plan
        return replace(plan, certificate=_scoped(plan.certificate, SCOPE))
    except InfeasibleError as error:
        every = enumerate(problem.stages)
        limits = {s: size for s, one in every if (size := one.memory_bytes) is not None}
        if not (limits and advises):
            raise

        def held(limit: int | None) -> int | None:
            changed = problem.with_memory(dict.fromkeys(limits, limit))
            plan, found = _planned_within(changed, solve)
            if plan.forecast is None or excess(changed, plan):
                return None
            ledgers = plan.forecast.ledgers
            each = [ledgers[rank].total_bytes for stage in plan.stages for rank in stage.ranks]
            return max(*each, *found.memory_bytes)

        raise advised(error, min(limits.values()), held, "stage") from error.__cause__


def advised(
    error: InfeasibleError, low: int, held: Callable[[int | None], int | None], place: str
) -> InfeasibleError:
    """The refusal, with the least limit for which a plan was found, as ``20.9 MB`` on every
    `place`, as its remedy; as it is where memory is not what is missing.

    Args:
        low: bytes with which there is none.
        held: bytes that a rank holds at most by the plan under a limit, None where there is none
            with a ledger; raises InfeasibleError.
    """
    budget, least = Budget(SECONDS), 0  # bytes with which there is none by the planner's formula

    def needed(limit: int | None) -> int | None:
        nonlocal least
        try:
            return held(limit)
        except NotFoundError:
            return None
        except InfeasibleError:
            least = max(least, limit or 0)
            return None

    most = needed(None)
    if most is None:
        return error
    high, text = three_digits(most)
    if needed(high) is None:
        return error
    for _ in range(ATTEMPTS):
        limit, shown = three_digits((low + high) // 2)
        if limit >= high or high - low <= CLOSE * high or budget.late:
            break
        if needed(limit) is None:
            low = limit
        else:
            high, text = limit, shown
    known = f" ({format_bytes(least)} is not, unless {OTHER_WAYS} change)" if least else ""
    remedy = "; or ".join(
        [f"{text} of memory on every {place}, which is enough{known}", *error.others]
    )
    return type(error)(error.message, where=error.where, remedy=remedy)


def advised_of_devices(
    error: InfeasibleError, cluster: Cluster, search: Callable[[Cluster], Plan]
) -> InfeasibleError:
    """The same of a search on a cluster, by short searches on one whose limits are others."""
    known = [size for one in cluster.devices if (size := one.memory_bytes) is not None]

    def held(limit: int | None) -> int | None:
        devices = [replace(one, memory_bytes=one.memory_bytes and limit) for one in cluster.devices]
        forecast = search(replace(cluster, devices=tuple(devices))).forecast
        return max(ledger.total_bytes for ledger in forecast.ledgers) if forecast else None

    return advised(error, max(known), held, "device") if known else error


def _planned_within(problem: PartitionProblem, solve: Solve) -> tuple[Plan, Partition]:
    """`within_ledgers` without its scope, and without advice in what it raises."""
    first, partition = solve(problem)
    if first.forecast is None or not excess(problem, first):
        return first, partition
    failure, plan, current, found = None, first, problem, partition
    for n in range(ROUNDS):
        limits = {}
        for s, over in excess(problem, plan).items():
            limit = current.stages[s].memory_bytes or 0
            # What a ledger has beyond the formula is kept free where less does not do.
            held = limit if n < GENTLE else min(limit, found.memory_bytes[s])
            limits[s] = max(0, held - over)
        current = current.with_memory(limits)
        try:
            plan, found = solve(current)
        except InfeasibleError as error:
            failure = error
            break
        if not excess(problem, plan):
            return replace(plan, certificate=_weaker(plan, first)), found
    raise _over_ledgers(problem, first, excess(problem, first)) from failure


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


def _weaker(plan: Plan, first: Plan) -> Certificate:
    ours, loosest = plan.certificate, first.certificate
    both = replace(_scoped(ours, LOOSER), seconds=ours.seconds + loosest.seconds)
    return claimed(both, ours.objective_seconds, loosest.bound_seconds, ours.fastest_seconds)


def _scoped(certificate: Certificate, words: str) -> Certificate:
    return replace(certificate, scope=f"{certificate.scope}; {words}")


def _over_ledgers(problem: PartitionProblem, plan: Plan, over: dict[int, int]) -> NotFoundError:
    assert plan.forecast is not None
    stage = max(over, key=lambda s: over[s])
    limit = problem.stages[stage].memory_bytes
    return NotFoundError(
        "no plan was found that fits, and it is not proved that there is none: weights, gradients, "
        f"optimizer state and activations fit into the {format_bytes(limit or 0)} of stage "
        f"{stage}, and what its schedule holds beside them for a moment (receive slots, sends in "
        "flight, what backwards and the optimizer's step work with) is "
        f"{format_bytes(over[stage])} too much",
        where=f"stage {stage}",
        remedy=f"add {format_bytes(over[stage])} of memory on stage {stage}",
    )
