"""The plan of a candidate: the search judges a candidate by its ledgers, and returns it."""

from __future__ import annotations

from dataclasses import replace

from pdcompile.cluster import Cluster
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.simulate import simulate
from pdcompile.passes.stages.assemble import plan_of_cut
from pdcompile.plan import Plan, Training
from pdcompile.problem import PartitionProblem
from pdcompile.problem.space import Candidate


def candidate_plan(
    graph: OpGraph,
    problem: PartitionProblem,
    candidate: Candidate,
    training: Training,
    cluster: Cluster,
) -> Plan:
    """The plan with its forecast; nothing is certified yet.

    Args:
        graph: with the costs of the candidate's microbatches; `problem` is its coarse form.
        training: what the candidate's setting leaves open.
    """
    placed = zip(problem.items, candidate.stage_of, strict=True)
    stage_of = {name: stage for item, stage in placed for name in item.ops}
    setting = candidate.setting
    training = replace(
        training,
        schedule=setting.schedule,
        num_microbatches=setting.num_microbatches,
        warmup=candidate.warmup,
        updates="home" if setting.homes else "every",
    )
    plan = plan_of_cut(graph, stage_of, candidate.ranks, training, cluster)
    stages = tuple(
        replace(stage, recompute=option.recompute)
        for stage, option in zip(plan.stages, candidate.options, strict=True)
    )
    plan = replace(plan, stages=stages)
    return replace(plan, forecast=simulate(plan, timeline=False).forecast)
