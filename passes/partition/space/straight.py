"""Cuts of a problem along the order of its groups, and its bound along the heaviest path.

A straight problem says itself what each stage offers and holds; otherwise its stages reach as far
as those of every pipeline do (`reach`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, product

from pdcompile.cluster import Link
from pdcompile.passes.partition.model import Model, orders
from pdcompile.passes.partition.space.line import Line
from pdcompile.passes.partition.space.path_bound import (
    Path,
    PathBound,
    StageRules,
    groups_told_apart,
)
from pdcompile.passes.partition.space.probing import Late, Probing
from pdcompile.passes.partition.space.reach import Counts, Reach
from pdcompile.plan.makespan import warmup_of
from pdcompile.problem import StageLimits
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Setting
from pdcompile.schedule.registry import kind_of

MARGINS = (1.0, 0.9)  # of the memory: an item received and the largest workspace are not on a line
CHEAP = (1.25, 2.0, math.inf)  # times the least that crosses a cut, of cuts that are looked at
FEW = 100  # that are looked at at least
ORDERS = 5  # of the groups: as in the code, early, late, depth first, cheapest cut


@dataclass(frozen=True)
class OwnStages:
    """Stages of a problem as the seats of a pipeline with one rank each."""

    stages: tuple[StageLimits, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(len(self.stages)))

    @cached_property
    def fastest(self) -> float:
        return max(stage.speed for stage in self.stages)

    def speed(self, p: int, r: int) -> float:
        return self.stages[p].speed

    def memory(self, p: int, r: int) -> int | None:
        return self.stages[p].memory_bytes

    def ring(self, p: int, r: int) -> StageLimits:
        return self.stages[p]

    @cached_property
    def largest(self) -> int | None:
        """Bytes of the largest stage; None where one has no limit."""
        known = [size for one in self.stages if (size := one.memory_bytes) is not None]
        return max(known) if len(known) == len(self.stages) else None


@dataclass
class StraightReach(Reach):
    """Stages of a problem of one rank each, with its own memory rule and warm-up."""

    model: Model = field(kw_only=True)

    @cached_property
    def stream(self) -> bool:
        return self.model.problem.objective == "bottleneck"

    def _alternating(self, r: int, u: int, share: int) -> int:
        rule, m = self.model.problem.memory, self.setting.num_microbatches
        return max(0, share - 1 - warmup_of(rule.in_flight, self.ranks, m)[self.ranks - u])

    def _counts(self, option: StageDeployment, after: int) -> tuple[Counts, int]:
        rule, s = self.model.problem.memory, self.ranks - 1 - after
        saved, received, returned = rule.counts(s)
        updated = rule.buffers_of(s) + rule.optimizer_factor
        return (rule.versions_of(s) + updated, saved, received), returned


def _reach(model: Model, line: Line, *, balanced: bool = False) -> StraightReach:
    problem = model.problem
    setting = Setting(problem.memory.schedule, problem.num_microbatches)
    return StraightReach(
        line, setting, OwnStages(problem.stages), (StageDeployment(),), balanced=balanced,
        model=model,
    )  # fmt: skip


def order_cuts(model: Model, lower: float, late: Late) -> Iterator[tuple[int, ...]]:
    """Stages of groups of likely cuts along their order.

    `lower`: seconds of the objective that no plan is below.
    """
    stages = None if model.problem.allow_empty else model.num_stages
    limited = any(stage.memory_bytes is not None for stage in model.problem.stages)
    for order in islice(orders(model, 0), ORDERS):
        if late():
            return
        line = Line.of_order(model, order)
        for share, balanced in product(CHEAP, (False, True)):
            reach = _reach(model, line.cheap(share, FEW), balanced=balanced)
            for reach.memory in MARGINS if limited else MARGINS[:1]:
                probing = Probing(reach, stages)
                if probing.some(lower, math.inf, late):
                    yield reach.line.groups([begin for begin, _ in probing.chain()])


@dataclass
class StraightRules(StageRules):
    """Stages of a problem of one rank each: `path_bound`."""

    model: Model = field(kw_only=True)

    @staticmethod
    def of(model: Model) -> StraightRules:
        problem, stages = model.problem, OwnStages(model.problem.stages)
        return StraightRules(
            kind_of(problem.memory.schedule), problem.objective == "bottleneck",
            problem.num_microbatches, model.num_stages, (StageDeployment(),), stages.fastest,
            stages.largest, model=model,
        )  # fmt: skip

    def deepest(self, option: StageDeployment, after: int) -> int:
        if self.kind.written is not None:  # its order is nobody's
            return self.num_microbatches
        problem = self.model.problem
        depths = warmup_of(problem.memory.in_flight, self.ranks, self.num_microbatches)
        return max(depths[max(self.ranks - 1 - after, 0) :])

    def held(self, option: StageDeployment, after: int) -> tuple[float, int]:
        rule, stages = self.model.problem.memory, range(self.ranks - after)
        trained = min(rule.versions_of(t) + rule.buffers_of(t) for t in stages)
        return trained + rule.optimizer_factor, min(rule.counts(t)[0] for t in stages)

    def ring(self, replicas: int) -> Link:
        raise AssertionError("stages of a problem have one rank each")


def straight_bound(model: Model, lower: float, upper: float, late: Late) -> float:
    """Seconds of the objective from `lower` to `upper` that no assignment is below."""
    path = Path(model, groups_told_apart(model.num_stages, 1))
    return PathBound(path, StraightRules.of(model)).least(lower, upper, late) * (1 - 1e-9)
