"""The problem that a search solved, in the plan it found; and the plan as its evaluator saw it.

Plans of one rank a stage are an assignment of the problem; what else a search decides (replicas,
recomputation, which stages share a rank) the stages say.  Needs no torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pdcompile.cluster import Cluster
from pdcompile.passes.partition.space.candidates import evaluation, scheduled
from pdcompile.passes.schedules import warmup
from pdcompile.plan import Plan, Training
from pdcompile.plan.embedded import assignment, on_stages, plain, problem_of
from pdcompile.plan.evaluate import Evaluation
from pdcompile.plan.schema import ranks_of
from pdcompile.problem import Holding, PartitionProblem
from pdcompile.problem.deployment import stage_limits
from pdcompile.problem.space import Candidate, SearchSpace, Setting

MOST_EXTRA = 4


def with_problem(plan: Plan, problem: PartitionProblem, cluster: Cluster) -> Plan:
    """The plan with the problem that was solved, as one of the plan's own stages.

    What it says stages hold is of one rank a stage: of replicas it says nothing.
    """
    training, count = plan.training, len(plan.stages)
    limits = stage_limits(cluster, [own[0] for own in plan.ranks])
    own = replace(on_stages(problem, count), stages=limits)
    own = scheduled(own, cluster, setting_of(training), training.warmup or range(count)[::-1])
    if any(stage.replicas > 1 for stage in plan.stages):
        unknown = (Holding(optimizer_factor=training.optimizer_factor),) * count
        own = replace(own, in_flight=(), holdings=unknown)
    return replace(plan, problem=own)


def placed(plan: Plan, where: str = "plan.json") -> Evaluation:
    """The plan's assignment of its problem, on the ranks of its stages.  Raises as `assignment`."""
    problem, stage_of = problem_of(plan, where), assignment(plan, where)
    if plain(plan):
        return Evaluation(problem, stage_of)
    cluster = Cluster.from_toml(plan.cluster, where=f"{where}: cluster")
    found = evaluation(problem, cluster, candidate_of(plan, where))
    paces = [stage.paces or (1.0,) * stage.replicas for stage in plan.stages]
    on = replace(found.deployment, patterns=plan.spec.patterns, paces=paces)
    return Evaluation(problem, stage_of, on if plan.patterned else found.deployment)


def setting_of(training: Training) -> Setting:
    """Setting of a training: all that it decides besides the cut."""
    return Setting(
        training.schedule,
        training.num_microbatches,
        optimizer_factor=training.optimizer_factor,
        clipping=training.joint,
        step=training.step,
        homes=training.updates == "home",
    )


def candidate_of(plan: Plan, where: str = "plan.json") -> Candidate:
    """Candidate that the search knew the plan as.  Raises as `assignment`."""
    training, stages = plan.training, plan.stages
    return Candidate(
        setting_of(training),
        assignment(plan, where),
        tuple(stage.deployment for stage in stages),
        tuple(ranks_of(stages)),
        training.warmup or tuple(reversed(range(len(stages)))),
    )


def extra_warmup(plan: Plan) -> int:
    """Depth of the plan's warm-up beyond the least (`extra` of `warmup`); 0 when odd."""
    training, replicas = plan.training, tuple(stage.replicas for stage in plan.stages)
    own = training.schedule, len(replicas), training.num_microbatches, replicas
    same = (n for n in range(MOST_EXTRA + 1) if warmup(*own, n) == training.warmup)
    return next(same, 0)


def choices_of(plan: Plan) -> dict[str, Any]:
    """The options that make a search decide the cut alone, all else being as in the plan; where the
    plan leaves devices idle, the replicas too."""
    training, ranks, stages = plan.training, plan.ranks, plan.stages
    replicas, several = tuple(stage.replicas for stage in stages), len({*ranks}) < len(ranks)
    there = len(Cluster.from_toml(plan.cluster).devices)
    idle = len({rank for own in ranks for rank in own}) < there
    own = replicas[0] if several or {*replicas} == {1} else replicas
    own = 1 if training.kind.dispatched else own  # they follow
    return {
        "schedule": training.schedule,
        "microbatches": training.num_microbatches,
        "microbatch_counts": None,
        "stages": len(stages),
        "replicas": "any" if idle else own,  # fixed replicas need every device
        "recompute": tuple(stage.recompute for stage in stages),
        "updates": training.updates,
        "extra_warmup": (extra_warmup(plan),),
    }


def space_of_cut(plan: Plan) -> SearchSpace:
    """The space of the cut alone: all else is as in the plan."""
    training, ranks, count = plan.training, plan.ranks, len(plan.stages)
    replicas = tuple(stage.replicas for stage in plan.stages)
    again = tuple(stage.recompute for stage in plan.stages)
    straight, places = {*replicas} == {1}, len({tuple(sorted(own)) for own in ranks})
    return SearchSpace(
        replicas="1" if straight else replicas,
        recompute=tuple(sorted({*again})),
        schedules=(training.schedule,),
        microbatches=(training.num_microbatches,),
        stages=count,
        in_order=straight or places < count,
        recomputed=again if len({*again}) > 1 else (),
        placement=training.kind.placement(count, places) if places < count else (),
        homes=(training.updates == "home",),
    )
