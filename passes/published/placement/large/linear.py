"""Chains of cuts along one linear order of the groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdcompile.passes.published.placement.large.arrays import Arrays, Floats, Ints
from pdcompile.passes.published.placement.large.band import band_costs, differences, steps_of
from pdcompile.passes.published.placement.large.chain import Chain


def positions_of(order: Sequence[int] | Ints) -> Ints:
    place = np.empty(len(order), dtype=np.int64)
    place[np.asarray(order)] = np.arange(len(order))
    return place


def crossing(a: Arrays, place: Ints) -> Floats:
    """[t]: summed cost of the values that a cut before position t goes through."""
    first, last = _spans(a, place)
    change = np.zeros(a.groups + 2)
    np.add.at(change, first + 1, a.costs)
    np.add.at(change, last + 1, -a.costs)
    return np.cumsum(change)[: a.groups + 1]


def _spans(a: Arrays, place: Ints) -> tuple[Ints, Ints]:
    at = place[a.pin_of]
    starts = np.flatnonzero(np.diff(a.value_of, prepend=-1))
    if not len(starts):
        none = np.zeros(0, dtype=np.int64)
        return none, none
    return np.minimum.reduceat(at, starts), np.maximum.reduceat(at, starts)


def thinned(a: Arrays, place: Ints, wanted: int) -> Ints:
    """About `wanted` cuts, ends included: the cheapest of every stretch of equal length."""
    n = a.groups
    if wanted >= n + 1:
        return np.arange(n + 1, dtype=np.int64)
    cost = crossing(a, place)
    edges = np.unique(np.linspace(1, n, max(wanted - 1, 2)).astype(np.int64))
    chosen = [0, n]
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        chosen.append(begin + int(np.argmin(cost[begin:end])))
    return np.unique(np.array(chosen, dtype=np.int64))


def reach_of(work: Floats, limit: float) -> int:
    """How many cuts ahead a stage of at most `limit` least seconds can end."""
    lowest = np.minimum.accumulate(work[::-1])[::-1]
    ends = np.searchsorted(lowest, work + limit * (1 + 1e-9), side="right") - 1
    return max(1, int((ends - np.arange(len(work))).max()))


def linear_chain(a: Arrays, place: Ints, cuts: Ints, reach: float) -> Chain:
    """The chain of the given positions (ascending, 0 and n among them) of an order."""
    count = len(cuts)
    block = np.searchsorted(cuts, place, side="right") - 1  # the block of every group
    keys = np.unique(a.value_of * count + block[a.pin_of])
    steps = steps_of(count, keys // count, keys % count + 1, a.costs)
    work = _prefix(block, a.least, count)
    width = reach_of(work, reach)
    moved = band_costs(steps, width)
    sizes = _prefix(block, a.sizes, count)
    loads = []
    for c, kind in enumerate(a.classes):
        if not kind.count:
            loads.append(np.zeros((0, 0)))
            continue
        load = differences(_prefix(block, a.seconds[c], count), width)
        if kind.transfers:
            load += moved
        if a.barred[c].any():
            load[differences(_prefix(block, a.barred[c] * 1.0, count), width) > 0] = np.inf
        if kind.memory < sizes[-1]:
            load[differences(sizes, width) > kind.memory] = np.inf
        loads.append(load)
    return Chain(tuple(loads), tuple(kind.count for kind in a.classes), reach, work[-1] - work)


def _prefix(block: Ints, amount: Floats, cuts: int) -> Floats:
    total = np.bincount(block, weights=amount, minlength=cuts - 1)
    return np.concatenate(([0.0], np.cumsum(total)))
