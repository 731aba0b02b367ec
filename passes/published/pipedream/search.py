"""Search over a given family of states, without a memory limit: tables, bisection, stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.published.pipedream.parts import Part, build
from pdcompile.passes.published.pipedream.recursion import Level, Table, table
from pdcompile.passes.published.pipedream.states import Segments
from pdcompile.passes.published.pipedream.threshold import Cut, Outermost, smallest

Report = Callable[[float, float], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Nested stages between states (None: there are none), seconds, and what is proved."""

    parts: tuple[Part, ...] | None
    seconds: float
    bound: float


def operations(states: int, counts: Sequence[int], straight: bool = False) -> float:
    """Elementary steps of `search`, roughly: nanoseconds on one core."""
    inner = sum(n * (n - 1) / 2 if not straight else n for n in counts[:-1])
    return inner * states**3 / 12 + 500 * states**2 + 3e5 * states


def search(
    levels: Sequence[Level],
    segments: Segments,
    budget: Budget,
    *,
    low: float = 0.0,
    fewer: bool = False,
    report: Report | None = None,
) -> Outcome:
    """The best plan whose cuts are all among the states."""
    tables = []
    seconds = segments.seconds
    for level in levels[:-1]:
        tables.append(table(level, seconds, segments))
        seconds = tables[-1].best[-1]
    outermost = Outermost(levels[-1], seconds, segments)
    found = smallest(
        outermost.decide,
        outermost.price,
        budget,
        low=low,
        high=float(seconds[0, -1]),
        report=report,
    )
    if found.stages is None:  # pragma: no cover - one stage on one worker is always a plan
        return Outcome(None, found.seconds, found.bound)
    stages = found.stages
    if fewer and tables:
        stages = _fewest(outermost, tables[-1], found.seconds)
    budgets = [_budget(outermost, stage, found.seconds) for stage in stages]
    return Outcome(tuple(build(stages, tables, budgets)), found.seconds, found.bound)


def _budget(outermost: Outermost, stage: Cut, target: float) -> float:
    """Seconds that a component of the stage may take within the target."""
    m = stage.replicas
    alone = float(outermost.seconds[stage.i, stage.j])
    reduced = 4 * (m - 1) * float(outermost.segments.parameters[stage.i, stage.j])
    reduced /= outermost.level.bandwidth * m
    if stage.i == 0:
        reduced /= outermost.level.inside
    # Rounding must not push the stage over the target.
    return max(alone, (target * m - reduced) * (1 - 1e-13))


def _fewest(outermost: Outermost, inner: Table, target: float) -> tuple[Cut, ...]:
    """Stages within the target that take the fewest components of the level below."""
    level, segments = outermost.level, outermost.segments
    size = len(segments.cut)
    never = np.iinfo(np.int64).max // 4
    target *= 1 + 1e-13
    price = []
    for m in range(1, (1 if level.straight else level.count) + 1):
        reduced = 4 * (m - 1) * segments.parameters / (level.bandwidth * m)
        reduced[0] /= level.inside
        edge = level.boundary(segments.cut, m)
        allowed = np.maximum(edge[:, None], edge[None, :]) <= target
        allowed[0] = True
        taken = np.full((size, size), never, np.int64)
        for count in range(len(inner.best) - 1, 0, -1):
            taken[allowed & (inner.best[count] <= target * m - reduced)] = count * m
        price.append(taken)
    least = np.full((level.count + 1, size), never, np.int64)
    least[:, -1] = 0
    chosen: dict[tuple[int, int], Cut] = {}
    for i in range(size - 2, -1, -1):
        for count in range(1, level.count + 1):
            for m in range(1, min(count, len(price)) + 1):
                total = price[m - 1][i, i + 1 :] + least[count - m, i + 1 :]
                j = int(total.argmin())
                if total[j] < least[count, i]:
                    least[count, i] = total[j]
                    chosen[count, i] = Cut(i, i + 1 + j, m)
    stages = []
    i, count = 0, level.count
    while i < size - 1:
        stages.append(chosen[count, i])
        i, count = stages[-1].j, count - stages[-1].replicas
    return tuple(stages)
