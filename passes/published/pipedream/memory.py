"""Plans under a memory limit that holds: what a worker keeps, and the search that respects it.

PipeDream runs 1F1B and stashes weights: every minibatch in flight at a worker keeps its
activations and the version of the weights that it started with ('PipeDream', SOSP 2019,
sections 3.2 and 3.3).  Let stage s, counted over all levels in pipeline order, run on R_s workers.
Minibatches are dealt to them in turn, and to keep all workers behind it busy, stage s and the
stages after it have Σ_{t ≥ s} R_t minibatches under way, one for each worker.  So a worker of
stage s holds

    y_s = ⌈Σ_{t ≥ s} R_t / R_s⌉      minibatches, at least one;
    y_s · (activations + parameters)  bytes,

where the sizes are those of a whole minibatch.  For s = 1 this is the paper's number of optimal
in-flight minibatches.  The paper's own program instead prices the first stages of a segment with
the workers that are left *in that level*, and gives a stage that holds everything no price at
all, so it returns data-parallel plans that fit nowhere.

The recursion therefore starts behind: with c the components used after a stage of m replicas
whose component holds w workers, and ρ the workers per component after the whole segment, the
inside of the stage sees ρ' = ⌈(c·w + ρ)/m⌉ later workers of its own (rounding up at every level
equals rounding up once).  A worker's stage fits when (1 + ρ')·bytes ≤ limit.  Fewer later workers
never need more memory, so the bisection of `threshold.py` still keeps one number per cut.

With several levels, a component may leave some of its w workers idle.  The plan is found with
all w counted (`sound`: every plan that it returns fits), the bound with one worker per component
(`optimistic`: it excludes no plan that fits); on one level both are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.published.pipedream.parts import Part, spare
from pdcompile.passes.published.pipedream.recursion import Level, improve
from pdcompile.passes.published.pipedream.search import Outcome, Report, operations
from pdcompile.passes.published.pipedream.states import Floats, Segments
from pdcompile.passes.published.pipedream.threshold import (
    Cut,
    Ints,
    smallest,
    stage_cost,
)

_NEVER = 2**40
TABLE_NANOSECONDS = 2e9  # of one core, for all tables of one level; roughly


class Component(Protocol):
    """What one component of a level does with a segment, given the workers after it."""

    def seconds(self, later: int) -> Floats:
        """[i, j] -> seconds, inf where memory forbids, with `later` workers behind it."""
        ...

    def parts(self, i: int, j: int, later: int, budget: float) -> tuple[Part, ...]:
        """The pipeline inside, within the budget (seconds)."""
        ...


class Worker:
    """A single worker: the stage either fits or does not."""

    def __init__(self, segments: Segments, limit: float) -> None:
        self._work = segments.seconds
        with np.errstate(divide="ignore"):
            # Division may round up to a whole number that the product exceeds.
            copies = np.floor(limit / segments.held)
            over = segments.held > 0
            over &= np.where(over, copies, 0) * segments.held > limit
        copies = np.where(over, copies - 1, copies)
        self.room = np.where(segments.held > 0, copies - 1, np.inf)  # later workers at most

    def seconds(self, later: int) -> Floats:
        return np.where(later <= self.room, self._work, np.inf)

    def parts(self, i: int, j: int, later: int, budget: float) -> tuple[Part, ...]:
        return ()


class Group:
    """A level's component: a pipeline over `level.count` components of the level below."""

    def __init__(
        self,
        level: Level,
        below: Component,
        segments: Segments,
        *,
        sound: bool,
        step: int,
    ) -> None:
        self.level = level
        self.below = below
        self.segments = segments
        self.sound = sound
        self.step = step  # later workers are rounded to its multiples
        self.weight = level.inside if sound else 1  # workers that a later component counts as
        self._nested = np.isfinite(segments.seconds)
        self._tables: dict[int, tuple[Floats, list[Floats]]] = {}

    def rounded(self, later: int) -> int:
        """Up when plans must fit, down when none that fits may be lost."""
        steps = -(-later // self.step) if self.sound else later // self.step
        return steps * self.step

    def seconds(self, later: int) -> Floats:
        return self._table(self.rounded(later))[0]

    def _inside(self, components: int, replicas: int, later: int) -> int:
        return -(-(components * self.weight + later) // replicas)

    def _first(self, replicas: int, components: int, later: int) -> Floats:
        alone = self.below.seconds(self._inside(components, replicas, later))
        return self.level.first(alone, self.segments.parameters, replicas)

    def _added(self, replicas: int, components: int, later: int) -> Floats:
        alone = self.below.seconds(self._inside(components, replicas, later))
        edge = self.level.boundary(self.segments.cut, replicas)
        stage = self.level.added(alone, self.segments.parameters, replicas)
        return np.maximum(np.maximum(stage, edge[:, None]), edge[None, :])

    def _table(self, later: int) -> tuple[Floats, list[Floats]]:
        """Seconds of the whole component, and of ends of pipelines on exactly c components."""
        known = self._tables.get(later)
        if known is not None:
            return known
        count = self.level.count
        single = 1 if self.level.straight else count
        infinite = np.full_like(self.segments.seconds, np.inf)
        best = infinite.copy()
        ends: list[Floats] = [infinite]
        for c in range(1, count + 1):
            end = self._added(c, 0, later) if c <= single else infinite.copy()
            if c <= single:
                np.minimum(best, self._first(c, 0, later), out=best)
            for m in range(1, min(single, c - 1) + 1):
                improve(best, self._first(m, c - m, later), ends[c - m], self._nested)
                if c < count:  # an end leaves a component to what comes before it
                    improve(end, self._added(m, c - m, later), ends[c - m], self._nested)
            ends.append(end)
        self._tables[later] = best, ends
        return best, ends

    def parts(self, i: int, j: int, later: int, budget: float) -> tuple[Part, ...]:
        later = self.rounded(later)
        best, ends = self._table(later)
        budget = max(budget, float(best[i, j]))
        count = self.level.count
        single = 1 if self.level.straight else count
        for c in range(1, count + 1):
            for m in range(1, min(single, c) + 1):
                stage = self._first(m, c - m, later)[i]
                found = self._step(i, j, m, c - m, later, budget, stage, ends, first=True)
                if found is not None:
                    return found
        raise AssertionError(f"no way through the table from {i} to {j}")  # pragma: no cover

    def _end(
        self, i: int, j: int, c: int, later: int, budget: float, ends: list[Floats]
    ) -> tuple[Part, ...]:
        single = 1 if self.level.straight else c
        for m in range(1, min(single, c) + 1):
            stage = self._added(m, c - m, later)[i]
            found = self._step(i, j, m, c - m, later, budget, stage, ends, first=False)
            if found is not None:
                return found
        raise AssertionError(f"no way through the table from {i} to {j}")  # pragma: no cover

    def _step(
        self,
        i: int,
        j: int,
        m: int,
        after: int,
        later: int,
        budget: float,
        stage: Floats,
        ends: list[Floats],
        *,
        first: bool,
    ) -> tuple[Part, ...] | None:
        """A stage from i on m components with `after` more behind it, if that meets the budget."""
        if after:
            worst = np.maximum(stage, ends[after][:, j])
            k = int(worst.argmin())
            reached = float(worst[k])
        else:
            k, reached = j, float(stage[j])
        if reached > budget:
            return None
        price = self.level.first if first else self.level.added
        parameters = self.segments.parameters[i, k]
        reduced = float(price(parameters * 0, parameters, m)) * m
        inside = self._inside(after, m, later)
        alone = float(self.below.seconds(inside)[i, k])
        inner = self.below.parts(i, k, inside, spare(alone, reduced, m, budget * (1 - 1e-13)))
        here = (Part(i, k, m, inner),)
        return here if k == j else here + self._end(k, j, after, later, budget, ends)


class LimitedOutermost:
    """Decisions about the outermost level when memory counts."""

    def __init__(self, level: Level, below: Component, segments: Segments, *, sound: bool) -> None:
        self.level = level
        self.below = below
        self.segments = segments
        self.weight = level.inside if sound else 1
        reduced = 4 * segments.parameters / level.bandwidth
        reduced[0] /= level.inside
        self._reduced = reduced
        edge = level.boundary(segments.cut, 1)
        self._edge = np.maximum(edge[:, None], edge[None, :])
        self._edge[0] = 0
        self._single = 1 if level.straight else level.count
        self._replicas = np.arange(1, self._single + 1)
        self._stack: Floats | None = None
        self._place = np.zeros((level.count + 1, self._single), np.int64)

    def _load(self) -> Floats:
        """Every table that a decision may look at, one after the other."""
        if self._stack is None:
            tables: list[Floats] = []
            known: dict[int, int] = {}
            for c in range(self.level.count + 1):
                for m in range(1, self._single + 1):
                    matrix = self.below.seconds(-(-c * self.weight // m))
                    at = known.setdefault(id(matrix), len(tables))
                    if at == len(tables):
                        tables.append(matrix)  # kept alive, so that its id stays its own
                    self._place[c, m - 1] = at
            self._stack = np.stack(tables)
        return self._stack

    def later(self, stages: Sequence[Cut]) -> list[int]:
        """Workers behind each stage, for one of its components."""
        behind = [sum(s.replicas for s in stages[k + 1 :]) for k in range(len(stages))]
        return [
            -(-after * self.weight // stage.replicas)
            for after, stage in zip(behind, stages, strict=True)
        ]

    def alone(self, stages: Sequence[Cut]) -> list[float]:
        """Seconds of one component of each stage."""
        return [
            float(self.below.seconds(later)[stage.i, stage.j])
            for later, stage in zip(self.later(stages), stages, strict=True)
        ]

    def price(self, stages: Sequence[Cut]) -> float:
        """Seconds of the slowest stage, boundaries included."""
        return max(
            stage_cost(self.level, seconds, self.segments, stage)
            for seconds, stage in zip(self.alone(stages), stages, strict=True)
        )

    def parts(self, stages: Sequence[Cut], target: float) -> tuple[Part, ...]:
        """The stages with their insides, within the target (seconds)."""
        found = []
        for stage, later, seconds in zip(
            stages, self.later(stages), self.alone(stages), strict=True
        ):
            m = stage.replicas
            reduced = float(self._reduced[stage.i, stage.j]) * (m - 1) / m
            budget = spare(seconds, reduced, m, target * (1 - 1e-13))
            inner = self.below.parts(stage.i, stage.j, later, budget)
            found.append(Part(stage.i, stage.j, m, inner))
        return tuple(found)

    def decide(self, target: float) -> tuple[Cut, ...] | None:
        """Stages that stay within the target on the fewest components, or None."""
        last = len(self.segments.cut) - 1
        fewest = np.full(last + 1, _NEVER, np.int64)
        fewest[last] = 0
        chosen: list[Cut | None] = [None] * (last + 1)
        m = self._replicas[:, None]
        for i in range(last - 1, -1, -1):
            ends = (
                i
                + 1
                + np.flatnonzero(
                    np.isfinite(self.segments.seconds[i, i + 1 :])
                    & (fewest[i + 1 :] < self.level.count)
                )
            )
            if not len(ends):
                continue
            after = fewest[ends]
            stage = (self._alone(i, ends, after) + self._reduced[i, ends] * ((m - 1) / m)) / m
            fits = (stage <= target) & (self._edge[i, ends] / m <= target)
            total = np.where(fits, after + m, _NEVER)
            best = int(total.argmin())
            row, column = divmod(best, len(ends))
            if total[row, column] <= self.level.count:
                fewest[i] = total[row, column]
                chosen[i] = Cut(i, int(ends[column]), row + 1)
        if chosen[0] is None:
            return None
        stages = []
        i = 0
        while i < last:
            stage_here = chosen[i]
            assert stage_here is not None
            stages.append(stage_here)
            i = stage_here.j
        return tuple(stages)

    def _alone(self, i: int, ends: Ints, after: Ints) -> Floats:
        """[replicas, end] -> seconds of one component."""
        if isinstance(self.below, Worker):
            later = -(-after // self._replicas[:, None])
            room = later <= self.below.room[i, ends]
            return np.where(room, self.segments.seconds[i, ends], np.inf)
        stack = self._load()
        alone: Floats = stack[self._place[after].T, i, ends]
        return alone


def limited_search(
    levels: Sequence[Level],
    segments: Segments,
    limit: float,
    budget: Budget,
    *,
    sound: bool,
    low: float = 0.0,
    report: Report | None = None,
) -> Outcome:
    """The best plan under `limit` bytes of a worker whose cuts are all among the states.

    `sound`: its parts fit, but better ones may too.  Otherwise: its bound holds, but its parts
    may not fit.  No parts and an infinite bound: there is no such plan.
    """
    below: Component = Worker(segments, limit)
    for level in levels[:-1]:
        step = _step(levels, len(segments.cut))
        below = Group(level, below, segments, sound=sound, step=step)
    outermost = LimitedOutermost(levels[-1], below, segments, sound=sound)
    found = smallest(
        outermost.decide,
        outermost.price,
        budget,
        low=low,
        high=ceiling(levels, segments),
        report=report,
    )
    if found.stages is None:
        return Outcome(None, found.seconds, found.bound)
    return Outcome(outermost.parts(found.stages, found.seconds), found.seconds, found.bound)


def limited_operations(states: int, counts: Sequence[int], straight: bool) -> float:
    """Elementary steps of `limited_search`, roughly: nanoseconds on one core."""
    tables = min(operations(states, counts, straight) * counts[-1], TABLE_NANOSECONDS)
    return tables * (len(counts) > 1) + 45 * states**2 * (1 if straight else counts[-1])


def _step(levels: Sequence[Level], states: int) -> int:
    """Later workers are rounded so coarsely that the tables stay affordable."""
    most = (levels[-1].count - 1) * levels[-1].inside
    pairs = max(level.count**2 for level in levels[:-1])
    tables = max(2, int(TABLE_NANOSECONDS / (pairs * states**3 / 6 + 1)))
    return max(1, -(-most // tables))


def ceiling(levels: Sequence[Level], segments: Segments) -> float:
    """Seconds that no stage of any plan exceeds."""
    slow = sum(
        4 * float(segments.parameters[0, -1]) / level.bandwidth
        + 2 * float(segments.cut.max()) / level.bandwidth / level.compression
        for level in levels
    )
    return (float(segments.seconds[0, -1]) + slow) * 2
