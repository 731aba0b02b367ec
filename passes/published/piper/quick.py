"""Tables that are sums over nodes, for all stages at once: an achievable one and a relaxed one."""

from __future__ import annotations

import math

import numpy as np

from pdcompile.passes.partition.chain_program import Ints
from pdcompile.passes.published.piper.model import Floats, Items, Menu
from pdcompile.passes.published.piper.pairs import Pairs
from pdcompile.passes.published.piper.segments import Space, Table

POLICIES = 12  # rules for the variants
FLIGHTS = 24  # numbers of microbatches in flight for which the relaxed table has a bound
ROUNDING = 1e-13  # of the sums whose differences are taken


def achievable(space: Space, pairs: Pairs, policies: int = POLICIES) -> Table:
    """Every stage with a few choices of variants, made by the same rule for all of its nodes.

    Each rule weighs bytes for a further microbatch in flight against seconds.
    """
    problem, menu = space.problem, pairs.menu
    before, after = pairs.before, pairs.after
    prices = _prices(menu, policies)
    sums = np.zeros((3, len(prices), len(menu.items)))
    for v, item in enumerate(menu.items):
        if item is not None:
            worst = math.fsum(float(more.max()) for _, more in (*item.entering, *item.leaving))
            best = np.argmin(item.seconds + prices[:, None] * item.moving, axis=1)
            sums[0, :, v] = item.seconds[best] + worst / problem.bytes_per_second
            sums[1, :, v] = item.moving[best]
            sums[2, :, v] = item.first[best]
    along = sums @ space.has.T
    # Costs of a stage are differences of sums, in which rounding may leave less than nothing.
    seconds, moving, first = np.maximum(along[:, :, after] - along[:, :, before], 0.0)
    most = float(problem.devices + 1)
    limit = problem.memory_bytes
    if math.isinf(limit):
        flights = np.full(seconds.shape, most)
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            more = np.where(moving > 0, np.floor((limit - first) / moving), most)
        flights = np.where(first <= limit, np.minimum(1 + more, most), 0.0)
    return _dense(pairs, seconds, np.maximum.accumulate(flights, axis=0))


def relaxed(space: Space, pairs: Pairs) -> Table:
    """Every stage with a bound on its seconds for some numbers y of microbatches in flight.

    Variants that fit have Σ bytes ≤ limit; with any price for a byte, the least of
    Σ (seconds + price·bytes) − price·limit over all variants is a lower bound (Lagrange), and a
    sum over nodes.  A bound for y holds for every larger number too.
    """
    problem, menu = space.problem, pairs.menu
    before, after = pairs.before, pairs.after
    limit = problem.memory_bytes
    most = problem.devices + 1
    bounded = not math.isinf(limit)
    grid = _grid(most) if bounded else [1]
    prices = _prices(menu) if bounded else np.zeros(1)
    seconds = np.zeros((len(grid), len(before)))
    for k, y in enumerate(grid):
        if bounded:
            sizes = [_least(item, y, 0.0, 1.0) for item in menu.items]
            held = _between(space, sizes, before, after)
            seconds[k, held > limit] = np.inf
        for price in prices / max(1, y - 1):
            costs = [_least(item, y, 1.0, float(price)) for item in menu.items]
            paid = float(price) * limit if price else 0.0
            slack = paid + ROUNDING * (math.fsum(costs) + paid)
            bound = _between(space, costs, before, after) - slack
            seconds[k] = np.maximum(seconds[k], bound)
    seconds = np.maximum.accumulate(seconds, axis=0)
    # From one number of the grid up to the next nothing else is known.
    flights = np.array([*(y - 1 for y in grid[1:]), most], dtype=np.float64)
    return _dense(pairs, seconds, np.repeat(flights[:, None], len(before), 1))


def _dense(pairs: Pairs, seconds: Floats, flights: Floats) -> Table:
    """A table from [step, stage]; steps that hold nothing, or take for ever, are left out."""
    height = len(seconds)
    seconds = np.maximum.accumulate(seconds, axis=0)
    begin = np.arange(len(pairs), dtype=np.int64) * height
    start = begin + (flights < 1).sum(axis=0)
    stop = np.maximum(start, begin + np.isfinite(seconds).sum(axis=0))
    some = np.flatnonzero(stop > start)
    return Table(
        pairs.menu,
        pairs.before[some],
        pairs.after[some],
        pairs.cut[some],
        pairs.resent[some],
        start[some],
        stop[some],
        seconds.T.ravel(),
        flights.T.ravel(),
    )


def _between(space: Space, costs: list[float], before: Ints, after: Ints) -> Floats:
    along = space.has @ np.array(costs)
    result: Floats = np.maximum(along[after] - along[before], 0.0)
    return result


def _least(item: Items | None, flights: int, time: float, price: float) -> float:
    if item is None:
        return 0.0
    held = item.first + item.moving * (flights - 1)
    return float(np.min(time * item.seconds + price * held))


def _grid(most: int) -> list[int]:
    """Numbers from 1 to `most`, each one at first, then ever fewer."""
    even = np.unique(np.round(np.geomspace(1, most, FLIGHTS)).astype(np.int64))
    return sorted({*range(1, min(8, most) + 1), *even.tolist()})


def _prices(menu: Menu, policies: int = POLICIES) -> Floats:
    """Seconds for a byte at which nodes change their variant: a few of them, 0 and much."""
    ratios: list[float] = []
    for item in menu.items:
        if item is not None and len(item.seconds) > 1:
            slow = item.seconds[:, None] - item.seconds
            saved = item.moving - item.moving[:, None]
            good = (slow > 0) & (saved > 0)
            ratios += (slow[good] / saved[good]).tolist()
    if not ratios:
        return np.zeros(1)
    spread = np.quantile(ratios, np.linspace(0, 1, policies))
    return np.unique(np.r_[0.0, spread * (1 + 1e-9), spread[-1] * 1e6])
