"""Ranks that hold several stages in turn: likely cuts, and what no cut can beat."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from pdcompile.cluster import Cluster, stage_limits
from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.search import solve
from pdcompile.passes.partition.space.candidates import evaluation, violations
from pdcompile.passes.partition.space.pipelines import (
    PreparedProblem,
    cuts,
    limited,
    recomputing,
    simulated,
)
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.passes.schedules import warmup
from pdcompile.problem import MemoryRule, PartitionProblem
from pdcompile.problem.space import Candidate, SearchSpace, Setting, StageOption

SECONDS = 1.0  # for one search
MARGINS = (0.0, 0.02, 0.05, 0.1)  # of the memory, for what ops hold and items do not say
MAX_STEPS = 50  # groups that are moved, for one margin
SOME = "of ranks that hold several stages only likely cuts were tried"


class StagesInTurn:
    """Candidates of one setting: the best cuts for as many ranks as there are stages.

    What a rank's stages take and hold together is not in that: single groups are moved until
    every rank's memory suffices, and the search moves more of its best candidate by the
    schedule's own clock afterwards.
    """

    def __init__(
        self,
        prepared: PreparedProblem,
        space: SearchSpace,
        setting: Setting,
        seats: Seats,
        *,
        likely: bool,
    ):
        """`likely`: none, as there are no likelier ones than those that come first anyway."""
        assert space.stages is not None
        self.prepared, self.space, self.setting, self.seats = prepared, space, setting, seats
        self.likely = likely
        every = range(space.stages)
        self.ranks = tuple(seats.ranks[s % len(seats.ranks)] for s in every)
        self.warmup = warmup(
            setting.schedule, len(every), setting.num_microbatches, per_rank=space.per_rank
        )

    def bound(self) -> float:
        """Nothing is known of these cuts but what holds for all (`least_seconds`)."""
        return math.inf if self.likely else 0.0

    def candidates(self, _: Callable[[], float]) -> Iterator[tuple[float, Candidate | None]]:
        """(bound, candidate), None for one that breaks something."""
        problem, cluster = self.prepared.problem, self.seats.cluster
        for straight in self._problems():
            try:
                search = solve(straight, Budget(SECONDS), self.prepared.seed, thorough=False)
            except InfeasibleError:
                continue
            if search.best is None:
                continue
            for options in self._options():
                cut = Candidate(
                    self.setting,
                    search.best.stage_of,
                    options,
                    tuple((rank,) for rank in self.ranks),
                    self.warmup,
                )
                for one in (cut, *fitted(self.prepared, cluster, cut)):
                    decided = self.space.decides_recomputation
                    made = recomputing(problem, cluster, one) if decided else one
                    yield 0.0, None if violations(problem, cluster, made) else made

    def _options(self) -> Iterator[tuple[StageOption, ...]]:
        """Which stages recompute: as is asked; where that is open none to begin with, then all."""
        if self.space.recomputed:
            yield tuple(StageOption(recompute=again) for again in self.space.recomputed)
            return
        for again in self.space.recompute:
            yield (StageOption(recompute=again),) * len(self.ranks)

    def _problems(self) -> Iterator[PartitionProblem]:
        """One rank a stage, without limits on memory: by the time of a minibatch, by load."""
        problem, setting = self.prepared.problem, self.setting
        limits = stage_limits(self.seats.cluster, len(self.ranks), ranks=self.ranks)
        last = len(problem.stages) - 1
        whole = replace(
            problem,
            stages=tuple(replace(one, memory_bytes=None) for one in limits),
            pins=tuple((i, len(limits) - 1 if s == last else s) for i, s in problem.pins),
            memory=MemoryRule(schedule=setting.schedule),
            num_microbatches=setting.num_microbatches,
            objective="flush",
        )
        yield whole
        yield replace(whole, objective="bottleneck")


def fitted(
    prepared: PreparedProblem, cluster: Cluster, candidate: Candidate
) -> Iterator[Candidate]:
    """The candidate with single groups moved until every rank's memory suffices, if that is found.

    By the formula, what the candidate's own ledgers have beyond it, and some more.
    """
    if not limited(cluster):
        return
    problem = prepared.problem
    free = replace(cluster, devices=tuple(replace(d, memory_bytes=None) for d in cluster.devices))
    first = evaluation(problem, cluster, candidate)
    ledgers = simulated(first, candidate, cluster).ledgers
    limits = {ranks[0]: (s, first.deployment.limits[s]) for s, ranks in enumerate(candidate.ranks)}
    beyond = {r: max(0, ledgers[r].total_bytes - first.needed(s)) for r, (s, _) in limits.items()}

    def excess(one: Candidate, margin: float) -> float:
        found = evaluation(problem, cluster, one)
        return sum(
            max(0.0, found.needed(s) + beyond[rank] - limit * (1 - margin))
            for rank, (s, limit) in limits.items()
            if limit is not None
        )

    for margin in MARGINS:
        left = excess(candidate, margin)
        for _ in range(MAX_STEPS):
            listed = [one for one in cuts(prepared, candidate) if one != candidate]
            allowed = [one for one in listed if left and not violations(problem, free, one)]
            least, place = min(
                ((excess(one, margin), n) for n, one in enumerate(allowed)), default=(left, 0)
            )
            if least >= left:
                break
            left, candidate = least, allowed[place]
        yield candidate


def least_seconds(prepared: PreparedProblem, setting: Setting, seats: Seats) -> float:
    """Of a minibatch, whatever the cut: a stage's first forward waits for those of all that an op
    of it depends on, then it runs every microbatch forward and backward."""
    items, before = prepared.problem.items, [0.0] * len(prepared.problem.items)
    readers: dict[int, list[int]] = {}
    for value in prepared.problem.traffic:
        readers.setdefault(value.producer, []).extend(value.consumers)
    most = 0.0
    for i, item in enumerate(items):
        both = item.forward_seconds + item.backward_seconds
        most = max(most, before[i] + setting.num_microbatches * both)
        for reader in readers.get(i, ()):
            before[reader] = max(before[reader], before[i] + item.forward_seconds)
    return most / seats.fastest * (1 - 1e-12)
