"""Plans made from hand-made graphs as the driver makes them, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdcompile.cluster import Cluster
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.planning.branch_and_bound import best_plan
from pdcompile.plan import Plan, Training
from pdcompile.plan.times import times_of
from pdcompile.problem import StageLimits
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
    certain: bool = True,
) -> Plan:
    """One stage a device, the problem inside; `training`: the rest of it; `certain`: as for
    `best_plan`."""
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
    return best_plan(lambda _: graph, lambda _: problem, cluster, space, training, certain=certain)


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
    """As somebody would edit it: another warm-up, and an objective that nobody has searched for."""
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
