"""The best pipeline whose cuts all belong to one chain of cuts, from loads in a band.

A chain of cuts c_0, c_1, …, c_m is a list of down-closed sets of groups, in an order in which no
set comes before one that it contains; the prefixes of a linear order are one.  The stage from c_i
to c_j is the difference of the two.  With n_e(c) pins of a value e inside a cut and
A_t(c) = [n_e(c) ≥ t], a stage touches e when n_e(c_i) ≠ n_e(c_j), and holds all
of e when n_e(c_i) = 0 and n_e(c_j) = |e|:

    paid = Σ_{t<|e|} A_t(c_i)·A_{t+1}(c_j) − Σ_{t≥1} A_t(c_i) − A_{|e|}(c_j)·(1 − A_1(c_i))

Every A_t is a sum of steps along the chain, hence the cost of all stages is a sum of steps of i,
of steps of j, and of corners [i ≥ a][j ≥ b], which prefix sums over the band add up.

The smallest number of stages up to every cut, with all loads at most T, is a breadth-first
search, and each cut is expanded once; bisection finds the smallest T that fits the devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from benchmarks.published.chain_program import smallest_threshold
from benchmarks.published.placement_model import DeviceClass, LoadProblem

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Arrays:
    """Groups, arcs and values.  `pin_of` lists the pins of all values one after the other."""

    seconds: Floats  # [class, group]; 0 where the class cannot run the group
    barred: npt.NDArray[np.bool_]  # [class, group]: the class cannot run it
    least: Floats  # the smallest time of each group on a class that has devices
    sizes: Floats
    source: Ints  # arcs
    target: Ints
    value_of: Ints  # [pin]: the value it belongs to, ascending
    pin_of: Ints  # [pin]: the group
    costs: Floats
    classes: tuple[DeviceClass, ...]

    @property
    def groups(self) -> int:
        return len(self.sizes)

    @property
    def devices(self) -> int:
        return sum(kind.count for kind in self.classes)


def arrays(problem: LoadProblem) -> Arrays:
    """The arrays of a problem whose groups are in topological order."""
    times = (
        np.array(problem.seconds, dtype=np.float64)
        .reshape(len(problem.sizes), len(problem.classes))
        .T
    )
    barred = ~np.isfinite(times)
    able = [c for c, kind in enumerate(problem.classes) if kind.count > 0]
    least = times[able].min(axis=0) if able else np.full(len(problem.sizes), math.inf)
    arcs = np.array(problem.arcs, dtype=np.int64).reshape(-1, 2)
    counts = np.array([len(pins) for pins in problem.pins], dtype=np.int64)
    return Arrays(
        seconds=np.where(barred, 0.0, times),
        barred=barred,
        least=least,
        sizes=np.array(problem.sizes, dtype=np.float64),
        source=arcs[:, 0].copy(),
        target=arcs[:, 1].copy(),
        value_of=np.repeat(np.arange(len(counts), dtype=np.int64), counts),
        pin_of=np.fromiter(
            (pin for pins in problem.pins for pin in pins), np.int64, int(counts.sum())
        ),
        costs=np.array(problem.costs, dtype=np.float64),
        classes=tuple(
            replace(kind, count=min(kind.count, len(problem.sizes))) for kind in problem.classes
        ),
    )


def main_class(a: Arrays) -> int:
    return max(range(len(a.classes)), key=lambda c: a.classes[c].count)


def speeds(a: Arrays) -> Floats:
    """[class]: the least time that a class needs per second of work on the main class."""
    work = a.seconds[main_class(a)]
    some = work > 0
    found = np.zeros(len(a.classes))
    for c in range(len(a.classes)):
        # A group that the class cannot run makes it no faster on the others.
        able = some & ~a.barred[c]
        found[c] = float((a.seconds[c][able] / work[able]).min()) if able.any() else 0.0
    return found


NEVER = 1 << 40
TOLERANCE = 1e-9
MANY = 64  # combinations of devices of the smaller classes that are searched


@dataclass(frozen=True, slots=True)
class CutChain:
    """`loads[class][i, d]`: load of the stage from cut i to cut i + d + 1, or a lower bound of
    it; inf: no such stage, or a load above `reach`.  Stages that do not lie in the band have a
    load above `reach`.  Cut 0 is empty and the last one holds everything.
    """

    loads: tuple[Floats, ...]
    counts: tuple[int, ...]
    reach: float
    needs: Floats  # [cut]: least seconds of all that comes after it

    @property
    def cuts(self) -> int:
        return len(self.needs)


@dataclass(frozen=True, slots=True)
class CutPath:
    """Cuts of a pipeline, from the empty set to everything, and the class of each stage."""

    cuts: tuple[int, ...]
    kinds: tuple[int, ...]
    load: float


def combinations(counts: Sequence[int]) -> int:
    """Count of the numbers of used devices of the smaller classes there are."""
    return math.prod(count + 1 for count in counts) // (max(counts, default=0) + 1)


def within(chain: CutChain, limit: float) -> CutPath | None:
    """A pipeline with all loads ≤ `limit` ≤ `chain.reach`; None: the chain has none."""
    main = max(range(len(chain.counts)), key=lambda c: chain.counts[c])
    others = [c for c in range(len(chain.counts)) if c != main and chain.counts[c] > 0]
    total = sum(chain.counts)
    ends: dict[tuple[int, ...], tuple[Ints, Ints, Ints]] = {}
    for used in itertools.product(*(range(chain.counts[c] + 1) for c in others)):
        start = np.full(chain.cuts, NEVER, dtype=np.int64)
        parent = np.full(chain.cuts, -1, dtype=np.int64)
        kind = np.full(chain.cuts, main, dtype=np.int64)
        if not any(used):
            start[0] = 0
        for place, c in enumerate(others):
            if used[place]:
                less = (*used[:place], used[place] - 1, *used[place + 1 :])
                _one_stage(chain, c, limit, ends[less][0], start, parent, kind)
        stages = _fewest(chain, main, limit, start, parent, kind, total - sum(used))
        ends[used] = stages, parent, kind
        if stages[-1] <= chain.counts[main]:
            return _back(chain, ends, others, main, used, limit)
    return None


def _one_stage(
    chain: CutChain, c: int, limit: float, stages: Ints, start: Ints, parent: Ints, kind: Ints
) -> None:
    """Offer every cut that one stage of class `c` reaches."""
    sources = np.flatnonzero(stages < NEVER)
    rows, steps = np.nonzero(chain.loads[c][sources] <= limit)
    begin = sources[rows]
    end = begin + steps + 1
    order = np.argsort(-stages[begin], kind="stable")  # the fewest is written last
    begin, end = begin[order], end[order]
    best = np.full(chain.cuts, NEVER, dtype=np.int64)
    came = np.full(chain.cuts, -1, dtype=np.int64)
    best[end], came[end] = stages[begin], begin
    better = best < start
    start[better], parent[better], kind[better] = best[better], came[better], c


def _fewest(
    chain: CutChain,
    main: int,
    limit: float,
    start: Ints,
    parent: Ints,
    kind: Ints,
    left: int,
) -> Ints:
    """The fewest stages of class `main` up to every cut; `start`: without any after the others.

    A cut from which the remaining devices cannot finish is not expanded.
    """
    loads = chain.loads[main]
    stages = start.copy()
    done = np.zeros(chain.cuts, dtype=np.bool_)
    waiting = np.flatnonzero(start < NEVER)
    by_stage = waiting[np.argsort(start[waiting], kind="stable")]
    levels = start[by_stage]
    frontier = np.zeros(0, dtype=np.int64)
    allowed = chain.needs / limit * (1 - TOLERANCE) if limit > 0 else np.zeros(chain.cuts)
    for s in range(min(chain.counts[main], left)):
        fresh = by_stage[np.searchsorted(levels, s) : np.searchsorted(levels, s, "right")]
        frontier = np.union1d(frontier, fresh[stages[fresh] == s])
        frontier = frontier[~done[frontier] & (allowed[frontier] <= left - s)]
        done[frontier] = True
        if not len(frontier):
            if s > levels.max(initial=-1):
                break
            continue
        rows, steps = np.nonzero(loads[frontier] <= limit)
        end = frontier[rows] + steps + 1
        new = stages[end] > s + 1
        end, begin = end[new], frontier[rows[new]]
        stages[end] = s + 1
        parent[end], kind[end] = begin, main
        frontier = np.unique(end)
        if stages[-1] == s + 1:
            break
    return stages


def _back(
    chain: CutChain,
    ends: dict[tuple[int, ...], tuple[Ints, Ints, Ints]],
    others: Sequence[int],
    main: int,
    used: tuple[int, ...],
    limit: float,
) -> CutPath:
    cuts, kinds = [chain.cuts - 1], []
    load = 0.0
    while cuts[-1] > 0:
        _, parent, kind = ends[used]
        end, c = cuts[-1], int(kind[cuts[-1]])
        begin = int(parent[end])
        load = max(load, float(chain.loads[c][begin, end - begin - 1]))
        if c != main:
            place = others.index(c)
            used = (*used[:place], used[place] - 1, *used[place + 1 :])
        cuts.append(begin)
        kinds.append(c)
    return CutPath(tuple(reversed(cuts)), tuple(reversed(kinds)), load)


def best(
    chain: CutChain,
    low: float,
    *,
    precision: float = 1e-7,
    late: Callable[[], bool] = lambda: False,
) -> tuple[CutPath | None, float]:
    """The best pipeline with loads ≤ `chain.reach`, and what the chain cannot stay below.

    `low`: a lower bound that is known already.  The bound is proved even when `late` ends the
    search; it is within `precision` (relative) of the pipeline's load otherwise.
    """
    found = within(chain, chain.reach)
    if found is None:
        return None, max(low, chain.reach)

    def attempt(limit: float) -> tuple[float, CutPath] | None:
        path = within(chain, limit)
        return None if path is None else (path.load, path)

    bound, _, better = smallest_threshold(attempt, low, found.load, exact=precision, late=late)
    found = better or found
    return found, min(bound, found.load)


@dataclass(frozen=True, slots=True)
class CostSteps:
    """Costs of values along a chain: `begin[i]` and `end[j]` are added to the cost of the
    stage from i to j, and so is every corner with corner_begin ≤ i and corner_end ≤ j."""

    begin: Floats  # [cut]
    end: Floats
    corner_begin: Ints
    corner_end: Ints
    corner_cost: Floats


def steps_of(cuts: int, value_of: Ints, at: Ints, costs: Floats) -> CostSteps:
    """The steps of values whose pins enter the chain for good: pin p is inside the cuts from
    `at[p]` on.  Pins are sorted by value, then by `at`."""
    begin, end = np.zeros(cuts + 1), np.zeros(cuts + 1)
    if not len(at):
        none = np.zeros(0, dtype=np.int64)
        return CostSteps(begin[:-1], end[:-1], none, none, np.zeros(0))
    cost = costs[value_of]
    same = value_of[1:] == value_of[:-1]
    first = np.concatenate(([True], ~same))
    last = np.concatenate((~same, [True]))
    np.add.at(begin, at, -cost)  # −Σ_{t≥1} A_t(c_i)
    np.add.at(end, at[first], cost[first])  # A_0·A_1(c_j)
    np.add.at(end, at[last], -cost[last])  # −A_{|e|}(c_j)
    inner_begin, inner_end = at[:-1][same], at[1:][same]  # A_t(c_i)·A_{t+1}(c_j)
    return CostSteps(
        np.cumsum(begin)[:-1],
        np.cumsum(end)[:-1],
        np.concatenate((inner_begin, at[first])),
        np.concatenate((inner_end, at[last])),
        np.concatenate((cost[:-1][same], cost[first])),  # and A_1(c_i)·A_{|e|}(c_j)
    )


def band_costs(steps: CostSteps, width: int) -> Floats:
    """[i, d]: what the values cost the stage from cut i to cut i + d + 1, for d < width.

    Entries beyond the last cut mean nothing.
    """
    cuts = len(steps.begin)
    begin, end = np.zeros(cuts + 1), np.zeros(cuts + width + 2)
    a, b, cost = steps.corner_begin, steps.corner_end, steps.corner_cost
    near = (b > a) & (b - a <= width)
    late = (b <= a) & (a < cuts)  # j ≥ i ≥ a ≥ b: a step of i alone
    np.add.at(begin, a[late], cost[late])
    early = (b > a) & ~near & (b < cuts)  # inside the band, j ≥ b means i ≥ a
    np.add.at(end, b[early], cost[early])
    flat = np.bincount(
        a[near] * width + (b - a)[near] - 1, weights=cost[near], minlength=cuts * width
    )
    table = flat[: cuts * width].astype(np.float64).reshape(cuts, width)
    np.cumsum(table, axis=1, out=table)
    for i in range(1, cuts):
        table[i, :-1] += table[i - 1, 1:]
        table[i, -1] += table[i - 1, -1]
    table += (steps.begin + np.cumsum(begin)[:-1])[:, None]
    ends = np.concatenate((steps.end + np.cumsum(end)[:cuts], np.zeros(width)))
    table += np.lib.stride_tricks.sliding_window_view(ends[1:], width)[:cuts]
    return table


def differences(prefix: Floats, width: int, beyond: float = np.inf) -> Floats:
    """[i, d]: prefix[i + d + 1] − prefix[i], `beyond` past the last cut."""
    padded = np.concatenate((prefix, np.full(width, beyond)))
    return np.asarray(
        np.lib.stride_tricks.sliding_window_view(padded[1:], width)[: len(prefix)] - prefix[:, None]
    )


def positions_of(order: Sequence[int] | Ints) -> Ints:
    place = np.empty(len(order), dtype=np.int64)
    place[np.asarray(order)] = np.arange(len(order))
    return place


def crossing(a: Arrays, place: Ints) -> Floats:
    """[t]: summed cost of the values that a cut before position t goes through."""
    first, last = spans(a, place)
    change = np.zeros(a.groups + 2)
    np.add.at(change, first + 1, a.costs)
    np.add.at(change, last + 1, -a.costs)
    return np.cumsum(change)[: a.groups + 1]


def spans(a: Arrays, place: Ints) -> tuple[Ints, Ints]:
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
    """Number of cuts ahead at which a stage of at most `limit` least seconds can end."""
    lowest = np.minimum.accumulate(work[::-1])[::-1]
    ends = np.searchsorted(lowest, work + limit * (1 + 1e-9), side="right") - 1
    return max(1, int((ends - np.arange(len(work))).max()))


def linear_chain(a: Arrays, place: Ints, cuts: Ints, reach: float) -> CutChain:
    """The chain of the given positions (ascending, 0 and n among them) of an order."""
    count = len(cuts)
    block = np.searchsorted(cuts, place, side="right") - 1  # the block of every group
    keys = np.unique(a.value_of * count + block[a.pin_of])
    steps = steps_of(count, keys // count, keys % count + 1, a.costs)
    work = _prefix(block, a.least, count)
    width = reach_of(work, reach)
    moved = band_costs(steps, width)
    return chain_of(a, reach, moved, lambda amount: _prefix(block, amount, count), work[-1] - work)


def chain_of(
    a: Arrays,
    reach: float,
    moved: Floats,
    inside: Callable[[Floats], Floats],
    needs: Floats,
    slack: float = 0.0,
) -> CutChain:
    """The chain of cuts whose stages pay `moved` for values (inf: no stage).

    Args:
        inside: from an amount of each group to the sum of those inside each cut.
        slack: by which sums of sizes may exceed a limit, so that no stage that fits is lost.
    """
    width, sizes = moved.shape[1], inside(a.sizes)
    loads = []
    for c, kind in enumerate(a.classes):
        if not kind.count:
            loads.append(np.zeros((0, 0)))
            continue
        load = differences(inside(a.seconds[c]), width)
        if kind.transfers:
            load += moved
        else:
            load[np.isinf(moved)] = np.inf
        if a.barred[c].any():
            load[differences(inside(a.barred[c] * 1.0), width) > 0.5] = np.inf
        if kind.memory < sizes[-1]:
            load[differences(sizes, width) > kind.memory + slack] = np.inf
        loads.append(load)
    return CutChain(tuple(loads), tuple(kind.count for kind in a.classes), reach, needs)


def _prefix(block: Ints, amount: Floats, cuts: int) -> Floats:
    total = np.bincount(block, weights=amount, minlength=cuts - 1)
    return np.concatenate(([0.0], np.cumsum(total)))
