"""Bounds when there are too many down-closed sets to list: a relaxation over buckets of work.

Every set H falls into the bucket of its work W(H).  A node v with more work at and below it than
the bucket's upper end is in none of the bucket's sets, one with less work outside it and what is
above it than the lower end is in all of them; a bucket where some node is both is empty, which is
how indivisible layers show.  What is surely in one bucket's sets and surely not in another's
lies between them, so segments between buckets have lower bounds for work, parameters and
boundaries, and the same recursion over buckets bounds every plan from below.  Stages between
two sets of one bucket are left out: without them a plan of buckets is only cheaper.

Extremes over all down-closed sets between what is inside and outside are minimum cuts: the source's
side is the set, and an arc without limit from a node to each of its inputs keeps it down-closed
(maximum closure, Picard 1976).  Weights become integers in the direction that keeps every result
a valid bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.pipedream.level_tables import PricedLevel
from benchmarks.published.pipedream.nested_stages import operations
from benchmarks.published.pipedream.profile_cuts import CutSegments, Dag, Floats, membership
from pdcompile.passes.partition.lattice import members

BUCKETS = 800
AFFORDABLE = 2.5e9  # nanoseconds of one core, roughly
ROUNDING = 1e-10  # of all work: sums in another order stay within it

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Buckets:
    low: Floats  # seconds of work
    high: Floats
    inside: Flags  # [bucket, node]: the node is in all of its sets
    outside: Flags  # the node is in none of them


def relaxation(dag: Dag, levels: Sequence[PricedLevel]) -> CutSegments:
    """Lower bounds of all segments between buckets, as many as their search affords."""
    counts = [level.count for level in levels]
    size = BUCKETS
    while size > 50 and operations(size, counts, levels[0].straight) > AFFORDABLE:
        size = size * 9 // 10
    return bounded_segments(dag, size)


def bounded_segments(dag: Dag, size: int) -> CutSegments:
    """Lower bounds of all segments between up to about `size` buckets."""
    buckets = _merge(dag, _atoms(dag, size), size)
    before, behind = buckets.outside.astype(float), buckets.inside.astype(float)
    between = (before * dag.seconds) @ behind.T
    slack = ROUNDING * float(dag.seconds.sum())
    spread = buckets.low[None, :] - buckets.high[:, None] - slack
    nested = np.triu(np.ones_like(between, bool), 1)
    seconds = np.where(nested, np.maximum(np.maximum(spread, between), 0), np.inf)
    seconds[0, -1] = float(dag.seconds.sum())
    amounts = []
    for weights in (dag.parameters, dag.parameters + dag.activations):
        least, most = ranges(
            dag, weights, buckets.inside, buckets.outside, buckets.low, buckets.high
        )
        sure = (before * weights) @ behind.T
        amounts.append(np.where(nested, np.maximum(sure, least[None, :] - most[:, None]), 0))
    return CutSegments(
        seconds, amounts[0], amounts[1], least_boundaries(dag, buckets.inside, buckets.outside)
    )


def _atoms(dag: Dag, size: int) -> _Buckets:
    """Stretches of work between the points where some node becomes sure; empty ones left out."""
    down = membership(dag, [dag.ancestors[v] | 1 << v for v in range(dag.size)])
    up = membership(dag, [dag.descendants[v] | 1 << v for v in range(dag.size)])
    total = float(dag.seconds.sum())
    least = down @ dag.seconds  # work of a set that holds the node, at least
    most = total - up @ dag.seconds  # work of a set that does not, at most
    slack = ROUNDING * total
    points = np.unique(np.clip(np.concatenate([least, most, [0, total]]), 0, total))
    groups = np.split(points, np.flatnonzero(np.diff(points) > 4 * slack) + 1)
    stretches: list[tuple[float, float]] = []
    for here, group in enumerate(groups):
        stretches.append((group[0] - slack, group[-1] + slack))
        if here + 1 < len(groups):
            start, end = group[-1] + slack, groups[here + 1][0] - slack
            pieces = max(1, round(float(end - start) / total * size))
            ends = np.linspace(start, end, pieces + 1)
            stretches.extend(pairwise(ends))
    low, high = np.array(stretches).T
    inside = most[None, :] < low[:, None] - slack / 2
    outside = least[None, :] > high[:, None] + slack / 2
    some = ~(inside & outside).any(axis=1)
    return _Buckets(low[some], high[some], inside[some], outside[some])


def _merge(dag: Dag, atoms: _Buckets, size: int) -> _Buckets:
    """Neighbouring atoms together, as far as work and parameters stay close; both ends added."""
    total = max(float(dag.seconds.sum()), 1e-300)
    heavy = max(float(dag.parameters.sum()), 1e-300)
    sure = atoms.inside @ dag.parameters / heavy
    place = (atoms.low + atoms.high) / 2 / total + sure
    width = 2.0 / size
    while True:
        starts = [0]
        for here in range(1, len(place)):
            if place[here] - place[starts[-1]] > width:
                starts.append(here)
        if len(starts) <= size:
            break
        width *= 1.1
    nodes = dag.size
    ends = np.array([*starts[1:], len(place)]) - 1
    inside = np.minimum.reduceat(atoms.inside, starts, axis=0)
    outside = np.minimum.reduceat(atoms.outside, starts, axis=0)
    work = float(dag.seconds.sum())
    return _Buckets(
        low=np.concatenate([[0.0], atoms.low[starts], [work]]),
        high=np.concatenate([[0.0], atoms.high[ends], [work]]),
        inside=np.concatenate([np.zeros((1, nodes), bool), inside, np.ones((1, nodes), bool)]),
        outside=np.concatenate([np.ones((1, nodes), bool), outside, np.zeros((1, nodes), bool)]),
    )


_WHOLE = 2**40  # all of a weight, as an integer
_INFINITE = 2**50
_NOTHING = 1e-100  # sums below it are not worth a bound, and quotients with them overflow
_STEPS = 4  # prices of work that are tried for one range


def least_boundaries(dag: Dag, inside: Flags, outside: Flags) -> Floats:
    """[bucket] -> bytes that PipeDream counts at every cut between inside and outside, at least.

    A value p whose consumers' histories first come together in one node j (a single consumer is
    its own j) is counted in every set that holds p but not j: either a consumer is missing, or p
    is augmented to a maximal node below j that has not seen all consumers.  Without such a j, p
    is counted while a consumer is missing.  The first and the last bucket are the two ends: 0.
    """
    largest = float(dag.activations.sum())
    cut = np.zeros(len(inside))
    if largest <= _NOTHING:
        return cut
    weights = np.floor(dag.activations * (_WHOLE / largest)).astype(np.int64)
    source, sink = dag.size, dag.size + 1
    extra = sink + 1
    arcs: list[tuple[int, int, int]] = [(source, sink, 0)]
    for p in range(dag.size):
        arcs.extend((v, p, _INFINITE) for v in members(dag.after[p]))
        meeting = _meeting(dag, p) if dag.after[p] else sink
        if meeting is not None:
            arcs.append((p, meeting, int(weights[p])))
        else:
            arcs.append((p, extra, int(weights[p])))
            arcs.extend((extra, v, _INFINITE) for v in members(dag.after[p]))
            extra += 1
    tails, heads, capacities = np.array(arcs, np.int64).T
    for b in range(1, len(cut) - 1):
        within, without = np.flatnonzero(inside[b]), np.flatnonzero(outside[b])
        flow = _flow()
        flow.add_arcs_with_capacity(
            np.concatenate([tails, np.full(len(within), source), without]),
            np.concatenate([heads, within, np.full(len(without), sink)]),
            np.concatenate([capacities, np.full(len(within) + len(without), _INFINITE)]),
        )
        if flow.solve(source, sink) == flow.OPTIMAL:
            cut[b] = min(flow.optimal_flow(), _WHOLE) * (largest / _WHOLE)
    return cut


def _flow() -> Any:
    from ortools.graph.python import max_flow  # type: ignore[import-untyped]

    return max_flow.SimpleMaxFlow()


def _meeting(dag: Dag, node: int) -> int | None:
    """The one first node whose history holds all consumers, if there is one."""
    shared = dag.everything
    for v in members(dag.after[node]):
        shared &= dag.descendants[v] | 1 << v
    first = [v for v in members(shared) if not dag.before[v] & shared]
    return first[0] if len(first) == 1 else None


def ranges(
    dag: Dag, amounts: Floats, inside: Flags, outside: Flags, low: Floats, high: Floats
) -> tuple[Floats, Floats]:
    """[bucket] -> sum of `amounts` over its sets, at least and at most, given their work.

    Lagrangian bounds: with a price on work, the least of A(H) − price·(W(H) − low) is no more
    than A(H) for any H with W(H) ≥ low; mirrored for the most.
    """
    edges = np.array(
        [(v, p) for p in range(dag.size) for v in members(dag.after[p])], np.int64
    ).reshape(-1, 2)
    least = inside @ amounts
    most = (~outside) @ amounts
    for b in range(len(low)):
        open_nodes = ~inside[b] & ~outside[b]
        if not open_nodes.any() or not most[b] > least[b]:
            continue
        part = _Part(dag, amounts, open_nodes, edges)
        base, work = float(least[b]), float(inside[b] @ dag.seconds)
        least[b] = base + part.least(float(low[b]) - work)
        most[b] = base + part.most(float(high[b]) - work)
    return least, most


class _Part:
    """The nodes that are in some of a bucket's sets and not in others."""

    def __init__(
        self, dag: Dag, amounts: Floats, open_nodes: Flags, edges: NDArray[np.int64]
    ) -> None:
        number = np.cumsum(open_nodes) - 1
        kept = edges[open_nodes[edges[:, 0]] & open_nodes[edges[:, 1]]]
        self.size = int(open_nodes.sum())
        self.tails, self.heads = number[kept[:, 0]], number[kept[:, 1]]
        self.work = dag.seconds[open_nodes]
        self.amounts = amounts[open_nodes]

    def least(self, work: float) -> float:
        """The least amount of a set with at least this work, bounded from below."""
        best = 0.0
        price = self._price()
        if price is None:
            return best
        for _ in range(_STEPS):
            value, chosen = self._closure(self.amounts - price * self.work)
            best = max(best, value + price * work)
            price *= 1.5 if float(self.work[chosen].sum()) < work else 1 / 1.5
        return best

    def most(self, work: float) -> float:
        """The most amount of a set with at most this work, bounded from above."""
        best = float(self.amounts.sum())
        price = self._price()
        if price is None:
            return best
        for _ in range(_STEPS):
            value, chosen = self._closure(price * self.work - self.amounts)
            best = min(best, price * work - value)
            price *= 1.5 if float(self.work[chosen].sum()) > work else 1 / 1.5
        return best

    def _price(self) -> float | None:
        """Amount for a second of work, on average; None when one of them is nothing."""
        amount, work = float(self.amounts.sum()), float(self.work.sum())
        return amount / work if min(amount, work) > _NOTHING else None

    def _closure(self, weights: Floats) -> tuple[float, NDArray[np.int64]]:
        """A lower bound of the least weight of a down-closed set, and a set that reaches it."""
        unit = max(float(np.abs(weights).sum()), _NOTHING) / _WHOLE
        rounded = np.floor(weights / unit).astype(np.int64)
        wanted, unwanted = np.flatnonzero(rounded < 0), np.flatnonzero(rounded > 0)
        source, sink = self.size, self.size + 1
        flow = _flow()
        flow.add_arcs_with_capacity(
            np.concatenate(
                [self.tails, np.full(len(wanted), source), unwanted, np.array([source])]
            ),
            np.concatenate([self.heads, wanted, np.full(len(unwanted), sink), np.array([sink])]),
            np.concatenate(
                [
                    np.full(len(self.tails), _INFINITE),
                    -rounded[wanted],
                    rounded[unwanted],
                    np.array([0]),
                ]
            ),
        )
        if flow.solve(source, sink) != flow.OPTIMAL:  # pragma: no cover
            return float(weights[weights < 0].sum()), np.arange(self.size)
        value = flow.optimal_flow() + int(rounded[wanted].sum())
        side = np.array(flow.get_source_side_min_cut(), np.int64)
        return value * unit, side[side < self.size]
