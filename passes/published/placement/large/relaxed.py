"""A lower bound where the cuts are too many to list.

Between two anchors with too many down-closed sets, a cut is only known by its work, rounded to a
grid, and pays at least what `envelope` says of cuts with that work.  The chain of these states
and of the exact cuts elsewhere has a path for every pipeline, none of whose loads is
overestimated; its best path is a bound of all pipelines.

What is forgotten, and can only make the bound smaller: memory limits, groups that a class cannot
run, pins inside such a part of values that leave it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pdcompile.passes.published.placement.large.arrays import (
    Arrays,
    Floats,
    Ints,
    main_class,
    speeds,
)
from pdcompile.passes.published.placement.large.band import Steps, band_costs
from pdcompile.passes.published.placement.large.chain import Chain
from pdcompile.passes.published.placement.large.envelope import Lines, Part, lines
from pdcompile.passes.published.placement.large.lattice import Segment, Unlisted
from pdcompile.passes.published.placement.large.linear import reach_of
from pdcompile.passes.published.placement.large.series import block_of, steps_of_series

MOST_ENTRIES = 30_000_000


@dataclass(frozen=True, slots=True)
class Wide:
    """What is known of the cuts and of the stages inside a wide segment."""

    cuts: Lines
    stages: Lines


def wide_parts(
    a: Arrays, parts: list[Segment | Unlisted], late: Callable[[], bool]
) -> dict[int, Wide]:
    """The lines of all segments whose cuts are not listed."""
    work = a.seconds[main_class(a)]
    spans = _spans(a)
    found = {}
    for s, part in enumerate(parts):
        if isinstance(part, Segment):
            continue
        begin, free, end = part.begin, part.interior, part.end
        chosen = _inner_values(a, spans, free, end)
        closed = chosen & (spans[0] >= begin) & (spans[1] <= end)
        found[s] = Wide(
            lines(_part(a, work, begin, free, end, closed), closed=True, late=late),
            lines(_part(a, work, -1, free, end, chosen), closed=False, late=late),
        )
    return found


def _spans(a: Arrays) -> tuple[Ints, Ints]:
    first = np.full(len(a.costs), a.groups, dtype=np.int64)
    last = np.full(len(a.costs), -1, dtype=np.int64)
    np.minimum.at(first, a.value_of, a.pin_of)
    np.maximum.at(last, a.value_of, a.pin_of)
    return first, last


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
) -> Part:
    """Groups free … end − 1; the anchor `begin` is in every cut, everything else in none."""
    n = end - free
    taken = np.flatnonzero(chosen[a.value_of])
    number = np.cumsum(chosen) - 1
    pins = a.pin_of[taken]
    local = np.where((pins >= free) & (pins < end), pins - free, np.where(pins == begin, n, n + 1))
    keys = np.unique(number[a.value_of[taken]] * (n + 2) + local)
    arcs = (a.source >= free) & (a.target < end) & (a.source < end) & (a.target >= free)
    return Part(
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
) -> Chain | None:
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
    low, high = np.concatenate(lows), np.concatenate(highs)
    first = np.concatenate(([0], np.cumsum([len(x) for x in lows])))
    exact = _without_wide_pins(a, parts)
    steps, inner_values = steps_of_series(exact, made, first)
    cut_cost = np.concatenate(costs)
    cut_cost[-1] = 0.0  # everything is inside: nothing is cut
    cut_cost[0] = 0.0
    steps = Steps(
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
            _inside_exact(moved, begin, block_of(exact, part, inner_values.get(s, [])))
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
    return Chain(tuple(loads), tuple(k.count for k in a.classes), reach, after)


def _without_wide_pins(a: Arrays, parts: list[Segment | Unlisted]) -> Arrays:
    """Only the pins that are not inside a wide segment, of values with two of them left."""
    keep_group = np.ones(a.groups, dtype=np.bool_)
    for part in parts:
        if isinstance(part, Unlisted):
            keep_group[part.interior : part.end] = False
    spans = _spans(a)
    keep = keep_group[a.pin_of]
    # Values that are cut inside one wide segment are in its lines already.
    for part in parts:
        if isinstance(part, Unlisted):
            local = _inner_values(a, spans, part.interior, part.end)
            local &= (spans[0] >= part.begin) & (spans[1] <= part.end)
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


def _inside_exact(moved: Floats, begin: int, block: Floats) -> None:
    rows, columns = np.triu_indices(len(block), 1)
    near = columns - rows <= moved.shape[1]
    rows, columns = rows[near], columns[near]
    moved[rows + begin, columns - rows - 1] = block[rows, columns]
