"""The best pipeline whose stages are intervals of a given linear order of the groups.

The load of all intervals at once takes O(n² + pins) steps: a value is paid by an interval that
lies in none of the gaps between its pins and does not hold all of them, and both are sums over a
quadrant of a table with one entry a gap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.published.placement.integers import NEVER, Integers, Ints, integers
from pdcompile.passes.published.placement.loads import Placement, objective
from pdcompile.passes.published.placement_file import LoadProblem


def best_linear(
    problem: LoadProblem, orders: Iterable[Sequence[int]], *, budget: Budget | None = None
) -> tuple[float, Placement | None]:
    """(objective, placement), the best over all orders; (inf, None) when none has one.

    Each order must be topological.  With a budget, at least the first order is tried.
    """
    tables = Intervals(problem)
    best: tuple[float, Placement | None] = (math.inf, None)
    for order in orders:
        found = tables.best(order)
        if found is not None:
            value = objective(problem, found)
            if value < best[0]:
                best = value, found
        if budget is not None and budget.late:
            break
    return best


class Intervals:
    """Loads of the intervals of an order, and the best chain of them."""

    def __init__(self, problem: LoadProblem) -> None:
        self.problem = problem
        self.ints: Integers = integers(problem)
        self.n = len(problem.sizes)
        counts = [len(pins) for pins in problem.pins]
        self.flat = np.array([v for pins in problem.pins for v in pins], dtype=np.int64)
        self.value_of = np.repeat(np.arange(len(counts)), counts)
        self.last = np.cumsum(np.array(counts, dtype=np.int64)) - 1
        self.first = self.last - np.array(counts, dtype=np.int64) + 1

    def transfers(self, place: Ints) -> Ints:
        """[i, j]: the summed cost of the values that the interval i ≤ place < j pays."""
        n, costs = self.n, self.ints.costs
        table = np.zeros((n + 1, n + 1), dtype=np.int64)
        if not len(costs):
            return table
        at = place[self.flat]
        at = at[np.lexsort((at, self.value_of))]
        lows, highs = at[self.first], at[self.last]
        inner = np.ones(len(at), dtype=np.bool_)
        inner[self.first] = False
        # Untouched: i ≥ low and j ≤ high for a gap (low, high) before, between, after the pins.
        low = np.concatenate([np.zeros_like(lows), at[np.roll(inner, -1)] + 1, highs + 1])
        high = np.concatenate([lows, at[inner], np.full_like(highs, n)])
        cost = np.concatenate([costs, costs[self.value_of[inner]], costs])
        np.add.at(table, (low, high), cost)
        table = np.cumsum(table, axis=0)
        table = np.cumsum(table[:, ::-1], axis=1)[:, ::-1]
        whole = np.zeros((n + 1, n + 1), dtype=np.int64)
        np.add.at(whole, (lows, highs + 1), costs)
        whole = np.cumsum(whole[::-1], axis=0)[::-1]
        table = table + np.cumsum(whole, axis=1)
        return np.asarray(costs.sum() - table, dtype=np.int64)

    def loads(self, order: Sequence[int]) -> list[Ints]:
        """[class][i, j]: the load of interval [i, j), NEVER where it cannot be a stage."""
        n, ints = self.n, self.ints
        chosen = np.array(order, dtype=np.int64)
        place = np.empty(n, dtype=np.int64)
        place[chosen] = np.arange(n)
        moved = self.transfers(place)
        held = _differences(ints.sizes[chosen])
        below = np.tri(n + 1, k=-1, dtype=np.bool_)
        tables = []
        for c, kind in enumerate(self.problem.classes):
            table = _differences(ints.seconds[c][chosen])
            if kind.transfers:
                table = table + moved
            wrong = below
            if not ints.supported[c].all():
                wrong = wrong | (_differences((~ints.supported[c][chosen]).astype(np.int64)) > 0)
            if (limit := ints.limits[c]) is not None:
                wrong = wrong | (held > limit)
            table[wrong] = NEVER
            np.fill_diagonal(table, 0)
            tables.append(table)
        return tables

    def best(self, order: Sequence[int]) -> Placement | None:
        """The chain of intervals with the smallest largest load, None when there is no chain.

        Dynamic program over (devices used of each class, groups placed), so that every
        sequence of classes along the pipeline is covered.
        """
        n = self.n
        tables = self.loads(order)
        counts = [min(kind.count, n) for kind in self.problem.classes]
        start = np.full(n + 1, NEVER, dtype=np.int64)
        start[0] = 0
        value: dict[tuple[int, ...], Ints] = {(0,) * len(counts): start}
        came: dict[tuple[int, ...], tuple[Ints, Ints]] = {}
        for state in itertools.product(*(range(count + 1) for count in counts)):
            if state in value:
                continue
            least = np.full(n + 1, 2 * NEVER, dtype=np.int64)
            cut, kind = np.zeros(n + 1, dtype=np.int64), np.zeros(n + 1, dtype=np.int64)
            for c, table in enumerate(tables):
                if not state[c]:
                    continue
                previous = value[_less(state, c)]
                reached = np.maximum(previous[:, None], table)
                where = reached.argmin(axis=0)
                found = reached[where, np.arange(n + 1)]
                better = found < least
                least = np.where(better, found, least)
                cut = np.where(better, where, cut)
                kind = np.where(better, c, kind)
            value[state], came[state] = least, (cut, kind)
        state = tuple(counts)
        if value[state][n] >= NEVER:
            return None
        stages: list[tuple[int, int, int]] = []
        j = n
        while any(state):
            cut, kind = came[state]
            i, c = int(cut[j]), int(kind[j])
            if i < j:
                stages.append((i, j, c))
            state, j = _less(state, c), i
        stages.reverse()
        stage_of = [0] * n
        for s, (i, j, _) in enumerate(stages):
            for v in order[i:j]:
                stage_of[v] = s
        return Placement(tuple(stage_of), tuple(c for _, _, c in stages))


def _less(state: tuple[int, ...], c: int) -> tuple[int, ...]:
    return (*state[:c], state[c] - 1, *state[c + 1 :])


def _differences(values: Ints) -> Ints:
    """[i, j]: the sum of values[i:j] (negative below the diagonal)."""
    sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])
    return np.asarray(sums[None, :] - sums[:, None], dtype=np.int64)
