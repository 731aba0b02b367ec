"""A candidate's ranks on a cluster, for the one evaluator; and a candidate in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdcompile.cluster import Cluster
from pdcompile.plan.evaluate import Deployment, Evaluation
from pdcompile.plan.times import half_duplex
from pdcompile.problem import Holding, PartitionProblem
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Candidate, Setting
from pdcompile.schedule.registry import GRADIENT_SLOTS, kind_of, name_of


def evaluation(problem: PartitionProblem, cluster: Cluster, candidate: Candidate) -> Evaluation:
    """Evaluation; without a flush in seconds per microbatch, a lower bound with replicas."""
    devices, setting = cluster.devices, candidate.setting
    limits = [
        min((x for rank in ranks if (x := devices[rank].memory_bytes) is not None), default=None)
        for ranks in candidate.ranks
    ]
    fetched = all(is_fetched(setting, option, cluster) for option in candidate.options)
    deployment = Deployment(
        candidate.ranks,
        [min(devices[rank].speed for rank in ranks) for ranks in candidate.ranks],
        limits,
        half_duplex(cluster, candidate.ranks),
        [depth + 1 for depth in candidate.warmup],
        kind_of(setting.schedule).drains,
        setting.schedule,
        setting.num_microbatches,
        [
            holding(setting, option, depth, candidate.warmup[0], candidate.warmup[0], cluster)
            for option, depth in zip(candidate.options, candidate.warmup, strict=True)
        ],
        [option.recompute for option in candidate.options],
        cluster.level_between,
        clips=setting.clipping and not candidate.straight,
        homes=setting.homes and not candidate.straight,
        rates={r: devices[r].host_rate for own in candidate.ranks for r in own} if fetched else {},
    )
    return Evaluation(problem, candidate.stage_of, deployment)


def holding(
    setting: Setting, option: StageDeployment, depth: int, first: int, like: int, cluster: Cluster
) -> Holding:
    """Factors of what a rank of a stage holds.

    `depth`: its warm-up; `first`: that of the first stage; `like`: of which depth a schedule that
    splits backwards may hold as much.
    """
    kind, share = kind_of(setting.schedule), option.share(setting.num_microbatches)
    held, away = kind.depth_held(depth, like), is_fetched(setting, option, cluster)
    late = setting.clipping or option.replicas > 1
    buffers = kind.gradients_beside(depth, first, share, late=late)
    return Holding(
        1 if away else kind.versions(depth, first),
        1 if away else buffers,
        0 if away else setting.optimizer_factor / (option.replicas if setting.homes else 1),
        option.kept(kind.in_flight(held, share)),
        kind.slots(held, share),
        min(GRADIENT_SLOTS, kind.in_flight(depth, share)),
        option.replicas if kind.dispatched and setting.homes and cluster.on_host else 1,
    )


def scheduled(
    problem: PartitionProblem, cluster: Cluster, setting: Setting, depths: Sequence[int]
) -> PartitionProblem:
    """The problem under a schedule, with a rank a stage and warm-ups of these depths.

    Raises ScheduleError for an unknown schedule.
    """
    kind, m, first = kind_of(setting.schedule), setting.num_microbatches, depths[0]
    return replace(
        problem,
        schedule=setting.schedule,
        in_flight=tuple(kind.in_flight(depth, m) for depth in depths),
        holdings=tuple(
            holding(setting, StageDeployment(), depth, first, first, cluster) for depth in depths
        ),
        num_microbatches=m,
        objective=kind.objective,
    )


def is_fetched(setting: Setting, option: StageDeployment, cluster: Cluster) -> bool:
    """True if weights of a stage rest on the host, and come to the rank that runs it."""
    homes = kind_of(setting.schedule).dispatched and setting.homes
    return homes and option.recompute and option.replicas > 1 and cluster.apart


def violations(problem: PartitionProblem, cluster: Cluster, candidate: Candidate) -> list[str]:
    """Rules that a candidate breaks, in words; empty when it is allowed."""
    return list(evaluation(problem, cluster, candidate).violations())


def choices(candidate: Candidate) -> dict[str, str]:
    """Values of all that was chosen besides the cut: ``{"schedule": "2bw", "stages": "3", …}``."""
    setting, count = candidate.setting, len(candidate.options)
    widths = [str(option.replicas) for option in candidate.options]
    again = sum(option.recompute for option in candidate.options)
    extra = f", extra warm-up {setting.extra_warmup}" if setting.extra_warmup else ""
    places = len(candidate.places)
    where = f" on {places} place{'s' * (places > 1)}" if candidate.shared else ""
    return {
        "schedule": name_of(setting.schedule) + extra,
        "microbatches": str(setting.num_microbatches),
        "stages": f"{count}{where}",
        "replicas": widths[0] if len(set(widths)) == 1 else "-".join(widths),
        "recomputation": {0: "none", count: "all stages"}.get(again, "some stages"),
        **({} if candidate.straight else {"updates": "home" if setting.homes else "every"}),
    }


def describe(candidate: Candidate) -> str:
    """``2bw, 16 microbatches, 3 stages of 4-2-2 ranks, 1 recomputing``."""
    made, setting, stages = choices(candidate), candidate.setting, len(candidate.options)
    again = sum(option.recompute for option in candidate.options)
    widths = made["replicas"]
    each = f"{widths} rank" + "s" * (widths != "1")
    several = " each" * (stages > 1 and widths.isdigit())
    where = made["stages"].replace(str(stages), f"{stages} stage" + "s" * (stages > 1), 1)
    pieces = f"{setting.num_microbatches} microbatch" + "es" * (setting.num_microbatches > 1)
    text = f"{made['schedule']}, {pieces}, {where} of {each}{several}"
    recomputing = f", {'all' if again == stages else again} recomputing" if again else ""
    return text + recomputing + ", updates at homes" * setting.homes
