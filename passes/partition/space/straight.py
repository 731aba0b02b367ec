"""Bound of a problem with one rank a stage: along its heaviest path, and for any cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from pdcompile.cluster import Link
from pdcompile.passes.partition.any_cut import AnyCut, Row, any_cut
from pdcompile.passes.partition.budget import Late
from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.space.path_bound import (
    Path,
    PathBound,
    StageRules,
    groups_told_apart,
    heaviest_path,
    with_gradients,
)
from pdcompile.plan.makespan import warmup_of
from pdcompile.problem import StageLimits
from pdcompile.problem.deployment import StageDeployment
from pdcompile.schedule.registry import kind_of


@dataclass
class StraightRules(StageRules):
    """Stages of a problem of one rank each: `path_bound`."""

    model: Model = field(kw_only=True)

    @staticmethod
    def of(model: Model) -> StraightRules:
        problem, stages = model.problem, model.problem.stages
        limits = [size for one in stages if (size := one.memory_bytes) is not None]
        return StraightRules(
            kind_of(problem.memory.schedule), problem.objective == "bottleneck",
            problem.num_microbatches, model.num_stages, (StageDeployment(),),
            max(one.speed for one in stages), max(limits) if len(limits) == len(stages) else None,
            model=model,
        )  # fmt: skip

    def deepest(self, option: StageDeployment, after: int) -> int:
        if self.kind.written is not None:  # its order is nobody's
            return self.num_microbatches
        return max(self.depths[max(self.ranks - 1 - after, 0) :])

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Warm-up of each stage."""
        in_flight = self.model.problem.memory.in_flight
        return warmup_of(in_flight, self.ranks, self.num_microbatches)

    def held(self, option: StageDeployment, after: int) -> tuple[float, int]:
        rule, stages = self.model.problem.memory, range(self.ranks - after)
        trained = min(rule.versions_of(t) + rule.buffers_of(t) for t in stages)
        return trained + rule.optimizer_factor, min(rule.counts(t)[0] for t in stages)

    def ring(self, replicas: int) -> Link:
        raise AssertionError("stages of a problem have one rank each")


def straight_bound(
    model: Model, lower: float, upper: float, late: Late, cut: AnyCut | None = None
) -> float:
    """Seconds of the objective from `lower` to `upper` that no assignment is below.

    `cut`: the mixture of chains.  Stages without the path, which pass nothing on, count for nothing
    on a chain: it is shorter by its hops, and by what they do beside the path.
    """
    path, rules = Path(model, groups_told_apart(model.num_stages, 1)), StraightRules.of(model)
    floors: list[float] = []
    if cut is not None:
        each = cut.each(model.forward, model.backward, np.array([model.lowest, model.highest]))
        floors, depths = [each.sum() + cut.hops], rules.depths
        # What a stage without work waits for, its neighbours wait for too, if depths only fall.
        if rules.kind.written is None and list(depths) == sorted(depths, reverse=True):
            most = float((each / np.maximum(path.work, 1e-300)).max())
            for k in range(1, rules.ranks):
                lost = path.hidden[min(k, rules.ranks - k + 1, len(path.hidden) - 1)]
                floors.append(each.sum() - most * lost)
    return PathBound(path, rules, floors=floors).least(lower, upper, late) * (1 - 1e-9)


def cut_of(model: Model, late: Late) -> AnyCut | None:
    """The mixture of chains for a problem of one rank a stage; None without a flush or a path."""
    problem, path = model.problem, heaviest_path(model)
    work = sum(model.forward), sum(model.backward)
    if problem.objective == "bottleneck" or not sum(work) or len(path) < model.num_stages:
        return None
    following = dict(pairwise(path))
    carried = [one for one in with_gradients(model) if following.get(one.sources[0]) in one.sinks]

    def least(link: StageLimits) -> tuple[float, float]:
        """Seconds of what passes between two groups of the path, at least."""
        there: dict[int, float] = {}
        back: dict[int, float] = {}
        for flow in carried:
            v = flow.sources[0]
            there[v] = there.get(v, 0.0) + flow.forward_seconds(link)
            back[v] = back.get(v, 0.0) + flow.backward_seconds(link)
        return min(there.values()), min(back.values())

    in_flight, m = problem.memory.in_flight, problem.num_microbatches
    row = Row(
        problem.memory.schedule, m, warmup_of(in_flight, model.num_stages, m),
        tuple(stage.speed for stage in problem.stages), tuple(map(least, problem.stages[:-1])),
    )  # fmt: skip
    return any_cut(row, *work, late)
