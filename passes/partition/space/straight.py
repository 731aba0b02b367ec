"""Bound of a problem with one rank a stage: along its heaviest path."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise

import numpy as np

from pdcompile.passes.partition.budget import Late
from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.space.path_bound import (
    Array,
    Hops,
    Path,
    PathBound,
    StageRules,
    groups_told_apart,
    with_gradients,
)
from pdcompile.plan.makespan import warmup_of
from pdcompile.problem import StageLimits
from pdcompile.problem.deployment import StageDeployment
from pdcompile.schedule.registry import kind_of

MOST = 300  # groups of the path that are told apart


def rules_of(path: Path, depths: Sequence[int]) -> StageRules:
    """Stages of a problem of one rank each, and of these warm-ups."""
    model = path.model
    problem, stages = model.problem, model.problem.stages
    limits = [size for one in stages if (size := one.memory_bytes) is not None]
    kind, count = kind_of(problem.schedule), model.num_stages

    def deepest(_: StageDeployment, after: int) -> int:
        if kind.written is not None:  # its order is nobody's
            return problem.num_microbatches
        return max(depths[max(count - 1 - after, 0) :])

    def held(_: StageDeployment, after: int) -> tuple[float, int]:
        able = list(map(problem.holding, range(count - after)))
        return min(t.versions + t.updated for t in able), min(t.saved for t in able)

    return StageRules(
        kind, problem.objective == "bottleneck", problem.num_microbatches, count,
        (StageDeployment(),), max(one.speed for one in stages),
        max(limits) if len(limits) == len(stages) else None, deepest, held,
        hops=cache(partial(hops_of, path)) if problem.objective == "flush" else None,
        most_lost=model.num_groups - path.size,
    )  # fmt: skip


def hops_of(path: Path, lost: int) -> list[Hops]:
    """Links between stages with some of the path, all but so many: on each at least what one of its
    groups passes to the next.

    Where some have none, a stage may be any of them, and its link the best.
    """
    model, stages = path.model, path.model.problem.stages
    places = [path.whole.index(v) for v in path.kept]

    @cache
    def between(link: StageLimits) -> Array:
        each = np.add(*_passed(model, path.whole, link))
        least = [each[a:b].min() for a, b in pairwise(places)]
        return np.array([np.inf, *least, np.inf])

    before, behind = ([np.full(path.size + 1, np.inf)] for _ in range(2))
    before[0][0] = behind[0][-1] = 0.0
    hops, speeds = list(map(between, stages[:-1])), [stage.speed for stage in stages]
    if lost:
        hops, speeds = [np.min(hops, 0)] * (len(hops) - lost), [max(speeds)] * len(speeds)
    for there, back in zip(hops, reversed(hops), strict=True):
        fewer = np.minimum.accumulate(before[-1])[:-1]
        before.append(there + np.concatenate(([np.inf], fewer)))
        more = np.minimum.accumulate(behind[-1][::-1])[::-1][1:]
        behind.append(back + np.concatenate((more, [np.inf])))
    return [Hops(*one) for one in zip(speeds, before, reversed(behind), strict=False)]


def _passed(model: Model, path: Sequence[int], link: StageLimits) -> tuple[Array, Array]:
    """Seconds on a link of what each group of a path passes to the next, and of what returns."""
    there, back = np.zeros(len(path) - 1), np.zeros(len(path) - 1)
    place, following = {v: n for n, v in enumerate(path)}, dict(pairwise(path))
    for flow in with_gradients(model):
        if following.get(flow.sources[0]) in flow.sinks:
            there[place[flow.sources[0]]] += flow.forward_seconds(link)
            back[place[flow.sources[0]]] += flow.backward_seconds(link)
    return there, back


def straight_bound(model: Model, lower: float, upper: float, late: Late) -> float:
    """Seconds of the objective from `lower` to `upper` that no assignment is below."""
    depths = warmup_of(model.problem.in_flight, model.num_stages, model.problem.num_microbatches)
    path = Path(model, groups_told_apart(model.num_stages, 1, MOST))
    return PathBound(path, rules_of(path, depths)).least(lower, upper, late) * (1 - 1e-9)
