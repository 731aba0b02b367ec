"""Ranks that hold several stages in turn: likely cuts, and what no cut can beat."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from pdcompile.cluster import stage_limits
from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.search import solve
from pdcompile.passes.partition.space.candidates import evaluation, violations
from pdcompile.passes.partition.space.pipelines import (
    PreparedProblem,
    limited,
    recomputing,
    simulated,
)
from pdcompile.passes.partition.space.places_bound import OrderProgram
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.passes.schedules import rule_of, warmup
from pdcompile.problem import MemoryRule, PartitionProblem
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from pdcompile.schedule.registry import kind_of

SECONDS = 1.0  # for one search
MARGINS = (0.0, 0.05, 0.1, 0.2)  # of the memory, for what ops hold and items do not say
ROUNDS = 4  # for each of them
MAX_CUTS = 500  # that are all tried
SOME = "of ranks that hold several stages only likely cuts were tried"


class StagesInTurn:
    """Candidates of one setting: the best cuts for as many ranks as there are stages.

    What a rank's stages take and hold together is not in that: where memory is short a stage gets
    a part of its rank's, and the search moves single groups of its best candidate by the
    schedule's own clock afterwards.
    """

    def __init__(
        self,
        prepared: PreparedProblem,
        space: SearchSpace,
        setting: Setting,
        seats: Seats,
        replicas: int,
        stages: int,
        *,
        likely: bool,
    ):
        """`replicas` and `stages`: how many; `likely`: none, as there are no likelier ones than
        those that come first anyway."""
        self.prepared, self.space, self.setting, self.seats = prepared, space, setting, seats
        self.likely, self.counts = likely, (replicas,) * stages
        places = len(seats.ranks) // replicas
        placement = placement_of(space, setting, stages, places)
        self.places = OrderProgram(
            prepared, setting, seats, replicas, placement, again=False not in space.recompute
        )
        first = [place * replicas for place in placement]
        self.ranks = tuple(seats.ranks[p : p + replicas] for p in first)
        self.warmup = warmup(
            setting.schedule, stages, setting.num_microbatches, self.counts, placement=placement
        )

    def bound(self) -> float:
        """Bound by the order of tasks."""
        return math.inf if self.likely else self.places.bound

    def candidates(self, _: Callable[[], float]) -> Iterator[tuple[float, Candidate | None]]:
        """(bound, candidate), None for one that breaks something."""
        problem, cluster = self.prepared.problem, self.seats.cluster
        for one in self._made():
            if self.space.decides_recomputation:
                one = recomputing(problem, cluster, one)
            yield 0.0, None if violations(problem, cluster, one) else one

    def _made(self) -> Iterator[Candidate]:
        """The likely cuts and those that fit; then all cuts where they are few."""
        ranks = self.ranks
        likely, every = self._cuts(), every_cut(self.prepared, len(ranks))
        for fits, cuts_of in ((True, likely), (False, every)):
            for stage_of in cuts_of:
                for options in self._options():
                    one = Candidate(self.setting, stage_of, options, ranks, self.warmup)
                    yield one
                    if fits:
                        yield from self._fitted(one)

    def _cuts(self) -> Iterator[tuple[int, ...]]:
        if by_shares := self._by_shares():
            yield by_shares
        yield from (found for problem in self._problems() if (found := self._solved(problem)))

    def _by_shares(self) -> tuple[int, ...]:
        """The stages of a cut along the order of the groups, where little crosses, into shares of
        the work that suit the order of tasks; empty where there are too few places to cut."""
        model, line = self.prepared.whole, self.prepared.order_lines[0]
        inner, count = line.cuts[1:-1], len(self.ranks)
        if len(inner) < count - 1:
            return ()
        wanted = self.places.shares.cumsum()[:-1] * line.whole
        at = np.searchsorted(line.before.work[inner], wanted)
        rising = np.arange(count - 1)
        at = np.maximum.accumulate(at - rising) + rising  # each stage has something
        at = np.minimum(at, len(inner) - (count - 1) + rising)
        groups = np.searchsorted(inner[at], np.arange(model.num_groups), "right")
        return model.items_of(groups.tolist())

    def _solved(self, straight: PartitionProblem) -> tuple[int, ...]:
        """The stages of the best cut that is found quickly; empty where there is none."""
        try:
            search = solve(straight, Budget(SECONDS), self.prepared.seed, thorough=False)
        except InfeasibleError:
            return ()
        return () if search.best is None else search.best.stage_of

    def _fitted(self, candidate: Candidate) -> Iterator[Candidate]:
        """Cuts whose stages share the memory of their ranks as those of the candidate do.

        In proportion, as long as a rank's ledger exceeds its memory or comes close.
        """
        problem, cluster = self.prepared.problem, self.seats.cluster
        if not limited(cluster):
            return
        straight = replace(next(self._problems()), memory=self._rule())
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
                stage_of = self._solved(straight.with_memory(limits))
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

    def _rule(self) -> MemoryRule:
        """Memory of a stage; where one recomputes it keeps one set of activations at a time."""
        rule = rule_of(self.setting, self.warmup, self.counts)
        return replace(rule, in_flight=()) if True in self.space.recompute else rule

    def _problems(self) -> Iterator[PartitionProblem]:
        """One rank a stage, without limits on memory: by the time of a minibatch, by load."""
        problem, setting = self.prepared.problem, self.setting
        first = tuple(rank for rank, *_ in self.ranks)
        limits = stage_limits(self.seats.cluster, len(self.ranks), ranks=first)
        last = len(problem.stages) - 1
        whole = replace(
            problem,
            stages=tuple(replace(one, memory_bytes=None) for one in limits),
            pins=tuple((i, len(limits) - 1 if s == last else s) for i, s in problem.pins),
            memory=MemoryRule(schedule=setting.schedule),
            num_microbatches=-(-setting.num_microbatches // self.counts[0]),
            objective="flush",
        )
        yield whole
        yield replace(whole, objective="bottleneck")


def placement_of(space: SearchSpace, setting: Setting, stages: int, places: int) -> tuple[int, ...]:
    """The place of every stage: as the space says it, or of other counts as the schedule does."""
    placement = space.placement
    if (len(placement), len(set(placement))) != (stages, places):
        return kind_of(setting.schedule).placement(stages, places)
    return placement


def every_cut(prepared: PreparedProblem, num_stages: int) -> list[tuple[int, ...]]:
    """The stage of every item in all cuts, if these are no more than `MAX_CUTS`; else none."""
    model, ideals = prepared.model, sorted(prepared.segments.ideals, key=int.bit_count)

    def nested(held: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Ideals, each within the next: what stages up to the first, the second, … hold."""
        left = num_stages - 1 - len(held)
        if not left:
            yield held
            return
        before = held[-1] if held else 0
        for one in ideals:
            fits = before.bit_count() < one.bit_count() <= model.num_groups - left
            if fits and one & before == before:
                yield from nested((*held, one))

    found = list(islice(nested(()), MAX_CUTS + 1))
    if len(found) > MAX_CUTS:
        return []
    return [
        model.items_of(
            tuple(sum(not held >> v & 1 for held in cut) for v in range(model.num_groups))
        )
        for cut in found
    ]


def least_seconds(
    prepared: PreparedProblem, setting: Setting, seats: Seats, replicas: int
) -> float:
    """Lower bound on a minibatch for any cut: the first forward of a stage waits for those of all
    that an op of it depends on, then it runs every microbatch of a replica both ways."""
    share = StageDeployment(replicas).share(setting.num_microbatches)
    items, before = prepared.problem.items, [0.0] * len(prepared.problem.items)
    readers: dict[int, list[int]] = {}
    for value in prepared.problem.traffic:
        readers.setdefault(value.producer, []).extend(value.consumers)
    most = 0.0
    for i, item in enumerate(items):
        both = item.forward_seconds + item.backward_seconds
        most = max(most, before[i] + share * both)
        for reader in readers.get(i, ()):
            before[reader] = max(before[reader], before[i] + item.forward_seconds)
    return most / seats.fastest * (1 - 1e-12)
