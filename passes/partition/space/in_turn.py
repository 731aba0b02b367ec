"""Ranks that hold several stages in turn: likely cuts, and a bound for any cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice

from pdcompile.cluster import Link
from pdcompile.passes.partition.any_cut import AnyCut, Array, Row, any_cut
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.space.candidates import evaluation, violations
from pdcompile.passes.partition.space.chains import Chains
from pdcompile.passes.partition.space.matrices import Matrices
from pdcompile.passes.partition.space.pipelines import (
    PreparedProblem,
    limited,
    recomputing,
    simulated,
)
from pdcompile.passes.partition.space.seats import Positions, Seats
from pdcompile.passes.schedules import warmup
from pdcompile.problem import StageLimits
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from pdcompile.schedule.registry import kind_of

SECONDS = 2.0  # for the linear program of the bound
MARGINS = (0.0, 0.05, 0.1, 0.2)  # of the memory, for what ops hold and items do not say
ROUNDS = 4  # for each of them
MAX_CUTS = 500  # of small problems
FEW = 10  # of others
LEAST = 0.1  # of an equal share, for every stage
SOME = "of ranks that hold several stages only likely cuts were tried"


@dataclass(frozen=True)
class Turns:
    """Stages that take turns on the places of some seats, as if each had seats of its own.

    `limits`: bytes of memory that stages may take; `weights`: how much of all work is to be on
    each stage, relative.
    """

    seats: Seats
    placement: tuple[int, ...]
    replicas: int
    limits: Mapping[int, int] = field(default_factory=dict)
    weights: Sequence[float] | Array = ()

    @property
    def ranks(self) -> range:
        return range(len(self.placement) * self.replicas)

    @property
    def fastest(self) -> float:
        return self.seats.fastest

    def speed(self, p: int, r: int) -> float:
        weight = self.weights[p // r] if len(self.weights) else 1.0
        return self.seats.speed(self._first(p, r), r) * weight

    def memory(self, p: int, r: int) -> int | None:
        return self.limits.get(p // r)

    def ring(self, p: int, r: int) -> Link:
        return self.seats.ring(self._first(p, r), r)

    def between(self, first: slice, second: slice) -> StageLimits:
        """The link between two stages that follow each other; a free one beside the ends."""
        a = first.stop
        if not a or a == len(self.ranks):
            return StageLimits()
        before, after = (self.placement[p // self.replicas] for p in (a - 1, a))
        if before == after:
            return StageLimits()
        own = (slice(q * self.replicas, (q + 1) * self.replicas) for q in (before, after))
        return self.seats.between(*own)

    def _first(self, p: int, r: int) -> int:
        return self.placement[p // r] * r


class StagesInTurn:
    """Candidates of one setting: cuts whose stages take as long as suits the order of tasks.

    What a rank's stages hold together is in no formula: where memory is short a stage gets a part
    of its rank's, and the search moves single groups of its best candidate by the schedule's own
    clock afterwards.
    """

    def __init__(
        self,
        prepared: PreparedProblem,
        space: SearchSpace,
        setting: Setting,
        seats: Seats,
        replicas: int,
        stages: int,
    ):
        """`replicas` and `stages`: how many."""
        self.prepared, self.space, self.setting, self.seats = prepared, space, setting, seats
        self.counts = (replicas,) * stages
        places, given = len(seats.ranks) // replicas, space.placement
        if (len(given), len({*given})) != (stages, places):  # of other counts than the space says
            given = tuple(kind_of(setting.schedule).placement(stages, places))
        self.placement = given
        first = [place * replicas for place in self.placement]
        self.ranks = tuple(seats.ranks[p : p + replicas] for p in first)
        self.warmup = warmup(
            setting.schedule, stages, setting.num_microbatches, self.counts,
            placement=self.placement,
        )  # fmt: skip

    @cached_property
    def cut(self) -> AnyCut:
        """The bound for any cut whose stages all hold some of the longest path, and its shares."""
        turns = Turns(self.seats, self.placement, self.counts[0])
        model, r, name = self.prepared.whole, self.counts[0], self.setting.schedule
        share = StageDeployment(r).share(self.setting.num_microbatches)
        speeds = tuple(turns.speed(p, r) for p in turns.ranks[::r])
        again = False not in self.space.recompute and not kind_of(name).splits_backward
        free = ((0.0, 0.0),) * (len(speeds) - 1)
        row = Row(name, share, self.warmup, speeds, free, self.placement, again)
        budget = Budget(SECONDS)
        return any_cut(row, sum(model.forward), sum(model.backward), lambda: budget.late)

    def bound(self) -> float:
        """Seconds of a minibatch that no such cut is below."""
        model = self.prepared.whole
        return float(self.cut.each(model.forward, model.backward).sum()) * (1 - 1e-9)

    def candidates(self, _: Callable[[], float]) -> Iterator[tuple[float, Candidate | None]]:
        """(bound, candidate), None for one that breaks something."""
        problem, cluster = self.prepared.problem, self.seats.cluster
        for one in self._made():
            if self.space.decides_recomputation:
                one = recomputing(problem, cluster, one)
            yield 0.0, None if violations(problem, cluster, one) else one

    def likely(self) -> Iterator[Candidate]:
        """Cuts at positions into equal loads, for every choice of what recomputes."""
        for stage_of in islice(self._cuts(positions=True), 1):
            for options in self._options():
                one = Candidate(self.setting, stage_of, options, self.ranks, self.warmup)
                if not violations(self.prepared.problem, self.seats.cluster, one):
                    yield one

    def _made(self) -> Iterator[Candidate]:
        """The cut that suits the order of tasks, then others by rising load; those fitted first."""
        suits = self._cuts(self.cut.shares.clip(LEAST / len(self.counts)))
        most = MAX_CUTS if self.prepared.complete else FEW
        for n, stage_of in enumerate(chain(islice(suits, 1), islice(self._cuts(), most))):
            for options in self._options():
                one = Candidate(self.setting, stage_of, options, self.ranks, self.warmup)
                yield one
                if n <= 1:
                    yield from self._fitted(one)

    def _cuts(
        self,
        weights: Sequence[float] | Array = (),
        limits: Mapping[int, int] | None = None,
        *,
        positions: bool = False,
    ) -> Iterator[tuple[int, ...]]:
        """The stage of every item in cuts by the largest load of a stage, rising."""
        prepared, r = self.prepared, self.counts[0]
        whole = prepared.complete and not positions
        segments = prepared.segments if whole else prepared.positions
        turns = Turns(self.seats, self.placement, r, limits or {}, weights)
        matrices = _OfTurns(
            segments, self.setting, r == 1, False, prepared.last(segments.model), bounding=False,
            depths=self.warmup,
        )  # fmt: skip
        again = True in self.space.recompute if limits else False not in self.space.recompute
        numbered = prepared.stages is not None and segments.model.num_stages == len(self.counts)
        chains = Chains(
            matrices, turns, (StageDeployment(r, again),), len(self.counts), numbered, True
        )  # fmt: skip
        chains.solve()
        for _, pieces in chains.enumerate(lambda: float("inf")):
            yield segments.items_of([piece.end for piece in pieces])

    def _fitted(self, candidate: Candidate) -> Iterator[Candidate]:
        """Cuts whose stages share the memory of their ranks as those of the candidate do.

        In proportion, as long as a rank's ledger exceeds its memory or comes close.
        """
        problem, cluster = self.prepared.problem, self.seats.cluster
        if not limited(cluster):
            return
        for margin in MARGINS:
            for _ in range(ROUNDS):
                found = evaluation(problem, cluster, candidate)
                ledgers = simulated(found, candidate, cluster).ledgers
                parts = {
                    s: limit * (1 - margin) / max(ledgers[self.ranks[s][0]].total_bytes, 1)
                    for s, limit in enumerate(found.deployment.limits)
                    if limit is not None
                }
                if min(parts.values()) >= 1:
                    break
                limits = {s: max(0, int(found.memory(s) * part)) for s, part in parts.items()}
                stage_of = next(self._cuts((), limits), ())
                if not stage_of:
                    return
                candidate = replace(candidate, stage_of=stage_of)
                yield candidate

    def _options(self) -> Iterator[tuple[StageDeployment, ...]]:
        """Stages that recompute: as is asked; where that is open none to begin with, then all."""
        if self.space.recomputed:
            yield tuple(map(StageDeployment, self.counts, self.space.recomputed))
            return
        for again in self.space.recompute:
            yield tuple(StageDeployment(replicas, again) for replicas in self.counts)


@dataclass
class _OfTurns(Matrices):
    """Matrices of stages whose warm-up is known."""

    depths: tuple[int, ...] = ()

    def depth(self, seats: Positions, p: int, r: int, *, most: bool = False) -> int:
        return self.depths[min(p // r, len(self.depths) - 1)]
