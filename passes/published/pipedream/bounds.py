"""Bounds when there are too many down-closed sets to list: a relaxation over buckets of work.

Every set H falls into the bucket of its work W(H).  A node v with more work at and below it than
the bucket's upper end is in none of the bucket's sets, one with less work outside it and what is
above it than the lower end is in all of them; a bucket where some node is both is empty, which is
how indivisible layers show.  What is surely in one bucket's sets and surely not in another's
lies between them, so segments between buckets have lower bounds for work, parameters and
boundaries, and the same recursion over buckets bounds every plan from below.  Stages between
two sets of one bucket are left out: without them a plan of buckets is only cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.published.pipedream.closures import least_boundaries, ranges
from pdcompile.passes.published.pipedream.recursion import Level
from pdcompile.passes.published.pipedream.search import operations
from pdcompile.passes.published.pipedream.states import Dag, Floats, Segments, membership

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


def relaxation(dag: Dag, levels: Sequence[Level]) -> Segments:
    """Lower bounds of all segments between buckets, as many as their search affords."""
    counts = [level.count for level in levels]
    size = BUCKETS
    while size > 50 and operations(size, counts, levels[0].straight) > AFFORDABLE:
        size = size * 9 // 10
    return bounded_segments(dag, size)


def bounded_segments(dag: Dag, size: int) -> Segments:
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
    return Segments(
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
