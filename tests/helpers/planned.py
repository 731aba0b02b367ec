"""Plans made from hand-made graphs as the driver makes them, without torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pdcompile.cluster import Cluster
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.planning.branch_and_bound import best_plan
from pdcompile.passes.stages.assemble import plan_of_cut
from pdcompile.plan import Certificate, Plan, Training
from pdcompile.plan.times import times_of
from pdcompile.problem import Partition, PartitionProblem, StageLimits
from pdcompile.problem.constraints import Constraint
from pdcompile.problem.space import SearchSpace


def planned(
    graph: OpGraph,
    cluster: Cluster,
    *,
    schedule: str = "1f1b",
    microbatches: int = 4,
    batch_size: int = 16,
    constraints: Sequence[Constraint] = (),
    training: Training | None = None,
    tolerance: float = 0.0,
    time_limit: float | None = None,
) -> Plan:
    """One stage a device, the problem inside; `training`: the rest of it."""
    stages = len(cluster.devices)
    problem = coarsen(
        graph,
        (StageLimits(),) * stages,
        num_microbatches=microbatches,
        constraints=constraints,
    )
    space = SearchSpace(
        schedules=(schedule,), microbatches=(microbatches,), stages=stages, in_order=True
    )
    training = replace(training or Training(), batch_size=batch_size)
    return best_plan(
        lambda _: graph, lambda _: problem, cluster, space, training,
        tolerance=tolerance, time_limit=time_limit,
    )  # fmt: skip


def assembled(
    graph: OpGraph,
    problem: PartitionProblem,
    partition: Partition,
    certificate: Certificate,
    training: Training,
    cluster: Cluster,
) -> Plan:
    """The plan of a partition, without a forecast."""
    rows = zip(problem.items, partition.stage_of, strict=True)
    stage_of = {name: stage for item, stage in rows for name in item.ops}
    ranks = [(s,) for s in range(len(problem.stages))]
    plan = plan_of_cut(graph, stage_of, ranks, training, cluster)
    return replace(plan, certificate=certificate)


def moved(plan: Plan, ops: Sequence[str], to: int) -> Plan:
    """The plan as a person edits it: some ops on another stage, nothing else changed."""
    stages = tuple(
        replace(
            stage,
            ops=tuple(op for op in stage.ops if op not in ops)
            + (tuple(ops) if stage.index == to else ()),
        )
        for stage in plan.stages
    )
    return replace(plan, stages=stages, edges=())


def with_warmup(plan: Plan, depths: Sequence[int]) -> Plan:
    """Plan as somebody would edit it: another warm-up, and an objective that nobody has searched
    for."""
    plan = replace(
        plan,
        training=replace(plan.training, warmup=tuple(depths)),
        forecast=None,
        problem=None,
    )
    times = times_of(
        plan, Cluster.from_toml(plan.cluster), [e.value for e in plan.edges if e.gradient]
    )
    period = times.period([depth + 1 for depth in depths], plan.training.num_microbatches)
    certificate = replace(
        plan.certificate, objective_seconds=period, bound_seconds=0.0, status="feasible"
    )
    return replace(plan, certificate=certificate)


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
