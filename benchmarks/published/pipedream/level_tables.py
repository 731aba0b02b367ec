"""Times and bytes of every segment on a component of one level: tables for PipeDream's recursion.

A component of the innermost level is a worker; one of a level above runs a segment as a pipeline
over components of the level below (see `nested_stages`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.pipedream.profile_cuts import CutSegments, Floats
from benchmarks.published.pipedream_model import HierarchyProblem

ROUNDED = 1 - 1e-13  # rounding must not push a stage over its target


@dataclass(frozen=True, slots=True)
class PricedLevel:
    """One level of the cluster as the recursion sees it."""

    count: int  # components
    bandwidth: float  # bytes per second
    inside: int  # workers inside a component
    straight: bool
    compression: float  # of boundary terms; inf: they are ignored

    @property
    def most(self) -> int:
        """Replicas that a stage may have."""
        return 1 if self.straight else self.count

    def reduced(self, parameters: Floats, m: int) -> Floats:
        """Seconds of the exchange of gradients among m components, for all of them together."""
        result: Floats = 4 * (m - 1) * parameters / (self.bandwidth * m)
        return result

    def boundary(self, cut: Floats, m: int) -> Floats:
        """Seconds to move a cut's bytes there and back, on m components."""
        return 2 * cut / (self.bandwidth * m) / self.compression


def levels_of(problem: HierarchyProblem) -> list[PricedLevel]:
    """The cluster's levels, innermost first."""
    ratio = problem.activation_compression
    compression = math.inf if ratio is None else ratio
    found, inside = [], 1
    for count, bandwidth in problem.levels:
        found.append(PricedLevel(count, bandwidth, inside, problem.straight, compression))
        inside *= count
    return found


@dataclass(frozen=True, slots=True)
class NestedStage:
    """States i → j on `replicas` components, and the pipeline inside each (none in a worker)."""

    i: int
    j: int
    replicas: int
    inner: tuple[NestedStage, ...] = ()


class Component(Protocol):
    """Times and bytes of a segment on one component of a level, given the workers after it."""

    def seconds(self, later: int) -> Floats:
        """[i, j] -> seconds, inf where memory forbids, with `later` workers behind it."""
        ...

    def parts(self, i: int, j: int, later: int, budget: float) -> tuple[NestedStage, ...]:
        """The pipeline inside, within the budget (seconds), on the fewest components."""
        ...


class SingleWorker:
    """A single worker: the stage either fits or does not."""

    def __init__(self, segments: CutSegments, limit: float | None) -> None:
        self._work = segments.seconds
        self.room: Floats | None = None  # later workers at most
        if limit is not None:
            with np.errstate(divide="ignore"):
                # Division may round up to a whole number that the product exceeds.
                copies = np.floor(limit / segments.held)
                over = segments.held > 0
                over &= np.where(over, copies, 0) * segments.held > limit
            copies = np.where(over, copies - 1, copies)
            self.room = np.where(segments.held > 0, copies - 1, np.inf)

    def seconds(self, later: int) -> Floats:
        return self._work if self.room is None else np.where(later <= self.room, self._work, np.inf)

    def parts(self, i: int, j: int, later: int, budget: float) -> tuple[NestedStage, ...]:
        return ()


class LevelGroup:
    """A level's component: a pipeline over `level.count` components of the level below.

    Later workers are rounded to multiples of `step`; 0: there is no limit, and they do not count.
    """

    def __init__(
        self,
        level: PricedLevel,
        below: Component,
        segments: CutSegments,
        *,
        sound: bool,
        step: int,
        fewer: bool = False,
    ) -> None:
        self.level, self.below, self.segments = level, below, segments
        self.sound, self.step = sound, step
        self.free = not step
        self.weight = level.inside if sound else 1  # workers that a later component counts as
        self.keep = fewer and self.free
        self.on: list[Floats] = []  # [components − 1]: seconds on up to so many, when kept
        self._nested = np.isfinite(segments.seconds)
        self._tables: dict[int, tuple[Floats, list[Floats]]] = {}

    def rounded(self, later: int) -> int:
        """Up when plans must fit, down when none that fits may be lost."""
        if self.free:
            return 0
        steps = -(-later // self.step) if self.sound else later // self.step
        return steps * self.step

    def seconds(self, later: int) -> Floats:
        return self._table(self.rounded(later))[0]

    def _inside(self, components: int, replicas: int, later: int) -> int:
        return 0 if self.free else -(-(components * self.weight + later) // replicas)

    def _first(self, replicas: int, components: int, later: int) -> Floats:
        """[i, j] -> seconds of the first stage of a pipeline, with `components` behind it."""
        alone = self.below.seconds(self._inside(components, replicas, later))
        # A component's workers share the first stage's exchange.
        reduced = self.level.reduced(self.segments.parameters, replicas) / self.level.inside
        result: Floats = (alone + reduced) / replicas
        return result

    def _added(self, replicas: int, components: int, later: int) -> Floats:
        """[i, j] -> seconds of any later stage, its boundaries included."""
        alone = self.below.seconds(self._inside(components, replicas, later))
        edge = self.level.boundary(self.segments.cut, replicas)
        stage = (alone + self.level.reduced(self.segments.parameters, replicas)) / replicas
        return np.maximum(np.maximum(stage, edge[:, None]), edge[None, :])

    def _table(self, later: int) -> tuple[Floats, list[Floats]]:
        """Seconds of the whole component, and of ends of pipelines on exactly c components.

        Without a limit, ends are those on up to c components.
        """
        known = self._tables.get(later)
        if known is not None:
            return known
        count, most = self.level.count, self.level.most
        infinite = np.full_like(self.segments.seconds, np.inf)
        best = infinite.copy()
        ends: list[Floats] = [infinite]
        stages = [self._added(m, 0, 0) for m in range(1, most + 1)] if self.free else []
        for c in range(1, count + 1):
            end = ends[-1].copy() if self.free else infinite.copy()
            if c <= most:
                np.minimum(best, self._first(c, 0, later), out=best)
                np.minimum(end, stages[c - 1] if stages else self._added(c, 0, later), out=end)
            for m in range(1, min(most, c - 1) + 1):
                if c == count or self.keep or not self.free:
                    improve(best, self._first(m, c - m, later), ends[c - m], self._nested)
                if c < count:  # an end leaves a component to what comes before it
                    added = stages[m - 1] if stages else self._added(m, c - m, later)
                    improve(end, added, ends[c - m], self._nested)
            ends.append(end)
            if self.keep:
                self.on.append(best.copy())
        self._tables[later] = best, ends
        return best, ends

    def parts(self, i: int, j: int, later: int, budget: float) -> tuple[NestedStage, ...]:
        later = self.rounded(later)
        best, ends = self._table(later)
        budget = max(budget, float(best[i, j]))
        for c in range(1, self.level.count + 1):
            found = self._from(i, j, c, later, budget, ends, first=True)
            if found is not None:
                return found
        raise AssertionError(f"no way through the table from {i} to {j}")  # pragma: no cover

    def _from(
        self,
        i: int,
        j: int,
        c: int,
        later: int,
        budget: float,
        ends: list[Floats],
        *,
        first: bool,
    ) -> tuple[NestedStage, ...] | None:
        """Stages of i → j on c components within the budget; None: there are none."""
        while self.free and not first and c > 1 and ends[c - 1][i, j] <= budget:
            c -= 1
        for m in range(min(self.level.most, c), 0, -1):  # fewer stages where it is the same
            after = c - m
            stage = (self._first if first else self._added)(m, after, later)[i]
            worst = np.maximum(stage, ends[after][:, j]) if after else stage
            k = int(worst.argmin()) if after else j
            if worst[k] > budget:
                continue
            reduced = float(self.level.reduced(self.segments.parameters[i, k], m))
            inside = self._inside(after, m, later)
            alone = float(self.below.seconds(inside)[i, k])
            reduced /= self.level.inside if first else 1
            inner = self.below.parts(i, k, inside, max(alone, budget * ROUNDED * m - reduced))
            here = (NestedStage(i, k, m, inner),)
            if k == j:
                return here
            rest = self._from(k, j, after, later, budget, ends, first=False)
            assert rest is not None
            return here + rest
        return None


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
