"""Bound of a problem with one rank a stage: along its heaviest path, and for any cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdcompile.passes.partition.any_cut import Row, any_cut
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.space.path_bound import (
    Path,
    PathBound,
    StageRules,
    groups_told_apart,
)
from pdcompile.plan.makespan import warmup_of
from pdcompile.problem.deployment import StageDeployment
from pdcompile.schedule.registry import kind_of


def rules_of(model: Model, depths: Sequence[int]) -> StageRules:
    """Stages of a problem of one rank each, and of these warm-ups."""
    problem, stages = model.problem, model.problem.stages
    limits = [size for one in stages if (size := one.memory_bytes) is not None]
    rule, kind, count = problem.memory, kind_of(problem.memory.schedule), model.num_stages

    def deepest(_: StageDeployment, after: int) -> int:
        if kind.written is not None:  # its order is nobody's
            return problem.num_microbatches
        return max(depths[max(count - 1 - after, 0) :])

    def held(_: StageDeployment, after: int) -> tuple[float, int]:
        able = range(count - after)
        trained = min(rule.versions_of(t) + rule.buffers_of(t) for t in able)
        return trained + rule.optimizer_factor, min(rule.counts(t)[0] for t in able)

    return StageRules(
        kind, problem.objective == "bottleneck", problem.num_microbatches, count,
        (StageDeployment(),), max(one.speed for one in stages),
        max(limits) if len(limits) == len(stages) else None, deepest, held,
    )  # fmt: skip


CHAINS = 0.1  # of the time, for the linear program over critical paths


def straight_bound(model: Model, lower: float, upper: float, budget: Budget) -> float:
    """Seconds of the objective from `lower` to `upper` that no assignment is below.

    Stages without the path, which pass nothing on, count for nothing on a chain of tasks: it is
    shorter by what they do beside the path.
    """
    problem, ranks = model.problem, model.num_stages
    depths = warmup_of(problem.memory.in_flight, ranks, problem.num_microbatches)
    path, rules = Path(model, groups_told_apart(ranks, 1)), rules_of(model, depths)
    work = sum(model.forward), sum(model.backward)
    floors: list[float] = []
    if problem.objective == "flush" and sum(work) and path.length >= ranks:
        speeds = tuple(stage.speed for stage in problem.stages)
        row = Row(
            problem.memory.schedule, rules.num_microbatches, depths, speeds, tuple(range(ranks))
        )
        allowed = Budget(CHAINS * budget.left, within=budget)
        each = any_cut(row, *work, lambda: allowed.late).each(
            model.forward, model.backward, np.array([model.lowest, model.highest])
        )
        floors = [each.sum()]
        # What a stage without work waits for, its neighbours wait for too, if depths only fall.
        if rules.kind.written is None and list(depths) == sorted(depths, reverse=True):
            most = float((each / np.maximum(path.work, 1e-300)).max())
            for k in range(1, ranks):
                lost = path.hidden[min(k, ranks - k + 1, len(path.hidden) - 1)]
                floors.append(each.sum() - most * lost)
    bound = PathBound(path, rules, floors=floors).least(lower, upper, lambda: budget.late)
    return bound * (1 - 1e-9)
