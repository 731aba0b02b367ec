"""Rivals: plans next to a plan, which its bound must not exceed.

A lower bound is a claim about all plans; one cheaper plan refutes it.  Moving one item over one
boundary gives plans that the planner's problem allows, and the clock times them.  That is no
proof of a bound (solving again is: `pdcompile.passes.partition.partition`), only a cheap way to
find out that one is wrong.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence

from pdcompile.cluster import Cluster
from pdcompile.errors import PlanError
from pdcompile.plan.embedded import Finding, assignment, plain
from pdcompile.plan.evaluate import Evaluation
from pdcompile.plan.schema import Plan
from pdcompile.problem import PartitionProblem

MOST = 24  # rivals that are timed, of a pipeline that is not deep
MOST_EVENTS = 60_000  # stages × microbatches of all rivals together
TOLERANCE = 1e-6  # relative


def findings(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    """A rival that is faster than the certificate's bound, if one is found."""
    problem, bound = plan.problem, plan.certificate.bound_seconds * (1 - TOLERANCE)
    if problem is None or not plain(plan) or not all(one.full_duplex for one in cluster.levels):
        return
    # The bound of a search over more than the cut is of plans whose ledgers fit, not the formula.
    limited = any(stage.memory_bytes is not None for stage in problem.stages)
    if limited and plan.certificate.prover.startswith("branch and bound"):
        return
    try:
        stage_of = assignment(plan)
    except PlanError:
        return
    times = problem.num_microbatches if problem.objective == "flush" else 1
    left = max(2, min(MOST, MOST_EVENTS // (len(plan.stages) * problem.num_microbatches)))
    for item, rival in neighbours(problem, stage_of):
        found = Evaluation(problem, rival)
        busy = map(operator.add, found.times.forward, found.times.backward)
        if max(busy) * times >= bound or any(found.violations()):
            continue
        seconds = found.seconds
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
