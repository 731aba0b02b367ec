"""A lower bound where the cuts are too many to list.

Between two anchors with too many down-closed sets, a cut is only known by its work, rounded to a
grid, and pays at least what `lines` says of cuts with that work.  The chain of these states
and of the exact cuts elsewhere has a path for every pipeline, none of whose loads is
overestimated; its best path is a bound of all pipelines.

How little a cut costs is a convex function of the work inside it.  For a slope λ, the smallest
cost(J) − λ·work(J) over the sets J is one minimum cut; it says that cost(J) ≥ λ·work(J) + that, for
every J.  Slopes are taken between the extreme sets found so far (Eisner and Severance 1976), until
a new slope finds no set below the line.

What is forgotten, and can only make the bound smaller: memory limits, groups that a class cannot
run, pins inside such a part of values that leave it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.published.placement.cut_chain import (
    Arrays,
    CostSteps,
    CutChain,
    Floats,
    Ints,
    band_costs,
    main_class,
    reach_of,
    spans,
    speeds,
)
from benchmarks.published.placement.series import (
    Segment,
    Unlisted,
    block_of,
    put_block,
    steps_of_series,
)

UNITS = 2.0**40  # integer capacities: of the sum of everything
MOST_LINES = 24


@dataclass(frozen=True, slots=True)
class GraphPart:
    """Groups 0 … groups − 1 of a part of the graph, and two more: `groups` stands for all that
    is in every cut, `groups` + 1 for all that is in none.  Pins are sorted by value."""

    work: Floats
    source: Ints
    target: Ints
    value_of: Ints
    pin_of: Ints
    costs: Floats

    @property
    def groups(self) -> int:
        return len(self.work)


@dataclass(frozen=True, slots=True)
class Lines:
    """cost(J) ≥ slope·work(J) + offset, for every set J and every line."""

    slopes: Floats
    offsets: Floats

    def least(self, low: Floats, high: Floats) -> Floats:
        """A lower bound of the cost of all sets with work between `low` and `high`."""
        found = np.zeros(len(low))
        for slope, offset in zip(self.slopes, self.offsets, strict=True):
            np.maximum(found, offset + np.minimum(slope * low, slope * high), out=found)
        return found


class Cutter:
    """Minimum cuts of one part: of down-closed sets, or of any sets (`closed` False), for which
    everything outside the part is outside."""

    def __init__(self, part: GraphPart, *, closed: bool) -> None:
        from ortools.graph.python import max_flow  # type: ignore[import-untyped]

        self.part = part
        n = part.groups
        total = float(part.costs.sum() + part.work.sum())
        self.scale = UNITS / max(total, 1e-300)
        self.all, self.none = n, n + 1
        infinite = int(UNITS) * 4
        self.infinite = infinite
        costs = np.floor(part.costs * self.scale).astype(np.int64)
        count = np.bincount(part.value_of, minlength=len(costs))
        pair = count[part.value_of] == 2
        more = count[part.value_of] > 2  # a value with one pin is never cut
        two = part.pin_of[pair].reshape(-1, 2)
        weight = costs[count == 2]
        number = np.cumsum(count > 2) - 1 + n + 2
        many = int((count > 2).sum())
        begin = number[part.value_of[more]]
        pins = part.pin_of[more]
        hubs = np.arange(n + 2, n + 2 + many)
        tails = [two[:, 0], two[:, 1], pins, begin + many, hubs]
        heads = [two[:, 1], two[:, 0], begin, pins, hubs + many]
        capacities = [
            weight,
            weight,
            np.full(len(pins), infinite),
            np.full(len(pins), infinite),
            costs[count > 2],
        ]
        if closed:
            # a later group inside has the earlier one inside
            tails.append(part.target)
            heads.append(part.source)
            capacities.append(np.full(len(part.source), infinite))
        self.start, self.end = n + 2 + 2 * many, n + 3 + 2 * many
        inner = self.all if closed else self.none
        tails.append(np.array([self.start if closed else self.none, self.none]))
        heads.append(np.array([inner if closed else self.end, self.end]))
        capacities.append(np.full(2, infinite))
        tails += [np.full(n, self.start), np.arange(n)]
        heads += [np.arange(n), np.full(n, self.end)]
        capacities += [np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)]
        self.flow = max_flow.SimpleMaxFlow()
        arcs = self.flow.add_arcs_with_capacity(
            np.concatenate(tails), np.concatenate(heads), np.concatenate(capacities)
        )
        self.gain, self.loss = arcs[-2 * n : -n], arcs[-n:]

    def below(self, slope: float) -> tuple[float, float, float]:
        """(offset, work, cost) of a set that minimises cost − slope·work; the offset is proved,
        roundings included."""
        part = self.part
        amount = slope * part.work * self.scale
        gain = np.ceil(np.maximum(amount, 0.0)).astype(np.int64)
        loss = np.floor(np.maximum(-amount, 0.0)).astype(np.int64)
        self.flow.set_arcs_capacity(self.gain, gain)
        self.flow.set_arcs_capacity(self.loss, loss)
        status = self.flow.solve(self.start, self.end)
        if status != self.flow.OPTIMAL:
            raise RuntimeError(f"the minimum cut ended with status {status}")
        offset = (self.flow.optimal_flow() - int(gain.sum())) / self.scale
        side = np.zeros(self.end + 1, dtype=np.bool_)
        side[np.asarray(self.flow.get_source_side_min_cut(), dtype=np.int64)] = True
        work = float(part.work[side[: part.groups]].sum())
        return offset, work, offset + slope * work


def lines(part: GraphPart, *, closed: bool, late: Callable[[], bool] = lambda: False) -> Lines:
    """Lines below the cost of all down-closed sets (`closed`), or of all sets."""
    cutter = Cutter(part, closed=closed)
    total = float(part.work.sum())
    found = [(0.0, cutter.below(0.0)[0])]
    if total > 1e-9 * float(part.costs.sum()):
        steep = 2 * float(part.costs.sum()) / total + 1.0
        edges = [cutter.below(-steep), cutter.below(steep)]
        found += [(-steep, edges[0][0]), (steep, edges[1][0])]
        todo = [(edges[0][1:], edges[1][1:])]
        while todo and len(found) < MOST_LINES and not late():
            (w1, c1), (w2, c2) = todo.pop(0)
            if w2 - w1 <= 1e-9 * total:
                continue
            slope = (c2 - c1) / (w2 - w1)
            offset, work, cost = cutter.below(slope)
            found.append((slope, offset))
            if offset < c1 - slope * w1 - 1e-7 * (abs(c1) + abs(c2) + 1e-12) and w1 < work < w2:
                todo += [((w1, c1), (work, cost)), ((work, cost), (w2, c2))]
    return Lines(np.array([s for s, _ in found]), np.array([o for _, o in found]))


MOST_ENTRIES = 30_000_000


@dataclass(frozen=True, slots=True)
class Wide:
    """Bounds on the cuts and the stages inside a wide segment."""

    cuts: Lines
    stages: Lines


def wide_parts(
    a: Arrays, parts: list[Segment | Unlisted], late: Callable[[], bool]
) -> dict[int, Wide]:
    """The lines of all segments whose cuts are not listed."""
    work = a.seconds[main_class(a)]
    ends = spans(a, np.arange(a.groups))
    found = {}
    for s, part in enumerate(parts):
        if isinstance(part, Segment):
            continue
        begin, free, end = part.begin, part.interior, part.end
        chosen = _inner_values(a, ends, free, end)
        closed = chosen & (ends[0] >= begin) & (ends[1] <= end)
        found[s] = Wide(
            lines(_part(a, work, begin, free, end, closed), closed=True, late=late),
            lines(_part(a, work, -1, free, end, chosen), closed=False, late=late),
        )
    return found


def _inner_values(
    a: Arrays, spans: tuple[Ints, Ints], free: int, end: int
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    chosen = np.zeros(len(a.costs), dtype=np.bool_)
    inside = (a.pin_of >= free) & (a.pin_of < end)
    chosen[a.value_of[inside]] = True
    return chosen


def _part(
    a: Arrays,
    work: Floats,
    begin: int,
    free: int,
    end: int,
    chosen: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> GraphPart:
    """Groups free … end − 1; the anchor `begin` is in every cut, everything else in none."""
    n = end - free
    taken = np.flatnonzero(chosen[a.value_of])
    number = np.cumsum(chosen) - 1
    pins = a.pin_of[taken]
    local = np.where((pins >= free) & (pins < end), pins - free, np.where(pins == begin, n, n + 1))
    keys = np.unique(number[a.value_of[taken]] * (n + 2) + local)
    arcs = (a.source >= free) & (a.target < end) & (a.source < end) & (a.target >= free)
    return GraphPart(
        work[free:end],
        a.source[arcs] - free,
        a.target[arcs] - free,
        keys // (n + 2),
        keys % (n + 2),
        a.costs[chosen],
    )


def relaxed_chain(
    a: Arrays,
    parts: list[Segment | Unlisted],
    wide: dict[int, Wide],
    reach: float,
    share: float = 1.0,
) -> CutChain | None:
    """The chain of exact and rounded cuts, as fine as `share` of the memory allows; None: the
    exact ones alone are too many."""
    work = a.seconds[main_class(a)]
    total = float(work.sum())
    speed = speeds(a)
    slowest = min(
        (float(v) for v, kind in zip(speed, a.classes, strict=True) if kind.count), default=1.0
    )
    # A stage holds at most reach / slowest of the main class's work.
    span = reach / slowest if slowest > 0 else total
    wide_work = sum(float(work[p.interior : p.end].sum()) for p in parts if isinstance(p, Unlisted))
    step = max((wide_work * span / (share * MOST_ENTRIES)) ** 0.5, span / 1000, 1e-300)
    made, low, high, cut_cost, first = _states(a, parts, wide, step)
    exact = _without_wide_pins(a, parts)
    steps, inner_values = steps_of_series(exact, made, first)
    steps = CostSteps(
        steps.begin + cut_cost,
        steps.end + cut_cost,
        steps.corner_begin,
        steps.corner_end,
        steps.corner_cost,
    )
    width = reach_of(low, span + 2 * step)
    if len(low) * width > 3 * MOST_ENTRIES:
        return None
    moved = band_costs(steps, width)
    grown = _grown(low, high, width)
    for s, part in enumerate(made):
        begin, end = int(first[s]), int(first[s + 1])
        if s in wide:
            _inside_wide(moved, grown, begin, end, wide[s].stages)
        elif part.inside.shape[1]:
            put_block(moved, begin, block_of(exact, part, inner_values.get(s, [])))
    loads = []
    for c, kind in enumerate(a.classes):
        if not kind.count:
            loads.append(np.zeros((0, 0)))
            continue
        load = grown * speed[c] if speed[c] > 0 else np.where(grown < np.inf, 0.0, np.inf)
        if kind.transfers:
            load = load + moved
        else:
            load[np.isinf(moved)] = np.inf
        loads.append(load)
    after = (total - high).clip(min=0.0) * slowest
    return CutChain(tuple(loads), tuple(k.count for k in a.classes), reach, after)


def _states(
    a: Arrays, parts: list[Segment | Unlisted], wide: dict[int, Wide], step: float
) -> tuple[list[Segment], Floats, Floats, Floats, Ints]:
    """Segments with their cuts, exact or rounded to `step`: the least and most work of each, what
    a rounded one costs at least, and the first cut of each segment."""
    work = a.seconds[main_class(a)]
    made: list[Segment] = []
    lows, highs, costs = [], [], []
    sofar = 0.0
    for s, part in enumerate(parts):
        if isinstance(part, Segment):
            local = part.inside @ work[part.interior : part.end]
            start = sofar + (float(work[part.begin]) if part.has_anchor else 0.0)
            lows.append(start + local)
            highs.append(start + local)
            costs.append(np.zeros(len(local)))
            made.append(part)
            sofar += float(work[part.begin : part.end].sum())
            continue
        begin, end = part.begin, part.end
        inner = float(work[part.interior : end].sum())
        count = max(1, int(np.ceil(inner / step)))
        grid = np.linspace(0.0, inner, count + 1)
        low = np.concatenate(([0.0], grid[:-1], [inner]))
        high = np.concatenate(([0.0], grid[1:], [inner]))
        start = sofar + (float(work[begin]) if part.has_anchor else 0.0)
        lows.append(start + low)
        highs.append(start + high)
        costs.append(wide[s].cuts.least(low, high))
        made.append(Segment(begin, end, part.has_anchor, np.zeros((len(low), 0), dtype=np.bool_)))
        sofar += float(work[begin:end].sum())
    cost = np.concatenate(costs)
    cost[0] = cost[-1] = 0.0  # nothing, or everything, is inside: nothing is cut
    first = np.concatenate(([0], np.cumsum([len(x) for x in lows])))
    return made, np.concatenate(lows), np.concatenate(highs), cost, first


def _without_wide_pins(a: Arrays, parts: list[Segment | Unlisted]) -> Arrays:
    """Only the pins that are not inside a wide segment, of values with two of them left."""
    keep_group = np.ones(a.groups, dtype=np.bool_)
    for part in parts:
        if isinstance(part, Unlisted):
            keep_group[part.interior : part.end] = False
    ends = spans(a, np.arange(a.groups))
    keep = keep_group[a.pin_of]
    # Values that are cut inside one wide segment are in its lines already.
    for part in parts:
        if isinstance(part, Unlisted):
            local = _inner_values(a, ends, part.interior, part.end)
            local &= (ends[0] >= part.begin) & (ends[1] <= part.end)
            keep &= ~local[a.value_of]
    left = np.bincount(a.value_of[keep], minlength=len(a.costs)) > 1
    keep &= left[a.value_of]
    number = np.cumsum(left) - 1
    return replace(a, value_of=number[a.value_of[keep]], pin_of=a.pin_of[keep], costs=a.costs[left])


def _grown(low: Floats, high: Floats, width: int) -> Floats:
    """[i, d]: the least work of a stage from state i to state i + d + 1."""
    padded = np.concatenate((low, np.full(width, np.inf)))
    ahead = np.lib.stride_tricks.sliding_window_view(padded[1:], width)[: len(low)]
    return np.asarray((ahead - high[:, None]).clip(min=0.0))


def _inside_wide(moved: Floats, grown: Floats, begin: int, end: int, known: Lines) -> None:
    width = moved.shape[1]
    for i in range(begin, end - 1):
        span = min(width, end - 1 - i)
        work = grown[i, :span]
        cost = np.zeros(span)
        for slope, offset in zip(known.slopes, known.offsets, strict=True):
            if slope >= 0:  # more work, more cost: the least work counts
                np.maximum(cost, offset + slope * work, out=cost)
        moved[i, :span] = cost
