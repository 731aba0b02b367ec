"""A lower bound from the values that must be cut, for graphs of parts side by side.

A *series* is a chain of anchors with gaps between them; what lies in a gap falls into branches
that share nothing but the two anchors, and every branch is a series again.  If the anchors on
both sides of a gap are on one stage, so is all that lies between, as stages are convex.  If they
are not, every branch of the gap is cut somewhere between them.  Whatever a stage holds between
two cut gaps of one series is at most its load.

Every cut value is paid by at least two stages, so that K stages of load ≤ T hold all work W only
if K·T ≥ W + 2·C(T), where C(T) is the least cost of values cut: a shortest path in every series
over its cut gaps, from the innermost series outwards.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from pdcompile.passes.published.placement.cut_chain import Arrays, main_class
from pdcompile.passes.published.placement.relaxed import Cutter, Part

LARGEST_CUT = 5000  # groups of a part whose minimum cut is computed


@dataclass(slots=True)
class Value:
    """A value as one series sees it: a part of its cost, and its pins there."""

    cost: float
    pins: list[int]
    source: bool = False  # the anchor before the series is a pin
    sink: bool = False  # the anchor after it is one


@dataclass(slots=True)
class Gap:
    groups: list[int]
    work: float = 0.0
    cost: float = 0.0  # of values that are cut when the gap is, without the branches
    branches: list[Series] = field(default_factory=list)


@dataclass(slots=True)
class Series:
    """Gap, anchor, gap, …, anchor, gap.  `bounded`: anchors stand on both sides of it."""

    anchors: list[int]
    work: list[float]  # of the anchors
    gaps: list[Gap]
    bounded: bool
    least: float = 0.0  # C(T), once computed
    cuts: list[int] = field(default_factory=list)  # gaps that are cut to achieve it


class Nested:
    """The series of a whole graph, innermost first."""

    def __init__(self, a: Arrays, late: Callable[[], bool] = lambda: False) -> None:
        self.work = a.seconds[main_class(a)].tolist()
        self.after: list[list[int]] = [[] for _ in self.work]
        for source, target in zip(a.source.tolist(), a.target.tolist(), strict=True):
            self.after[source].append(target)
        self.late = late
        self.series: list[Series] = []
        values = [Value(cost, []) for cost in a.costs.tolist()]
        for e, v in zip(a.value_of.tolist(), a.pin_of.tolist(), strict=True):
            values[e].pins.append(v)
        self.place = [0] * len(self.work)  # of a group in the series that is looked at
        self.branch = list(range(len(self.work)))
        todo: list[tuple[list[int], list[Value], bool, list[Series]]] = []
        root: list[Series] = []
        todo.append((list(range(len(self.work))), values, False, root))
        while todo:
            groups, inside, bounded, parents = todo.pop()
            made = self._series(groups, inside, bounded, todo)
            self.series.append(made)
            parents.append(made)
        self.series.reverse()

    def _series(
        self,
        groups: list[int],
        values: list[Value],
        bounded: bool,
        todo: list[tuple[list[int], list[Value], bool, list[Series]]],
    ) -> Series:
        anchors, gaps = self._anchors(groups)
        for i, gap in enumerate(gaps):
            for v in gap:
                self.place[v] = 2 * i
        for i, v in enumerate(anchors):
            self.place[v] = 2 * i + 1
        found = [Gap(gap, sum(self.work[v] for v in gap)) for gap in gaps]
        local: list[list[Value]] = [[] for _ in gaps]
        end = 2 * len(anchors) + 1
        for value in values:
            places = [self.place[v] for v in value.pins]
            if value.source:
                places.append(-1)
            if value.sink:
                places.append(end)
            low, high = min(places), max(places)
            if low == high:
                if not low % 2:
                    local[low // 2].append(value)
                continue
            first, last = (low + 1) // 2, (high + 1) // 2  # gaps from `first`, below `last`
            home = low // 2 if not low % 2 else first
            if 2 * home - 1 <= low and high <= 2 * home + 1:
                pins = [v for v in value.pins if self.place[v] == 2 * home]
                if pins:
                    source, sink = low == 2 * home - 1, high == 2 * home + 1
                    local[home].append(Value(value.cost, pins, source, sink))
                else:
                    found[home].cost += value.cost
                continue
            # Cutting any of the gaps that it spans cuts it: they share its cost.
            for i in range(first, last):
                found[i].cost += value.cost / (last - first)
        for i, gap_groups in enumerate(gaps):
            closed = bounded or 0 < i < len(gaps) - 1
            if not gap_groups or not closed or self.late():
                continue
            self._gap(found[i], gap_groups, local[i], todo)
        if not bounded:
            found[0].cost = found[-1].cost = 0.0
        return Series(anchors, [self.work[v] for v in anchors], found, bounded)

    def _anchors(self, groups: list[int]) -> tuple[list[int], list[list[int]]]:
        """Groups of the part that are comparable with all others of it, and those between."""
        number = {v: i for i, v in enumerate(groups)}
        n = len(groups)
        forth = [n] * n  # nearest successor
        back = [-1] * n
        for i, v in enumerate(groups):
            for u in self.after[v]:
                j = number.get(u)
                if j is not None:
                    forth[i] = min(forth[i], j)
                    back[j] = max(back[j], i)
        furthest = list(itertools.accumulate(forth, max, initial=-1))
        nearest = list(itertools.accumulate(reversed(back), min, initial=n))[::-1]
        anchors: list[int] = []
        gaps: list[list[int]] = [[]]
        for i, v in enumerate(groups):
            if furthest[i] <= i <= nearest[i + 1]:
                anchors.append(v)
                gaps.append([])
            else:
                gaps[-1].append(v)
        return anchors, gaps

    def _gap(
        self,
        gap: Gap,
        groups: list[int],
        values: list[Value],
        todo: list[tuple[list[int], list[Value], bool, list[Series]]],
    ) -> None:
        branch = self.branch
        for v in groups:
            branch[v] = v
        here = set(groups)

        def root(v: int) -> int:
            while branch[v] != v:
                branch[v] = branch[branch[v]]
                v = branch[v]
            return v

        for v in groups:
            for u in self.after[v]:
                if u in here:
                    branch[root(u)] = root(v)
        parts: dict[int, list[int]] = {}
        for v in groups:
            parts.setdefault(root(v), []).append(v)
        if len(parts) == 1:
            gap.cost += self._cut(groups, values)
            return
        inside: dict[int, list[Value]] = {r: [] for r in parts}
        for value in values:
            pins: dict[int, list[int]] = {}
            for v in value.pins:
                pins.setdefault(root(v), []).append(v)
            for r, some in pins.items():
                share = value.cost / len(pins)
                inside[r].append(Value(share, some, value.source, value.sink))
        for r, some in parts.items():
            todo.append((some, inside[r], True, gap.branches))

    def _cut(self, groups: list[int], values: list[Value]) -> float:
        """The least cost of values cut between the two anchors around a part in one piece."""
        if len(groups) > LARGEST_CUT or not values:
            return 0.0
        number = {v: i for i, v in enumerate(groups)}
        n = len(groups)
        value_of, pin_of = [], []
        for e, value in enumerate(values):
            pins = [number[v] for v in value.pins]
            pins += [n] * value.source + [n + 1] * value.sink
            value_of += [e] * len(pins)
            pin_of += pins
        arcs = [(number[v], number[u]) for v in groups for u in self.after[v] if u in number]
        part = Part(
            np.zeros(n),
            np.array([v for v, _ in arcs], dtype=np.int64),
            np.array([u for _, u in arcs], dtype=np.int64),
            np.array(value_of, dtype=np.int64),
            np.array(pin_of, dtype=np.int64),
            np.array([value.cost for value in values]),
        )
        return max(0.0, Cutter(part, closed=True).below(0.0)[0])

    def least(self, limit: float) -> float:
        """C(T): cost of values that every pipeline cuts whose stages hold at most `limit`."""
        for series in self.series:
            series.least, series.cuts = _least(series, limit)
        return self.series[-1].least

    def order(self, random: Random, early: float) -> list[int]:
        """A linear order in which the cuts of the last `least` are next to each other.

        What comes before the first cut of a branch goes with the anchor before the branch, and
        what comes after the last one with the anchor after it, in branches with more between
        with the probability `early`.
        """
        done: dict[int, tuple[list[int], list[int], list[int]]] = {}
        for series in self.series:
            runs: list[list[int]] = [[]]  # between cuts
            between: list[list[int]] = []
            for i, gap in enumerate(series.gaps):
                if i in series.cuts and gap.branches:
                    parts = [done.pop(id(branch)) for branch in gap.branches]
                    middle: list[int] = []
                    runs.append([])
                    random.shuffle(parts)
                    for head, inner, tail in parts:
                        if not inner or random.random() < early:
                            runs[-2] += head
                            middle += inner
                            runs[-1] += tail
                        else:
                            middle += head + inner + tail
                    between.append(middle)
                elif i in series.cuts:
                    between.append(gap.groups)
                    runs.append([])
                else:
                    runs[-1] += gap.groups
                    for branch in gap.branches:
                        done.pop(id(branch), None)
                if i < len(series.anchors):
                    runs[-1].append(series.anchors[i])
            inner = []
            for run, middle in zip(runs[1:-1], between[1:], strict=False):
                inner += run + middle
            first = between[0] if between else []
            last = runs[-1] if len(runs) > 1 else []
            done[id(series)] = runs[0], first + inner, last
        head, inner, tail = done[id(self.series[-1])]
        return head + inner + tail


def _least(series: Series, limit: float) -> tuple[float, list[int]]:
    """The cheapest way to cut gaps so that no more than `limit` lies between two cut ones."""
    limit *= 1 + 1e-9
    # (work up to the end of a cut gap, least cost so far, the gap), all ascending; gap −1 stands
    # for the beginning.
    starts: deque[tuple[float, float, int]] = deque([(0.0, 0.0, -1)])
    came = [-1] * len(series.gaps)
    before = 0.0
    for i, gap in enumerate(series.gaps):
        while starts and before - starts[0][0] > limit:
            starts.popleft()
        if not starts:
            return math.inf, []  # an anchor, or some in a row, are more than a stage holds
        cost = starts[0][1] + gap.cost + sum(branch.least for branch in gap.branches)
        came[i] = starts[0][2]
        before += gap.work
        while starts and starts[-1][1] >= cost and (starts[-1][2] >= 0 or not series.bounded):
            starts.pop()
        starts.append((before, cost, i))
        if i < len(series.anchors):
            before += series.work[i]
    if series.bounded and starts[0][2] < 0:
        starts.popleft()  # something is cut between two anchors on different stages
    while starts and before - starts[0][0] > limit:
        starts.popleft()
    if not starts:
        return math.inf, []
    cuts, at = [], starts[0][2]
    while at >= 0:
        cuts.append(at)
        at = came[at]
    return starts[0][1], cuts[::-1]


def nested_bound(
    nested: Nested,
    *,
    work: float,
    shares: float,
    slowest: float,
    paid: float,
    low: float,
    high: float,
) -> float:
    """The least T between `low` and `high` with shares·T ≥ work + paid·C(T / slowest), rounded
    down; `shares`: work of the main class per second that all devices do together."""

    def possible(limit: float) -> bool:
        return shares * limit >= work + paid * nested.least(limit / slowest)

    if possible(low):
        return low
    for _ in range(20):
        middle = (low + high) / 2
        if possible(middle):
            high = middle
        else:
            low = middle
    return low
