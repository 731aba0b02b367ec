"""Ranks that hold several stages in turn: likely cuts, and a bound for any cut.

The order of a schedule is given, so a chain of tasks in which each waits for the one before it is
as long in every plan whose stages wait for their neighbours: T ≥ Σ_s c_s F_s + d_s W_s, where
c_s and d_s count how often it runs stage s forward and backward.  Any mixture of such chains
bounds T as well, and each group adds at least what it does on the cheapest stage.  The mixture that
is best if all groups were alike is the dual of a linear program: the least T and the share x_s of
all work of each stage such that T is no less than any chain.  There are too many chains to list
them: the critical one of the best shares so far is added until none is longer (cutting planes:
Kelley, 1960).  Equal shares are seldom best: with as many microbatches as stages the first stage
does up to one and a half times as much as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.budget import Budget, Late, handle_interrupts
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
from pdcompile.plan.times import Message, PipelineTimes
from pdcompile.problem import StageLimits
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Candidate
from pdcompile.schedule.registry import kind_of

Array = NDArray[np.float64]
#: from seconds of each stage forward and backward to how often a longest chain runs them
Critical = Callable[[Array, Array], tuple[Array, Array]]

SECONDS = 2.0  # for the linear program of the bound
CLOSE, MOST_CHAINS = 1e-4, 150  # relative, of the bound: where it ends, or after so many chains
STEP = 0.5  # of the way from the best shares to those of the linear program, every other time
MARGINS = (0.0, 0.05, 0.1, 0.2)  # of the memory, for what ops hold and items do not say
ROUNDS = 4  # for each of them
MANY_BEGUN, MORE = 5_000, 1.5  # chains of small problems, whose largest load is so much at most
LEAST = 0.1  # of an equal share, for every stage
SOME = "of ranks that hold several stages only likely cuts were tried"


@dataclass(frozen=True)
class AnyCut:
    """The best mixture of chains: how often F and W of each stage count.

    `shares`: of all work, of each stage, where T is least.
    """

    forward: Array  # of one second at the stage's speed
    backward: Array
    shares: Array

    def least(self, forward: Sequence[float], backward: Sequence[float]) -> float:
        """Seconds that groups take at least, each on the stage where it adds the fewest."""
        table = np.outer(self.forward, forward) + np.outer(self.backward, backward)
        return float(table.min(0).sum())


def any_cut(
    critical: Critical, speeds: Array, forward: float, backward: float, late: Late
) -> AnyCut:
    """The mixture for stages of these speeds and so many seconds of forward and backward in all."""
    from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

    solver = pywraplp.Solver.CreateSolver("GLOP")
    seconds = solver.NumVar(0.0, solver.infinity(), "")
    parts = [solver.NumVar(0.0, 1.0, "") for _ in speeds]
    whole = solver.RowConstraint(1.0, 1.0, "")
    for part in parts:
        whole.SetCoefficient(part, 1.0)
    solver.Minimize(seconds)
    shares = center = speeds / speeds.sum()
    best, chains, rows = np.inf, list[tuple[Array, Array]](), []
    for n in range(MOST_CHAINS):
        chain = critical(shares * forward / speeds, shares * backward / speeds)
        each = (chain[0] * forward + chain[1] * backward) / speeds
        length = float(each @ shares)
        if length <= best:
            best, center = length, shares
        chains.append(chain)
        rows.append(solver.RowConstraint(-solver.infinity(), 0.0, ""))
        rows[-1].SetCoefficient(seconds, -1.0)
        for s in np.flatnonzero(each):
            rows[-1].SetCoefficient(parts[s], float(each[s]))
        status = solver.Solve()
        handle_interrupts()
        if status != pywraplp.Solver.OPTIMAL:
            break
        shares = np.array([part.solution_value() for part in parts])
        if best - seconds.solution_value() <= CLOSE * best or late():
            break
        if n % 2:
            shares = (1 - STEP) * center + STEP * shares
    weights = np.maximum([-one.dual_value() for one in rows], 0.0)
    weights = weights / weights.sum() if weights.sum() else np.full(len(rows), 1 / len(rows))
    ahead, home = (np.tensordot(weights, np.array(each), 1) for each in zip(*chains, strict=True))
    return AnyCut(ahead / speeds, home / speeds, center)


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
        hops = [*pairwise(range(len(speeds)))]
        messages = [Message("forward", *hop, 0) for hop in hops]
        messages += [Message("backward", b, a, 0) for a, b in hops]
        free = PipelineTimes(
            speeds, speeds, [(place,) for place in self.placement], messages,
            lambda *_: StageLimits(), [False] * len(speeds), [0] * len(speeds), schedule=name,
        )  # fmt: skip

        def critical(ahead: Array, back: Array) -> tuple[Array, Array]:
            both = ahead.tolist(), (back + again * ahead).tolist()
            times = replace(free, forward=both[0], backward=both[1], again=both[0] * again)
            path = times.critical_path(self.warmup, share)
            home = np.array(path.backward)
            return np.array(path.forward) + again * home, home

        budget, (forward, backward) = Budget(SECONDS), self._seconds
        return any_cut(critical, np.array(speeds), sum(forward), sum(backward), lambda: budget.late)

    def bound(self) -> float:
        """Seconds of a minibatch that no such cut is below."""
        return self.cut.least(*self._seconds) * (1 - 1e-9)

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
        """(bound, candidate), None for one that breaks something; `below()` is infinite as long as
        there is no plan, and 0 once time is over."""
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
        kind; where nothing does, of small problems those whose loads differ little."""
        segments = self.prepared.segments
        suits = self.cut.shares.clip(LEAST / len(self.counts))
        for stage_of in (self._quickest(segments, suits), self._cut(segments)):
            for one in self._recomputing(stage_of):
                yield one
                yield from self._fitted(one)
        if not self.prepared.complete or below() < np.inf:
            return
        loads = self._loads(segments)
        chains = straight_chains(segments, loads.__getitem__, len(loads), keep=True)
        most = MORE * chains.solve()
        for _, pieces in chains.enumerate(lambda: most * (below() == np.inf), MANY_BEGUN):
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
