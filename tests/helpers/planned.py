"""Plans made from hand-made graphs as the driver makes them, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdcompile.cluster import Cluster, stage_limits
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.planning.draft import straight_plan
from pdcompile.passes.schedules import memory_rule, warmup
from pdcompile.plan import Plan, Training
from pdcompile.problem.constraints import Constraint
from pdcompile.schedule.registry import kind_of


def planned(
    graph: OpGraph,
    cluster: Cluster,
    *,
    schedule: str = "1f1b",
    microbatches: int = 4,
    batch_size: int = 16,
    constraints: Sequence[Constraint] = (),
) -> Plan:
    """One stage a device, the problem inside."""
    num_stages = len(cluster.devices)
    depths = warmup(schedule, num_stages, microbatches)
    problem = coarsen(
        graph,
        stage_limits(cluster, num_stages),
        num_microbatches=microbatches,
        objective=kind_of(schedule).objective,
        memory=memory_rule(schedule, depths, microbatches),
        constraints=constraints,
    )
    training = Training(schedule, microbatches, batch_size, depths)

    return straight_plan(graph, problem, training, cluster)


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
