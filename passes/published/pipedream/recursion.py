"""PipeDream's recursion inside a component, for all pairs of cuts at once.

The best time of segment i → j on up to m workers is that of one replicated stage, or of a
shorter pipeline i → k with one more stage k → j behind it ('PipeDream', SOSP 2019, section 3.1).
Only the levels below the outermost need it; `threshold.py` searches that one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.published.pipedream.states import Floats, Segments
from pdcompile.passes.published.pipedream_file import HierarchyProblem


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the cluster as the recursion sees it."""

    count: int  # components
    bandwidth: float  # bytes per second
    inside: int  # workers inside a component
    straight: bool
    compression: float  # of boundary terms; inf: they are ignored

    def first(self, seconds: Floats, parameters: Floats, m: int) -> Floats:
        """Seconds of the first stage of a pipeline on m components."""
        reduced: Floats = 4 * (m - 1) * parameters / (self.bandwidth * m) / self.inside
        return (seconds + reduced) / m

    def added(self, seconds: Floats, parameters: Floats, m: int) -> Floats:
        """Seconds of any later stage, without its boundaries."""
        reduced: Floats = 4 * (m - 1) * parameters / (self.bandwidth * m)
        return (seconds + reduced) / m

    def boundary(self, cut: Floats, m: int) -> Floats:
        """Seconds to move a cut's bytes there and back, on m components."""
        return 2 * cut / (self.bandwidth * m) / self.compression


def levels_of(problem: HierarchyProblem) -> list[Level]:
    """The cluster's levels, innermost first."""
    ratio = problem.activation_compression
    found = []
    inside = 1
    for count, bandwidth in problem.levels:
        found.append(
            Level(
                count=count,
                bandwidth=bandwidth,
                inside=inside,
                straight=problem.straight,
                compression=math.inf if ratio is None else ratio,
            )
        )
        inside *= count
    return found


@dataclass(frozen=True, slots=True)
class Table:
    """Answers of one level: `best[m]` is [i, j] -> seconds on up to m components (m ≥ 1)."""

    level: Level
    seconds: Floats  # [i, j], of one component
    segments: Segments
    best: tuple[Floats, ...]

    def first(self, m: int) -> Floats:
        return self.level.first(self.seconds, self.segments.parameters, m)

    def added(self, m: int) -> Floats:
        return added(self.level, self.seconds, self.segments, m)


def added(level: Level, seconds: Floats, segments: Segments, m: int) -> Floats:
    """[i, j] -> seconds of a stage that is not the first, its boundaries included."""
    edge = level.boundary(segments.cut, m)
    stage = level.added(seconds, segments.parameters, m)
    return np.maximum(np.maximum(stage, edge[:, None]), edge[None, :])


def table(level: Level, seconds: Floats, segments: Segments) -> Table:
    """Fill one level's table from the seconds of its components."""
    single = level.count if not level.straight else 1
    stages = [added(level, seconds, segments, m) for m in range(1, single + 1)]
    nested = np.isfinite(segments.seconds)
    best: list[Floats] = [np.full_like(seconds, np.inf)]
    for m in range(1, level.count + 1):
        here = best[-1].copy()
        if m <= single:
            np.minimum(here, level.first(seconds, segments.parameters, m), out=here)
        for last in range(1, min(single, m - 1) + 1):
            improve(here, best[m - last], stages[last - 1], nested)
        best.append(here)
    return Table(level, seconds, segments, tuple(best))


def improve(result: Floats, prefix: Floats, suffix: Floats, nested: NDArray[np.bool_]) -> None:
    """result[i, j] = min(itself, min over i < k < j of max(prefix[i, k], suffix[k, j])).

    `nested[i, j]`: state i is a proper subset of state j.

    A cut k can only help the rows and columns where its part is below the worst value that is
    still there to be improved; states are ordered by work, so these are almost ranges.
    """
    reachable = np.where(nested, result, -np.inf)
    useful_rows = prefix < reachable.max(axis=1)[:, None]
    useful_columns = suffix < reachable.max(axis=0)[None, :]
    size = len(result)
    low = useful_rows.argmax(axis=0)
    high = size - useful_columns[:, ::-1].argmax(axis=1)
    some = useful_rows.any(axis=0) & useful_columns.any(axis=1)
    for k in np.flatnonzero(some):
        rows, columns = slice(low[k], k), slice(k + 1, high[k])
        block = result[rows, columns]
        np.minimum(block, np.maximum(prefix[rows, k, None], suffix[None, k, columns]), out=block)
