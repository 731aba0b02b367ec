"""Ranks that hold several stages in turn: likely cuts, and a bound for any cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import islice

import numpy as np

from pdcompile.passes.partition.any_cut import AnyCut, Array, Row, any_cut
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.chains import evenest, groups_of, straight_chains
from pdcompile.passes.partition.round_trips import likely_groups
from pdcompile.passes.partition.segments import Matrix, Segments
from pdcompile.passes.partition.space.candidates import evaluation, violations
from pdcompile.passes.partition.space.pipelines import (
    Part,
    graph_free_ledgers,
    limited,
)
from pdcompile.passes.schedules import warmup
from pdcompile.plan.evaluate import Deployment
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Candidate
from pdcompile.schedule.registry import kind_of

SECONDS = 2.0  # for the linear program of the bound
MARGINS = (0.0, 0.05, 0.1, 0.2)  # of the memory, for what ops hold and items do not say
ROUNDS = 4  # for each of them
MAX_CUTS, MORE = 500, 1.5  # of small problems, whose largest load is so much at most
MANY_BEGUN = 5_000  # chains of these, until the search for more of them ends
LEAST = 0.1  # of an equal share, for every stage
SOME = "of ranks that hold several stages only likely cuts were tried"


class StagesInTurn:
    """Candidates of one setting: cuts whose stages take as long as suits the order of tasks.

    What a rank's stages hold together is in no formula: where memory is short a stage gets a part
    of its rank's, and the search moves single groups of its best candidate by the schedule's own
    clock afterwards.
    """

    def __init__(self, part: Part):
        assert part.stages is not None
        self.part, self.prepared, self.setting = part, part.prepared, part.setting
        self.space, self.seats = part.space, part.seats
        setting, seats, replicas, stages = part.setting, part.seats, part.counts[0], part.stages
        self.counts = (replicas,) * stages
        places, given = len(seats.ranks) // replicas, part.space.placement
        if (len(given), len({*given})) != (stages, places):  # of other counts than the space says
            given = tuple(kind_of(setting.schedule).placement(stages, places))
        self.placement = given
        ranks = kind_of(setting.schedule).ranks(self.placement, replicas)
        self.ranks = tuple(tuple(seats.ranks[p] for p in own) for own in ranks)
        self.warmup = warmup(
            setting.schedule, stages, setting.num_microbatches, self.counts,
            placement=self.placement,
        )  # fmt: skip

    @cached_property
    def cut(self) -> AnyCut:
        """The bound for any cut whose stages all hold some of the longest path, and its shares."""
        r, name = self.counts[0], self.setting.schedule
        m, speeds = self.setting.num_microbatches, self.on().speeds
        share = StageDeployment(r).share(m)
        if kind_of(name).dispatched:  # those that are over are on this rank or that
            share = max(m // r, 1)
        again = self._again and not kind_of(name).splits_backward
        free = ((0.0, 0.0),) * (len(speeds) - 1)
        row = Row(name, share, self.warmup, tuple(speeds), free, self.placement, again)
        budget = Budget(SECONDS)
        forward, backward = self._seconds
        return any_cut(row, sum(forward), sum(backward), lambda: budget.late)

    def bound(self) -> float:
        """Seconds of a minibatch that no such cut is below."""
        return float(self.cut.each(*self._seconds).sum()) * (1 - 1e-9)

    @property
    def _again(self) -> bool:
        """True if every stage recomputes."""
        return False not in self.space.recompute

    @cached_property
    def _seconds(self) -> tuple[list[float], list[float]]:
        """Seconds of each group forward and backward at speed 1, at least: with its weights' way
        from the host and its gradients' there, where a rank gets them to run it."""
        model, on = self.prepared.whole, self.on(again=self._again)
        each = min(on.speeds) / max(on.rates.values()) if on.rates else 0.0
        trained = each * np.array(model.trainable_bytes, dtype=float)
        held = trained + each * np.array(model.frozen_bytes, dtype=float)
        return (model.forward + held).tolist(), (model.backward + trained).tolist()

    def candidates(self, below: Callable[[], float]) -> Iterator[tuple[float, Candidate | None]]:
        """(bound, candidate), None for one that breaks something; `below()` is 0 once time is
        over."""
        return ((0.0, self.part.allowed(one)) for one in self._made(below))

    def likely(self) -> Iterator[Candidate]:
        """Cuts at positions into equal loads, and where messages cost little, for every choice of
        what recomputes."""
        problem, cluster = self.prepared.problem, self.seats.cluster
        positions, equal = self.prepared.positions, np.full(len(self.counts), 1 / len(self.counts))
        for stage_of in dict.fromkeys((self._cut(positions), self._quickest(positions, equal))):
            found = self._recomputing(stage_of)
            yield from (one for one in found if not violations(problem, cluster, one))

    def _made(self, below: Callable[[], float]) -> Iterator[Candidate]:
        """The cut that suits the order of tasks and that of equal loads, with what fits of their
        kind; then of small problems those whose loads differ little."""
        segments = self.prepared.segments
        suits = self.cut.shares.clip(LEAST / len(self.counts))
        for stage_of in (self._quickest(segments, suits), self._cut(segments)):
            for one in self._recomputing(stage_of):
                yield one
                yield from self._fitted(one)
        if not self.prepared.complete:
            return
        loads = self._loads(segments)
        chains = straight_chains(segments, loads.__getitem__, len(loads), keep=True)
        most = MORE * chains.solve()
        similar = chains.enumerate(lambda: most if below() else 0.0, MANY_BEGUN)
        for _, pieces in islice(similar, MAX_CUTS):
            yield from self._recomputing(segments.model.items_of(groups_of(segments, pieces)))

    def on(self, *, again: bool = False) -> Deployment:
        """Deployment of the stages, all of them recomputing or none."""
        options = tuple(StageDeployment(replicas, again) for replicas in self.counts)
        one = Candidate(self.setting, (), options, self.ranks, self.warmup)
        return evaluation(self.prepared.problem, self.seats.cluster, one).deployment

    def _loads(self, segments: Segments, limits: Mapping[int, int] | None = None) -> list[Matrix]:
        """Loads of the stages, within so many bytes of each."""
        again = True in self.space.recompute if limits else self._again
        own = [(limits or {}).get(s) for s in range(len(self.counts))]
        loads = segments.loads(replace(self.on(again=again), limits=own))
        if (last := self.prepared.last(segments.model)) is not None:
            held = segments.inside[:, last]
            loads = [np.where(held, np.inf, load) for load in loads[:-1]] + loads[-1:]
        return loads

    def _cut(self, segments: Segments, limits: Mapping[int, int] | None = None) -> tuple[int, ...]:
        """The stage of every item where the largest load is least; empty: none is."""
        found = evenest(segments, self._loads(segments, limits))
        return () if found is None else segments.model.items_of(found)

    def _quickest(self, segments: Segments, shares: Array) -> tuple[int, ...]:
        """The stage of every item where none is slow by these shares and no round trip takes long;
        empty: none is."""
        on, loads = self.on(again=self._again), self._loads(segments)
        found = likely_groups(segments, on, shares.tolist(), loads=loads)
        return () if found is None else segments.model.items_of(found)

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
                ledgers = graph_free_ledgers(problem, cluster, candidate)
                parts = {
                    s: limit * (1 - margin) / max(ledgers[self.ranks[s][0]].total_bytes, 1)
                    for s, limit in enumerate(found.deployment.limits)
                    if limit is not None
                }
                if min(parts.values()) >= 1:
                    break
                limits = {s: max(0, int(found.memory(s) * part)) for s, part in parts.items()}
                stage_of = self._cut(self.prepared.segments, limits)
                if not stage_of:
                    return
                candidate = replace(candidate, stage_of=stage_of)
                yield candidate

    def _recomputing(self, stage_of: tuple[int, ...]) -> Iterator[Candidate]:
        """Candidates of a cut, if there is one, whose stages recompute as is asked; where that is
        open none to begin with, then all."""
        each = [(again,) * len(self.counts) for again in self.space.recompute]
        for again in ([self.space.recomputed] if self.space.recomputed else each) * bool(stage_of):
            options = tuple(map(StageDeployment, self.counts, again))
            yield Candidate(self.setting, stage_of, options, self.ranks, self.warmup)
