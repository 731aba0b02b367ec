"""The best pipeline whose cuts all belong to one chain of cuts.

The smallest number of stages up to every cut, with all loads at most T, is a breadth-first
search, and each cut is expanded once; bisection finds the smallest T that fits the devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pdcompile.passes.published.placement.large.arrays import Floats, Ints

NEVER = 1 << 40
TOLERANCE = 1e-9
MANY = 64  # combinations of devices of the smaller classes that are told apart


@dataclass(frozen=True, slots=True)
class Chain:
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
class Path:
    """Cuts of a pipeline, from the empty set to everything, and the class of each stage."""

    cuts: tuple[int, ...]
    kinds: tuple[int, ...]
    load: float


def combinations(counts: Sequence[int]) -> int:
    """How many numbers of used devices of the smaller classes there are."""
    return math.prod(count + 1 for count in counts) // (max(counts, default=0) + 1)


def within(chain: Chain, limit: float) -> Path | None:
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
    chain: Chain, c: int, limit: float, stages: Ints, start: Ints, parent: Ints, kind: Ints
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
    chain: Chain,
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
    chain: Chain,
    ends: dict[tuple[int, ...], tuple[Ints, Ints, Ints]],
    others: Sequence[int],
    main: int,
    used: tuple[int, ...],
    limit: float,
) -> Path:
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
    return Path(tuple(reversed(cuts)), tuple(reversed(kinds)), load)


def best(
    chain: Chain,
    low: float,
    *,
    precision: float = 1e-7,
    late: Callable[[], bool] = lambda: False,
) -> tuple[Path | None, float]:
    """The best pipeline with loads ≤ `chain.reach`, and what the chain cannot stay below.

    `low`: a lower bound that is known already.  The bound is proved even when `late` ends the
    search; it is within `precision` (relative) of the pipeline's load otherwise.
    """
    found = within(chain, chain.reach)
    if found is None:
        return None, max(low, chain.reach)
    bound, turn = low, 0
    while bound < found.load * (1 - precision) and not late():
        # The bound is often sharp, or the pipeline is: look just beside them now and then.
        width = found.load - bound
        share = (0.5, 0.5, 0.5)[turn % 3]
        guess = bound + share * width
        turn += 1
        better = within(chain, guess)
        if better is None:
            bound = guess
        else:
            found = better
    return found, min(bound, found.load)
