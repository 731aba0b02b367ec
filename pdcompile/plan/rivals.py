"""Rivals: plans next to a plan, which its bound must not exceed.

A lower bound is a claim about all plans; one cheaper plan refutes it.  Moving one item over one
boundary gives plans that the planner's problem allows, and the clock times them.  That is no
proof of a bound (solving again is, see `pdcompile.passes.partition.prove`), only a cheap way to
find out that one is wrong.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from pdcompile.cluster import Cluster
from pdcompile.errors import PlanError
from pdcompile.plan.clock import Clock
from pdcompile.plan.embedded import assignment
from pdcompile.plan.model import Plan
from pdcompile.problem import PartitionProblem

Finding = tuple[str, str, str]  # path, message, remedy
MOST = 24  # rivals that are timed, of a pipeline that is not deep
MOST_EVENTS = 60_000  # stages × microbatches of all rivals together: about 4 s of the clock
TOLERANCE = 1e-6  # relative


def findings(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """A rival that is faster than the certificate's bound, if one is found."""
    problem, bound = plan.problem, plan.certificate.bound_seconds * (1 - TOLERANCE)
    plain = all(s.replicas == 1 and not s.recompute and s.ranks == (s.index,) for s in plan.stages)
    if problem is None or not plain or not all(level.full_duplex for level in cluster.levels):
        return
    try:
        stage_of = assignment(plan)
    except PlanError:
        return
    times = problem.num_microbatches if problem.objective == "flush" else 1
    left = max(2, min(MOST, MOST_EVENTS // (len(plan.stages) * problem.num_microbatches)))
    for item, rival in neighbours(problem, stage_of):
        if busiest(problem, rival) * times >= bound or not _allowed(problem, rival):
            continue
        seconds = objective(problem, cluster, rival)
        if seconds < bound:
            message = (
                f"bound {plan.certificate.bound_seconds!r} is refuted: with "
                f"{problem.items[item].name!r} on stage {rival[item]} it takes {seconds!r}"
            )
            yield "certificate.bound_seconds", message, "make the plan again"
            return
        left -= 1
        if not left:
            return


def neighbours(
    problem: PartitionProblem, stage_of: Sequence[int]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(item, assignment) with the item, and what must stay with it, one stage further."""
    before: dict[int, set[int]] = defaultdict(set)
    after: dict[int, set[int]] = defaultdict(set)
    pairs = [(t.producer, c) for t in problem.traffic for c in t.consumers]
    for a, b in [*pairs, *problem.order]:
        before[b].add(a)
        after[a].add(b)
    groups = {i: set(group) for group in problem.together for i in group}
    last = len(problem.stages) - 1
    for i, s in enumerate(stage_of):
        moving = groups.get(i, {i})
        for step, around in ((1, after), (-1, before)):
            fixed = any(
                stage_of[other] == s and other not in moving
                for one in moving
                for other in around[one]
            )
            if 0 <= s + step <= last and not fixed:
                yield i, tuple(s + step if j in moving else t for j, t in enumerate(stage_of))


def busiest(problem: PartitionProblem, stage_of: Sequence[int]) -> float:
    """Seconds of one microbatch on the busiest device: no plan takes less for each."""
    busy = [0.0] * len(problem.stages)
    for item, s in zip(problem.items, stage_of, strict=True):
        busy[s] += (item.forward_seconds + item.backward_seconds) / problem.stages[s].speed
    return max(busy)


def objective(problem: PartitionProblem, cluster: Cluster, stage_of: Sequence[int]) -> float:
    """What the planner minimises, by the clock: a makespan, or seconds per microbatch."""
    ahead: dict[tuple[int, int], float] = defaultdict(float)
    back: dict[tuple[int, int], float] = defaultdict(float)
    weights: dict[tuple[int, int], float] = defaultdict(float)

    def hop(a: int, b: int, size: int) -> float:
        level = cluster.level_between(a, b)
        return size / level.bytes_per_second + level.latency_seconds

    def returning(chain: Sequence[int], size: int) -> None:
        for k in range(len(chain) - 1, 0, -1):
            back[chain[k], chain[k - 1]] += hop(chain[k], chain[k - 1], size)

    for value in problem.traffic:
        source = stage_of[value.producer]
        targets = sorted({stage_of[c] for c in value.consumers} - {source})
        for target in targets:
            ahead[source, target] += hop(source, target, value.forward_bytes)
        if value.backward_bytes:
            returning([source, *targets], value.backward_bytes)
    for shared in problem.shared:
        holders = sorted({stage_of[i] for i in shared.items})
        if shared.trainable:
            returning(holders, shared.bytes)
            for holder in holders[1:]:
                weights[holders[0], holder] += hop(holders[0], holder, shared.bytes)
    n, m = len(problem.stages), problem.num_microbatches
    forward, backward = [0.0] * n, [0.0] * n
    for s, limits in enumerate(problem.stages):
        here = [item for item, at in zip(problem.items, stage_of, strict=True) if at == s]
        forward[s] = math.fsum(item.forward_seconds for item in here) / limits.speed
        backward[s] = math.fsum(item.backward_seconds for item in here) / limits.speed
    clock = Clock(
        tuple(forward), tuple(backward), dict(ahead), dict(back), dict(weights), (False,) * n
    )
    in_flight = problem.memory.in_flight or (1,) * n
    if problem.objective == "flush":
        return clock.makespan([count - 1 for count in in_flight], m)
    return clock.period(in_flight, m)


def _allowed(problem: PartitionProblem, stage_of: Sequence[int]) -> bool:
    used = set(stage_of)
    return (
        all(stage_of[i] == s for i, s in problem.pins)
        and all(stage_of[i] != s for i, s in problem.forbidden)
        and all(stage_of[a] != stage_of[b] for a, b in problem.apart)
        and all(stage_of[a] <= stage_of[b] for a, b in problem.order)
        and all(len({stage_of[i] for i in group}) == 1 for group in problem.together)
        and (problem.allow_empty or len(used) == len(problem.stages))
        and len(used) <= (problem.max_stages or len(problem.stages))
        and all(
            limits.memory_bytes is None or need <= limits.memory_bytes
            for need, limits in zip(_memory(problem, stage_of), problem.stages, strict=True)
        )
    )


def _memory(problem: PartitionProblem, stage_of: Sequence[int]) -> list[int]:
    """Bytes by the rule of the problem; the first holder of a tied parameter updates it."""
    rule = problem.memory
    updated = rule.gradient_buffers + rule.optimizer_factor
    found = []
    for s in range(len(problem.stages)):
        here = {i for i, at in enumerate(stage_of) if at == s}
        items = [problem.items[i] for i in here]
        tied = [one for one in problem.shared if here & set(one.items)]
        trained = sum(item.trainable_bytes for item in items)
        trained += sum(one.bytes for one in tied if one.trainable)
        frozen = sum(item.parameter_bytes - item.trainable_bytes for item in items)
        frozen += sum(one.bytes for one in tied if not one.trainable)
        kept = sum(item.saved_bytes for item in items)
        kept += sum(
            value.forward_bytes
            for value in problem.traffic
            if value.producer not in here and here & set(value.consumers)
        )
        copied = sum(
            one.bytes for one in tied if one.trainable and min(stage_of[i] for i in one.items) < s
        )
        in_flight = rule.in_flight[s] if rule.in_flight else 1
        workspace = max((item.workspace_bytes for item in items), default=0)
        weights = trained * rule.versions + frozen
        found.append(
            weights + math.ceil((trained - copied) * updated) + in_flight * kept + workspace
        )
    return found
