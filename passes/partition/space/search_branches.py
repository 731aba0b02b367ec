"""The parts that the whole space is divided into, each with a first bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from pdcompile.cluster import Cluster
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.space.candidates import scheduled
from pdcompile.passes.partition.space.in_turn import SOME, StagesInTurn
from pdcompile.passes.partition.space.pipelines import (
    Part,
    Pipelines,
    PreparedProblem,
    likely_cuts,
)
from pdcompile.passes.partition.space.seats import Seats, arrangements
from pdcompile.plan import Training
from pdcompile.problem import PartitionProblem
from pdcompile.problem.deployment import StageDeployment, stage_limits
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from pdcompile.schedule.registry import kind_of

#: ranks, replica counts of a stage, and the number of stages if it is asked for or follows
Shape = tuple[tuple[int, ...], tuple[int, ...], int | None]


@dataclass
class Branch(Part):
    """Part of the space, and what is known of it; seconds are those of a step."""

    bound: float = field(init=False)
    sharp: bool = False
    candidates: Iterator[tuple[float, Candidate | None]] | None = None

    def __post_init__(self) -> None:
        self.bound = self.least_seconds

    @property
    def straight(self) -> Candidate:
        """Stages with a rank each, which are not cut yet."""
        return self.candidate((), (StageDeployment(),) * len(self.seats.ranks))

    @property
    def straight_problem(self) -> PartitionProblem:
        """The branch as a problem, where nothing but the cut of one rank a stage is open."""
        limits = stage_limits(self.seats.cluster, self.seats.ranks)
        own = replace(self.prepared.problem, stages=limits)
        return scheduled(own, self.seats.cluster, self.setting, self.straight.warmup)

    @property
    def left_out(self) -> str:
        """Reason why its candidates are not all there are; empty where they are."""
        if self.space.placement:
            return SOME
        complete = self.prepared.complete
        return "" if complete else "only some of the cuts of so large a model were tried"

    def sharpen(self) -> None:
        """Raise the bound where ranks hold several stages, which takes some time."""
        if self.space.placement and not self.sharp:
            self.bound = max(self.bound, self._in_turn.bound())
        self.sharp = True

    def pipelines(self, budget: Budget | None) -> Pipelines | StagesInTurn:
        """All candidates of the branch, or those that are tried; their bound may end in time."""
        return self._in_turn if self.space.placement else Pipelines(self, budget=budget)

    def likely(self, share: float) -> Iterator[Candidate]:
        """Candidates that are quickly found, of stages with a rank of their own those that take
        that share of the memory."""
        if self.space.placement:
            return self._in_turn.likely()
        return likely_cuts(replace(self, seats=replace(self.seats, share=share)))

    @cached_property
    def _in_turn(self) -> StagesInTurn:
        return StagesInTurn(self)


def branches(
    cluster: Cluster,
    space: SearchSpace,
    training: Training,
    prepared_at: Callable[[int], PreparedProblem],
) -> Iterator[Branch]:
    """Every setting with every order of devices, number of used ones, and replica counts."""
    for ranks, counts, stages in _shapes(cluster, space):
        seats = Seats(cluster, ranks)
        for setting in settings(space, training, len(ranks)):
            if counts == (1,) and setting.homes != space.homes[-1]:
                continue
            prepared = prepared_at(setting.num_microbatches)
            yield Branch(prepared, space, setting, seats, counts, stages)


def _shapes(cluster: Cluster, space: SearchSpace) -> Iterator[Shape]:
    if space.placement:
        yield from _places(cluster, space)
        return
    if space.in_order and space.stages:
        yield tuple(range(space.stages)), (1,), space.stages
        return
    orders, _ = arrangements(cluster)
    every = len(cluster.devices)
    lengths = range(1 if space.idle else every, every + 1)
    for ranks in dict.fromkeys(order[:used] for order in orders for used in lengths):
        for counts, stages in _widths(space, len(ranks)):
            yield ranks, counts, stages


def _places(cluster: Cluster, space: SearchSpace) -> Iterator[Shape]:
    """The same, where ranks hold several stages: of all places, or of fewer with more replicas; one
    place alone is no pipeline."""
    places, kind = len(set(space.placement)), kind_of(space.schedules[0])
    if not space.open_width:
        width = 1 if space.straight else space.widths[0]
        yield tuple(range(places * width)), (width,), space.stages
        return
    ranks = tuple(range(len(cluster.devices)))
    for width in (w for w in range(1, len(ranks) + 1) if len(ranks) % w == 0):
        fewer = len(ranks) // width
        stages = space.stages or len(space.placement) // places * fewer
        if fewer > 1 and stages % fewer == 0 and kind.holds(stages // fewer):
            yield ranks, (width,), stages


def _widths(space: SearchSpace, used: int) -> Iterator[tuple[tuple[int, ...], int | None]]:
    wanted = space.stages
    if space.widths or space.replicas == "any":
        if sum(space.widths) == used if space.widths else (wanted or 0) <= used:
            yield space.counts(used), wanted
        return
    for width in (1,) if space.straight else range(1, used + 1):
        stages, rest = divmod(used, width)
        if not rest and wanted in (None, stages):
            yield (width,), stages if wanted else None


def settings(space: SearchSpace, training: Training, used: int) -> Iterator[Setting]:
    """Every schedule with every number of microbatches, extra warm-up and place of updates."""
    clips = training.joint
    for schedule, m, homes in product(space.schedules, space.microbatches, space.homes):
        if homes and kind_of(schedule).updates_each and not space.straight:
            continue
        # whatever the warm-up is to be
        kind = kind_of(schedule)
        same = used == 1 or kind.warmup == "all" or kind.alone or space.placement
        for extra in space.extra_warmup[: 1 if same else None]:
            yield Setting(
                schedule, m, extra, training.optimizer_factor, clips, training.step, homes
            )
