"""The outermost level: which objectives can be reached, by bisection.

Given a target T, the fewest components that the part of the network behind cut i needs is
min over j of (fewest for j) + (fewest replicas with which stage i → j stays within T).  Fewer
is never worse, in time or in memory, so this one number per cut decides.  One decision costs
the number of nested pairs, without the factor of workers² of the recursion for all counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.published.pipedream.recursion import Level
from pdcompile.passes.published.pipedream.states import Floats, Segments

TOLERANCE = 1e-10  # relative: a plan within this of what is refuted counts as optimal
CLOSE = 1e-4  # relative: from here on the incumbent is thought optimal, and tested
_NEVER = 2**40  # components: more than any cluster has
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cut:
    """One stage of the outermost level: states i → j on `replicas` components."""

    i: int
    j: int
    replicas: int


Decide = Callable[[float], "tuple[Cut, ...] | None"]
"""Stages in order that stay within a target (seconds), or None when there are none."""


class Outermost:
    """Decisions about the outermost level; `seconds` [i, j] of one component."""

    def __init__(self, level: Level, seconds: Floats, segments: Segments) -> None:
        self.level = level
        self.seconds = seconds
        self.segments = segments
        reduced = 4 * segments.parameters / level.bandwidth
        reduced[0] /= level.inside  # only the first stage starts at the empty state
        self._reduced = reduced
        self._total = seconds + reduced
        edge = level.boundary(segments.cut, 1)
        self._edge = np.maximum(edge[:, None], edge[None, :])
        self._edge[0] = 0

    def needed(self, target: float) -> Ints:
        """[i, j] -> fewest components with which the stage stays within the target."""
        one = (self.seconds <= target) & (self._edge <= target)  # seconds are inf outside pairs
        if self.level.straight:
            return np.where(one, 1, _NEVER)
        # On two components and more, seconds fall as components are added:
        # (C + q (m − 1) / m) / m ≤ T  ⇔  T m² − (C + q) m + q ≥ 0.
        with np.errstate(all="ignore"):
            inside = np.maximum(self._total**2 - 4 * target * self._reduced, 0)
            root = (self._total + np.sqrt(inside)) / (2 * target)
            wanted = np.maximum(np.maximum(root, self._edge / target), 2)
            wanted = np.minimum(np.nan_to_num(wanted, nan=_NEVER), _NEVER)
            m = np.ceil(wanted * (1 - 1e-12))
            m = np.where(self._cost(m) > target, m + 1, m)
            m = np.where((m > 2) & (self._cost(np.maximum(m - 1, 1)) <= target), m - 1, m)
            fits = self._cost(m) <= target
        return np.where(one, 1, np.where(fits, m, _NEVER)).astype(np.int64)

    def _cost(self, m: Floats) -> Floats:
        stage = (self.seconds + self._reduced * (m - 1) / m) / m
        return np.maximum(stage, self._edge / m)

    def price(self, stages: Sequence[Cut]) -> float:
        """Seconds of the slowest stage, boundaries included."""
        return max(
            stage_cost(self.level, float(self.seconds[stage.i, stage.j]), self.segments, stage)
            for stage in stages
        )

    def decide(self, target: float) -> tuple[Cut, ...] | None:
        """Stages that stay within the target on the fewest components, or None."""
        needed = self.needed(target)
        last = len(needed) - 1
        fewest = np.full(last + 1, _NEVER, np.int64)
        fewest[last] = 0
        for i in range(last - 1, -1, -1):
            fewest[i] = (fewest[i + 1 :] + needed[i, i + 1 :]).min()
        if fewest[0] > self.level.count:
            return None
        stages = []
        i = 0
        while i < last:
            j = i + 1 + int((fewest[i + 1 :] + needed[i, i + 1 :]).argmin())
            stages.append(Cut(i, j, int(needed[i, j])))
            i = j
        return tuple(stages)


def stage_cost(level: Level, seconds: float, segments: Segments, stage: Cut) -> float:
    """Seconds of one outermost stage whose component takes `seconds`, with its boundaries."""
    i, j, m = stage.i, stage.j, stage.replicas
    reduced = 4 * (m - 1) * float(segments.parameters[i, j]) / (level.bandwidth * m)
    if i == 0:
        return (seconds + reduced / level.inside) / m
    edge = max(float(segments.cut[i]), float(segments.cut[j]))
    boundary = 2 * edge / (level.bandwidth * m) / level.compression
    return max((seconds + reduced) / m, boundary)


@dataclass(frozen=True, slots=True)
class Found:
    """Stages of the smallest objective, their seconds, and what is proved impossible."""

    stages: tuple[Cut, ...] | None
    seconds: float  # inf without stages
    bound: float  # no plan of these states is below

    @property
    def proved(self) -> bool:
        return self.seconds - self.bound <= 2 * TOLERANCE * self.seconds


def smallest(
    decide: Decide,
    price: Callable[[Sequence[Cut]], float],
    budget: Budget,
    *,
    low: float,
    high: float,
    report: Callable[[float, float], None] | None = None,
) -> Found:
    """Bisect between `low`, which no plan is below, and `high`, which no plan is above.

    Every plan that a decision returns is priced exactly, which lowers the upper end beyond the
    target; the last decision refutes the incumbent less the tolerance.  One decision is made
    even when the budget is used up.
    """
    best = decide(high)
    if best is None:
        return Found(None, math.inf, math.inf)
    while True:
        seconds = price(best)
        if report is not None:
            report(seconds, low)
        while not budget.late:
            edge = seconds * (1 - TOLERANCE)
            if low >= edge:
                return Found(best, seconds, low)
            target = edge if seconds - low <= CLOSE * seconds else (low + seconds) / 2
            better = decide(target)
            if better is not None:
                best = better
                break
            low = target
        else:
            return Found(best, seconds, low)
