"""The best nested stages whose cuts are all among given states, with and without a memory limit.

PipeDream's recursion ('PipeDream', SOSP 2019, section 3.1): a component of one level runs a segment
as a pipeline over components of the level below.  Here pipelines grow from behind, because memory
depends on what comes after a stage.  PipeDream runs 1F1B and stashes weights: every minibatch in
flight at a worker keeps its activations and the version of the weights that it started with
(sections 3.2 and 3.3).  Let stage s, counted over all levels in pipeline order, run on R_s
workers.  Minibatches are dealt to them in turn, and to keep all workers behind it busy, stage s and
the stages after it have Σ_{t ≥ s} R_t minibatches in flight, one for each worker.  So a worker of
stage s holds

    y_s = ⌈Σ_{t ≥ s} R_t / R_s⌉      minibatches, at least one;
    y_s · (activations + parameters)  bytes,

where the sizes are those of a whole minibatch.  For s = 1 this is the paper's number of optimal
in-flight minibatches.  The paper's own program instead prices the first stages of a segment with
the workers that are left *in that level*, and gives a stage that holds everything no price at
all, so it returns data-parallel plans that fit nowhere.

With c the components used after a stage of m replicas whose component holds w workers, and ρ the
workers per component after the whole segment, the inside of the stage sees ρ' = ⌈(c·w + ρ)/m⌉ later
workers of its own (rounding up at every level equals rounding up once).  A worker's stage fits when
(1 + ρ')·bytes ≤ limit.  Fewer later workers never need more memory, so that on the outermost level
the fewest components that the part behind a cut needs within a target are all that counts, and
bisection finds the least target.

With several levels, a component may leave some of its w workers idle.  The plan is found with
all w counted (`sound`: every plan that it returns fits), the bound with one worker per component
(not `sound`: it excludes no plan that fits); on one level both are exact.  Without a limit, later
workers play no part, and both are exact on any number of levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.chain_program import smallest_threshold
from benchmarks.published.pipedream.level_tables import (
    ROUNDED,
    Component,
    LevelGroup,
    NestedStage,
    PricedLevel,
    SingleWorker,
)
from benchmarks.published.pipedream.profile_cuts import CutSegments, Floats
from benchmarks.published.pipedream_model import HierarchyProblem
from pdcompile.passes.partition.budget import Budget
from pdcompile.units import format_bytes, three_digits

TOLERANCE = 1e-10  # relative: a plan within this of what is refuted counts as optimal
EXACT = 1e-9  # relative: the smallest memory is named up to this
TABLE_NANOSECONDS = 2e9  # of one core, for all tables of one level; roughly
_NEVER = 2**40  # components: more than any cluster has
Ints = NDArray[np.int64]
Report = Callable[[float, float], None]


@dataclass(frozen=True, slots=True)
class NestedPlan:
    """Nested stages between states (None: there are none), seconds, and what is proved."""

    parts: tuple[NestedStage, ...] | None
    seconds: float
    bound: float


def search(
    levels: Sequence[PricedLevel],
    segments: CutSegments,
    budget: Budget,
    *,
    limit: float | None = None,
    sound: bool = True,
    low: float = 0.0,
    fewer: bool = False,
    report: Report | None = None,
) -> NestedPlan:
    """The best plan whose cuts are all among the states, under `limit` bytes of a worker.

    Under a limit: with `sound` its parts fit, but better ones may too; otherwise its bound holds,
    but its parts may not fit.  No parts and an infinite bound: there is no such plan.  One target
    is tried even when the budget is used up.
    """
    limited = limit is not None
    below: Component = SingleWorker(segments, limit)
    inner: LevelGroup | None = None
    for level in levels[:-1]:
        step = _step(levels, len(segments.cut)) if limited else 0
        below = inner = LevelGroup(level, below, segments, sound=sound, step=step, fewer=fewer)
    outermost = Outermost(levels[-1], below, segments, limited=limited, sound=sound)
    # Without a limit, all on one component is a plan.
    high = ceiling(levels, segments) if limited else float(below.seconds(0)[0, -1])
    stages = outermost.decide(high)
    if stages is None:
        return NestedPlan(None, math.inf, math.inf)

    def attempt(target: float) -> tuple[float, tuple[NestedStage, ...]] | None:
        found = outermost.decide(target)
        return None if found is None else (outermost.price(found), found)

    seconds = outermost.price(stages)
    if report is not None:
        report(seconds, low)
    bound, _, better = smallest_threshold(
        attempt,
        low,
        seconds,
        exact=TOLERANCE,
        late=lambda: budget.late,
        found=lambda value, _: None if report is None else report(value, low),
    )
    stages = better or stages
    seconds = outermost.price(stages)
    if fewer and inner is not None and not limited:
        stages = _fewest(outermost, inner, seconds)
    return NestedPlan(outermost.filled(stages, seconds), seconds, bound)


def operations(
    states: int, counts: Sequence[int], straight: bool = False, limited: bool = False
) -> float:
    """Elementary steps of `search`, roughly: nanoseconds on one core."""
    inner = sum(n * (n - 1) / 2 if not straight else n for n in counts[:-1])
    free = inner * states**3 / 12 + 500 * states**2 + 3e5 * states
    if not limited:
        return free
    tables = min(free * counts[-1], TABLE_NANOSECONDS) * (len(counts) > 1)
    return tables + 45 * states**2 * (1 if straight else counts[-1])


def ceiling(levels: Sequence[PricedLevel], segments: CutSegments) -> float:
    """Seconds that no stage of any plan exceeds."""
    slow = sum(
        4 * float(segments.parameters[0, -1]) / level.bandwidth
        + 2 * float(segments.cut.max()) / level.bandwidth / level.compression
        for level in levels
    )
    return (float(segments.seconds[0, -1]) + slow) * 2


def _step(levels: Sequence[PricedLevel], states: int) -> int:
    """Later workers are rounded so coarsely that the tables stay affordable."""
    most = (levels[-1].count - 1) * levels[-1].inside
    pairs = max((level.count**2 for level in levels[:-1]), default=1)
    tables = max(2, int(TABLE_NANOSECONDS / (pairs * states**3 / 6 + 1)))
    return max(1, -(-most // tables))


class Outermost:
    """Decisions about the outermost level: which targets can be met.

    The fewest components that the part of the network behind cut i needs is min over j of (fewest
    for j) + (fewest replicas with which stage i → j stays within the target).
    """

    def __init__(
        self,
        level: PricedLevel,
        below: Component,
        segments: CutSegments,
        *,
        limited: bool,
        sound: bool = True,
    ) -> None:
        self.level, self.below, self.segments = level, below, segments
        self.limited = limited
        self.weight = level.inside if sound else 1
        self.reduced = 4 * segments.parameters / level.bandwidth  # of m replicas: · (m − 1) / m
        self.reduced[0] /= level.inside  # only the first stage starts at the empty state
        edge = level.boundary(segments.cut, 1)
        self.edge = np.maximum(edge[:, None], edge[None, :])
        self.edge[0] = 0
        self._replicas = np.arange(1, level.most + 1)
        self._stack: Floats | None = None
        self._place = np.zeros((level.count + 1, level.most), np.int64)

    def decide(self, target: float) -> tuple[NestedStage, ...] | None:
        """Stages that stay within the target (seconds) on the fewest components, or None."""
        last = len(self.segments.cut) - 1
        fewest = np.full(last + 1, _NEVER, np.int64)
        fewest[last] = 0
        chosen: list[NestedStage | None] = [None] * (last + 1)
        needed = None if self.limited else self._needed(target)
        for i in range(last - 1, -1, -1):
            if needed is not None:
                total = fewest[i + 1 :] + needed[i, i + 1 :]
                at = int(total.argmin())
                stage = NestedStage(i, i + 1 + at, int(needed[i, i + 1 + at]))
                if total[at] <= self.level.count:
                    fewest[i], chosen[i] = total[at], stage
            else:
                self._cheapest(i, target, fewest, chosen)
        stages = []
        i = 0
        while i < last:
            here = chosen[i]
            if here is None:
                return None
            stages.append(here)
            i = here.j
        return tuple(stages)

    def _needed(self, target: float) -> Ints:
        """[i, j] -> fewest components with which the stage stays within the target."""
        alone = self.below.seconds(0)
        one = (alone <= target) & (self.edge <= target)  # seconds are inf outside pairs
        if self.level.straight:
            return np.where(one, 1, _NEVER)

        def cost(m: Floats) -> Floats:
            return np.maximum((alone + self.reduced * (m - 1) / m) / m, self.edge / m)

        # On two components and more, seconds fall as components are added:
        # (C + q (m − 1) / m) / m ≤ T  ⇔  T m² − (C + q) m + q ≥ 0.
        with np.errstate(all="ignore"):
            total = alone + self.reduced
            inside = np.maximum(total**2 - 4 * target * self.reduced, 0)
            root = (total + np.sqrt(inside)) / (2 * target)
            wanted = np.maximum(np.maximum(root, self.edge / target), 2)
            wanted = np.minimum(np.nan_to_num(wanted, nan=_NEVER), _NEVER)
            m = np.ceil(wanted * (1 - 1e-12))
            m = np.where(cost(m) > target, m + 1, m)
            m = np.where((m > 2) & (cost(np.maximum(m - 1, 1)) <= target), m - 1, m)
            fits = cost(m) <= target
        return np.where(one, 1, np.where(fits, m, _NEVER)).astype(np.int64)

    def _cheapest(
        self, i: int, target: float, fewest: Ints, chosen: list[NestedStage | None]
    ) -> None:
        """Find the stage from i that leaves the fewest components used, where memory counts."""
        inside = np.isfinite(self.segments.seconds[i, i + 1 :])
        ends = i + 1 + np.flatnonzero(inside & (fewest[i + 1 :] < self.level.count))
        if not len(ends):
            return
        after, m = fewest[ends], self._replicas[:, None]
        stage = (self._alone(i, ends, after) + self.reduced[i, ends] * ((m - 1) / m)) / m
        fits = (stage <= target) & (self.edge[i, ends] / m <= target)
        total = np.where(fits, after + m, _NEVER)
        row, column = divmod(int(total.argmin()), len(ends))
        if total[row, column] <= self.level.count:
            fewest[i] = total[row, column]
            chosen[i] = NestedStage(i, int(ends[column]), row + 1)

    def _alone(self, i: int, ends: Ints, after: Ints) -> Floats:
        """[replicas, end] -> seconds of one component."""
        if isinstance(self.below, SingleWorker) and self.below.room is not None:
            later = -(-after // self._replicas[:, None])
            room = later <= self.below.room[i, ends]
            return np.where(room, self.segments.seconds[i, ends], np.inf)
        if self._stack is None:  # every table that a decision may look at, one after the other
            tables: list[Floats] = []
            known: dict[int, int] = {}
            for c in range(self.level.count + 1):
                for m in range(1, self.level.most + 1):
                    matrix = self.below.seconds(-(-c * self.weight // m))
                    at = known.setdefault(id(matrix), len(tables))
                    if at == len(tables):
                        tables.append(matrix)  # kept alive, so that its id stays its own
                    self._place[c, m - 1] = at
            self._stack = np.stack(tables)
        alone: Floats = self._stack[self._place[after].T, i, ends]
        return alone

    def later(self, stages: Sequence[NestedStage]) -> list[int]:
        """Workers behind each stage, for one of its components."""
        behind = [sum(s.replicas for s in stages[k + 1 :]) for k in range(len(stages))]
        return [
            -(-after * self.weight // stage.replicas)
            for after, stage in zip(behind, stages, strict=True)
        ]

    def price(self, stages: Sequence[NestedStage]) -> float:
        """Seconds of the slowest stage, boundaries included."""
        worst = 0.0
        for stage, later in zip(stages, self.later(stages), strict=True):
            i, j, m = stage.i, stage.j, stage.replicas
            alone = float(self.below.seconds(later)[i, j])
            reduced = float(self.reduced[i, j]) * (m - 1) / m
            worst = max(worst, (alone + reduced) / m, float(self.edge[i, j]) / m)
        return worst

    def filled(self, stages: Sequence[NestedStage], target: float) -> tuple[NestedStage, ...]:
        """The stages with their insides, within the target (seconds)."""
        found = []
        for stage, later in zip(stages, self.later(stages), strict=True):
            i, j, m = stage.i, stage.j, stage.replicas
            alone = float(self.below.seconds(later)[i, j])
            reduced = float(self.reduced[i, j]) * (m - 1) / m
            budget = max(alone, target * ROUNDED * m - reduced)
            found.append(NestedStage(i, j, m, self.below.parts(i, j, later, budget)))
        return tuple(found)


def _fewest(outermost: Outermost, inner: LevelGroup, target: float) -> tuple[NestedStage, ...]:
    """Stages within the target that take the fewest components of the level below."""
    level, size = outermost.level, len(outermost.segments.cut)
    target *= 2 - ROUNDED
    price = []
    for m in range(1, level.most + 1):
        reduced = outermost.reduced * (m - 1) / m
        taken = np.full((size, size), _NEVER, np.int64)
        for count in range(len(inner.on), 0, -1):
            fits = (outermost.edge / m <= target) & (inner.on[count - 1] <= target * m - reduced)
            taken[fits] = count * m
        price.append(taken)
    least = np.full((level.count + 1, size), _NEVER, np.int64)
    least[:, -1] = 0
    chosen: dict[tuple[int, int], NestedStage] = {}
    for i in range(size - 2, -1, -1):
        for count in range(1, level.count + 1):
            for m in range(1, min(count, len(price)) + 1):
                total = price[m - 1][i, i + 1 :] + least[count - m, i + 1 :]
                j = int(total.argmin())
                if total[j] < least[count, i]:
                    least[count, i] = total[j]
                    chosen[count, i] = NestedStage(i, i + 1 + j, m)
    stages = []
    i, count = 0, level.count
    while i < size - 1:
        stages.append(chosen[count, i])
        i, count = stages[-1].j, count - stages[-1].replicas
    return tuple(stages)


def unfit(
    problem: HierarchyProblem, levels: Sequence[PricedLevel], segments: CutSegments
) -> str | None:
    """Reason why no chain of these states fits, or None when one does, as far as this test sees.

    Only the workers behind a stage matter to memory, not how they are joined, so every plan
    over several levels is also one over a single level with all workers.
    """
    limit, workers = problem.memory_bytes, problem.workers
    assert limit is not None
    level = PricedLevel(workers, math.inf, 1, levels[0].straight, math.inf)
    target = ceiling(levels, segments)

    def attempt(bytes_each: float) -> tuple[float, tuple[NestedStage, ...]] | None:
        worker = SingleWorker(segments, bytes_each)
        stages = Outermost(level, worker, segments, limited=True).decide(target)
        return None if stages is None else (_held(stages, segments), stages)

    if attempt(limit) is not None:
        return None
    # One worker for everything is a plan.
    _, least, _ = smallest_threshold(attempt, limit, float(segments.held[0, -1]), exact=EXACT)
    help_text = f"at least {three_digits(math.ceil(least))[1]} would be needed"
    heaviest = max(problem.graph.nodes, key=lambda n: n.activation_bytes + n.parameter_bytes)
    single = heaviest.activation_bytes + heaviest.parameter_bytes
    if single > limit:
        return (
            f"{heaviest.id} ({heaviest.description.split('(')[0]}) keeps {format_bytes(single)} "
            f"of activations and parameters for one minibatch, a worker has {format_bytes(limit)}; "
            + help_text
        )
    total = math.fsum(n.activation_bytes + n.parameter_bytes for n in problem.graph.nodes)
    return (
        f"{format_bytes(total)} of activations and parameters cannot be divided over {workers} "
        f"workers of {format_bytes(limit)}, where a stage also keeps those of the minibatches "
        "in flight behind it; " + help_text
    )


def _held(stages: Sequence[NestedStage], segments: CutSegments) -> float:
    """Bytes of the worker that holds most."""
    behind = [sum(s.replicas for s in stages[k:]) for k in range(len(stages))]
    return max(
        -(-after // stage.replicas) * float(segments.held[stage.i, stage.j])
        for after, stage in zip(behind, stages, strict=True)
    )
