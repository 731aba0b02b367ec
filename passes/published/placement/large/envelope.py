"""How little a cut through part of a graph costs, as a convex function of the work inside it.

For a slope λ, the smallest cost(J) − λ·work(J) over the sets J is one minimum cut; it says that
cost(J) ≥ λ·work(J) + that, for every J.  Slopes are taken between the extreme sets found so far
(Eisner and Severance 1976), until a new slope finds no set below the line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdcompile.passes.published.placement.large.arrays import Floats, Ints

UNITS = 2.0**40  # integer capacities: of the sum of everything
MOST_LINES = 24


@dataclass(frozen=True, slots=True)
class Part:
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

    def __init__(self, part: Part, *, closed: bool) -> None:
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


def lines(part: Part, *, closed: bool, late: Callable[[], bool] = lambda: False) -> Lines:
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
