"""Tables of the stages between every two states, filled once and asked for every threshold.

States are down-closed sets of nodes as bit masks, smaller ones first.  `pairs` says between which
two of them a stage can lie in a plan that is better than a threshold.  Three tables are filled with
their seconds: `achievable_table` and `relaxed_table` from sums over nodes, for all stages at once,
and `exact_table` from all choices of variants, as far as a better plan could have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.chain_program import Choices, Ints
from benchmarks.published.piper.menus import (
    EMPTY,
    Floats,
    Items,
    Menu,
    extend,
    flights_within,
    stairs,
    thin,
    weighted,
)
from benchmarks.published.piper.states import Space, entered, left
from pdcompile.passes.partition.lattice import members


@dataclass(frozen=True, slots=True)
class Table:
    """The stages of one menu.  Stage i goes from state `before[i]` to state `after[i]`.

    It needs `seconds[j]`, j ascending from `start[i]` to `stop[i]`, for the nodes when at most
    `flights[j]` microbatches are in flight, and besides `cut[i]` and `resent[i]` for each replica
    beyond the first; all of it divided by its width.
    """

    menu: Menu
    before: Ints
    after: Ints
    cut: Floats
    resent: Floats
    start: Ints
    stop: Ints
    seconds: Floats
    flights: Floats

    def steps(self, stage: int) -> tuple[Floats, Floats]:
        """(seconds, flights) of one stage."""
        part = slice(int(self.start[stage]), int(self.stop[stage]))
        return self.seconds[part], self.flights[part]

    def choices(self, threshold: float, width: int, rows: NDArray[np.int64]) -> Choices:
        """Those of `rows` that take at most `threshold` seconds per sample on `width` replicas."""
        budget = threshold * width - self.cut[rows] - (width - 1) * self.resent[rows]
        low = bisected(self.start[rows], self.stop[rows], lambda at: self.seconds[at] <= budget)
        some = low > self.start[rows]
        rows, low = rows[some], low[some]
        # y = 1 + ⌈later/width⌉ ≤ flights, with `later` the replicas of all later stages.
        reach = width * (self.flights[low - 1].astype(np.int64) - 1)
        same = np.ones(len(rows), dtype=np.int64)
        return Choices(
            self.before[rows],
            self.after[rows],
            same * (width * self.menu.degree),
            same * width,
            reach,
        )


def bisected(low: Ints, high: Ints, fits: Callable[[Ints], NDArray[np.bool_]]) -> Ints:
    """End of what fits in each range; all that fits comes first."""
    for _ in range(int((high - low).max(initial=0)).bit_length()):
        middle = (low + high) >> 1
        inside = low < high
        right = inside & fits(np.where(inside, middle, 0))
        low = np.where(right, middle + 1, low)
        high = np.where(inside & ~right, middle, high)
    return low


def alive(table: Table, threshold: float) -> dict[int, Ints]:
    """Rows by width: those of a table that have a choice at this threshold."""
    found = {}
    for width in table.menu.widths:
        budget = threshold * width - table.cut - (width - 1) * table.resent
        if len(table.start):
            found[width] = np.flatnonzero(table.seconds[table.start] <= budget)
    return found


ENTRIES = 1 << 21  # of a matrix that is held at a time
WEIGHTS = (1.0, 0.7, 0.4)  # of seconds against bytes, when devices are counted


@dataclass(frozen=True, slots=True)
class StatePairs:
    """Stages of one menu: states, seconds of the cut edges, seconds for each further replica."""

    menu: Menu
    before: Ints
    after: Ints
    cut: Floats
    resent: Floats

    def __len__(self) -> int:
        return len(self.before)


def pairs(space: Space, menu: Menu, threshold: float, most: int) -> StatePairs | None:
    """All that have a choice below `threshold` and leave enough devices for the rest.

    What is before and after them is counted in device-seconds and device-bytes
    (`weighted`).  None: there are more than `most`.
    """
    problem = space.problem
    limit, rate = problem.memory_bytes, problem.bytes_per_second
    source = space.has[:, [edge.source for edge in problem.edges]]
    target = space.has[:, [edge.target for edge in problem.edges]]
    leaves = source * menu.leaving
    stays = (leaves * (1 - target)).sum(axis=1)
    total = leaves.sum(axis=1)
    gone = space.has @ np.array([float(item is None) for item in menu.items])
    busy = space.has @ np.array([0.0 if i is None else i.seconds.min() for i in menu.items])
    held = space.has @ np.array([0.0 if i is None else i.first.min() for i in menu.items])
    spent = space.has @ menu.resent
    count = space.has.sum(axis=1)
    rests = (
        []
        if math.isinf(threshold)
        else [space.has @ weighted(problem, weight, threshold) for weight in WEIGHTS]
    )
    found: list[tuple[Ints, Ints, Floats, Floats]] = []
    number = 0
    states = len(space.masks)
    step = max(1, ENTRIES // states)
    for low in range(0, states, step):
        part = slice(low, min(states, low + step))
        inside = (space.has[part] @ space.has.T == count[part, None]) & (count[part, None] < count)
        inside &= gone[part, None] == gone
        # Sums of bytes are exact where bytes are whole; of others a little is forgiven.
        inside &= held - held[part, None] <= limit * (1 + 1e-12)
        i, j = np.nonzero(inside)
        i += low
        if threshold < math.inf:
            seconds = busy[j] - busy[i]
            fits = seconds <= threshold * max(menu.widths) * (1 + 1e-9)
            i, j = i[fits], j[fits]
        enters = (source[part] * menu.entering) @ target.T
        out = leaves[part] @ target.T
        inner = np.einsum("ie,ie->i", source[part] * menu.entering, target[part])
        moved = (enters[i - low, j] - inner[i - low]) + (stays[j] - (total[i] - out[i - low, j]))
        cut = np.maximum(moved, 0.0) / rate
        resent = np.maximum(spent[j] - spent[i], 0.0)
        if threshold < math.inf:
            # Rounding of sums over all nodes, and of the threshold itself.
            seconds = np.maximum(busy[j] - busy[i], 0.0) + cut - 1e-12 * busy[-1]
            width = np.maximum(1.0, np.ceil(seconds / threshold - 1e-9))
            fits = width <= max(menu.widths)
            for along in rests:
                rest = along[i] + along[-1] - along[j]
                fits &= rest + width * menu.degree <= problem.devices * (1 + 1e-9) + 1e-9
            i, j, cut, resent = i[fits], j[fits], cut[fits], resent[fits]
        number += len(i)
        if number > most:
            return None
        found.append((i.astype(np.int64), j.astype(np.int64), cut, resent))
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    return StatePairs(menu, columns[0], columns[1], columns[2], columns[3])


POLICIES = 12  # rules for the variants
FLIGHTS = 24  # numbers of microbatches in flight for which the relaxed table has a bound
ROUNDING = 1e-13  # of the sums whose differences are taken


def achievable_table(space: Space, pairs: StatePairs, policies: int = POLICIES) -> Table:
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
    flights = flights_within(problem.memory_bytes, moving, first, problem.devices + 1)
    return _dense(pairs, seconds, np.maximum.accumulate(flights, axis=0))


def relaxed_table(space: Space, pairs: StatePairs) -> Table:
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


def _dense(pairs: StatePairs, seconds: Floats, flights: Floats) -> Table:
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


POINTS = 1_500  # sums of variants that a stage may have; more are thinned


def exact_table(
    space: Space,
    relaxed: Table,
    rows: dict[int, Ints],
    threshold: float,
    most: int,
    late: Callable[[], bool],
) -> tuple[Table, Table | None]:
    """Two tables of the stages that `rows` (by width) of `relaxed` leaves, at this threshold.

    The first is achievable, the second optimistic: they differ where a stage has more choices
    than `most`, or where time ran out.  There the optimistic one is `relaxed`'s.  It is None where
    they do not differ.
    """
    problem = space.problem
    widest = np.zeros(len(relaxed.start), dtype=np.int64)
    for width, which in sorted(rows.items()):
        widest[which] = width
    real: list[tuple[int, Floats, Floats]] = []
    hoped: list[tuple[int, Floats, Floats]] = []
    complete = True
    stages = np.flatnonzero(widest)
    stages = stages[np.argsort(relaxed.before[stages], kind="stable")]
    starts = np.searchsorted(relaxed.before[stages], np.arange(len(space.masks) + 1))
    for i in range(len(space.masks)):
        mine = stages[starts[i] : starts[i + 1]]
        if not len(mine):
            continue
        if late():
            complete = False
            hoped += [(k, *relaxed.steps(k)) for k in mine.tolist()]
            continue
        row_at = dict(zip(relaxed.after[mine].tolist(), mine.tolist(), strict=True))
        budget = threshold * int(widest[mine].max())
        wanted = _below(space, i, relaxed.after[mine])
        for j, points, whole in _row(space, relaxed, i, wanted, set(row_at), budget, most):
            k = row_at[j]
            steps = stairs(points, problem.memory_bytes, problem.devices + 1)
            if len(steps[0]):
                real.append((k, *steps))
            if not whole:
                complete = False
                hoped.append((k, *relaxed.steps(k)))
            elif len(steps[0]):
                hoped.append((k, *steps))
    return _table(relaxed, real), None if complete else _table(relaxed, hoped)


def _below(space: Space, i: int, ends: Ints) -> list[int]:
    """States after i that lie below one of `ends`, or are one; ascending."""
    found: set[int] = set()
    waiting = ends.tolist()
    while waiting:
        j = waiting.pop()
        if j not in found:
            found.add(j)
            waiting += [h for h in space.covers(j) if space.inside(i, h)]
    return sorted(found)


def _row(
    space: Space,
    relaxed: Table,
    i: int,
    wanted: list[int],
    asked: set[int],
    budget: float,
    most: int,
) -> list[tuple[int, Floats, bool]]:
    """(j, points, are they all) for every state j of `asked` that a stage from i can reach.

    A stage's points are those of a stage one node smaller, each with every variant of that node.
    """
    menu, problem = relaxed.menu, space.problem
    rows = [entered(problem, item, space.masks[i]) for item in menu.items]
    reached: dict[int, tuple[Floats, bool]] = {i: (EMPTY, True)}
    found = []
    for j in wanted:
        below = [h for h in space.covers(j) if h == i or space.inside(i, h)]
        if any(h not in reached for h in below):
            continue  # a part of it is too much already
        start, whole = reached[below[0]]
        nodes = members(space.masks[j] & ~space.masks[below[0]])
        points, kept = _extend(space, relaxed, start, nodes, rows, budget, most)
        if not points.shape[1]:
            continue
        reached[j] = points, whole and kept
        if menu.uneven and j in asked:
            nodes = members(space.masks[j] & ~space.masks[i])
            at_end = list(rows)
            for v in nodes:
                item, options = menu.items[v], rows[v]
                if item is not None and options is not None:
                    at_end[v] = left(problem, item, options, space.masks[j])
            points, kept = _extend(space, relaxed, EMPTY, nodes, at_end, budget, most)
            found.append((j, points, kept))
        elif j in asked:
            found.append((j, *reached[j]))
    return found


def _extend(
    space: Space,
    relaxed: Table,
    points: Floats,
    nodes: list[int],
    rows: list[Floats | None],
    budget: float,
    most: int,
) -> tuple[Floats, bool]:
    whole = True
    for v in nodes:
        options = rows[v]
        if options is None:
            return points[:, :0], whole
        points = extend(points, options, space.problem.memory_bytes, budget)
        if points.shape[1] > most:
            points, whole = thin(points, most), False
    return points, whole


def _table(relaxed: Table, parts: list[tuple[int, Floats, Floats]]) -> Table:
    rows = np.array([k for k, _, _ in parts], dtype=np.int64)
    ends = np.cumsum([len(seconds) for _, seconds, _ in parts], dtype=np.int64)
    nothing = np.zeros(0)
    return Table(
        relaxed.menu,
        relaxed.before[rows],
        relaxed.after[rows],
        relaxed.cut[rows],
        relaxed.resent[rows],
        np.r_[0, ends][:-1].astype(np.int64),
        ends,
        np.concatenate([nothing, *(seconds for _, seconds, _ in parts)]),
        np.concatenate([nothing, *(flights for _, _, flights in parts)]),
    )
