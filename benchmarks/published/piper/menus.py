"""Piper's problem as columns, lower bounds, and the choices of variants that are not dominated.

There is one `Menu` for each tensor-parallel degree (and group of widths).  The variants of
a stage's nodes add up to points, an array of three rows: seconds for the whole batch, bytes for
each further microbatch in flight, and bytes with one in flight.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.piper_model import MenuNode, MenuProblem, NodeVariant

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Items:
    """A node's variants that are not dominated, for one degree and one group of widths.

    `seconds` are those of the whole batch on one replica, i.e. d times the seconds per sample,
    with what is resent of the weights where variants differ in it.  A stage with y microbatches
    in flight needs first + moving·(y − 1) bytes.
    """

    positions: tuple[int, ...]  # in the node's list of variants
    seconds: Floats
    moving: Floats
    first: Floats
    entering: tuple[tuple[int, Floats], ...]  # (source, bytes by variant beyond the least)
    leaving: tuple[tuple[int, Floats], ...]  # (target, …)


@dataclass(frozen=True, slots=True)
class Menu:
    """Stages of one tensor-parallel degree whose data-parallel degree is one of `widths`.

    `entering[e]` and `leaving[e]`: bytes, both directions of training, at the stage that holds the
    target (source) of edge e when it is cut.  `resent[v]`: d·seconds for each replica beyond the
    first.
    """

    degree: int
    widths: tuple[int, ...]
    items: tuple[Items | None, ...]
    entering: Floats
    leaving: Floats
    resent: Floats

    @property
    def uneven(self) -> bool:
        """Variants of one node differ in what they add to an edge that leaves the stage."""
        return any(item is not None and item.leaving for item in self.items)


def menus(problem: MenuProblem) -> list[Menu]:
    """All menus; a degree whose variants differ in weights has one for each width."""
    snap = _snap(problem)
    found = []
    for degree in sorted({t for node in problem.nodes for t in node.variants}):
        widths = divisors(problem.batch, problem.devices // degree)
        if not widths:
            continue
        lists = [_undominated(node, degree) for node in problem.nodes]
        weights = [{v.parameter_bytes for _, v in variants} for variants in lists]
        split = any(len(sizes) > 1 for sizes in weights)
        for group in [(d,) for d in widths] if split else [widths]:
            found.append(_menu(problem, degree, group, lists, snap))
    return found


def divisors(number: int, most: int) -> tuple[int, ...]:
    """Divisors of `number` up to `most`, ascending."""
    return tuple(d for d in range(1, min(number, most) + 1) if number % d == 0)


def _menu(
    problem: MenuProblem,
    degree: int,
    widths: tuple[int, ...],
    lists: list[list[tuple[int, NodeVariant]]],
    snap: Callable[[float], float],
) -> Menu:
    n = len(problem.nodes)
    entering = np.array([2 * edge.bytes for edge in problem.edges], dtype=np.float64)
    leaving = entering.copy()
    resent = np.zeros(n)
    again = 4 / (problem.batch * problem.bytes_per_second)
    ins: list[list[int]] = [[] for _ in range(n)]
    outs: list[list[int]] = [[] for _ in range(n)]
    for e, edge in enumerate(problem.edges):
        ins[edge.target].append(e)
        outs[edge.source].append(e)
    items: list[Items | None] = []
    for v, variants in enumerate(lists):
        if not variants:
            items.append(None)
            continue
        chosen = [variant for _, variant in variants]
        extra: list[list[tuple[int, Floats]]] = [[], []]
        for e in ins[v]:
            u = problem.edges[e].source
            sync = np.array([2 * c.sync_forward.get(u, 0.0) for c in chosen])
            entering[e] += sync.min()
            if sync.max() > sync.min():
                extra[0].append((u, sync - sync.min()))
        for e in outs[v]:
            w = problem.edges[e].target
            sync = np.array([2 * c.sync_backward.get(w, 0.0) for c in chosen])
            leaving[e] += sync.min()
            if sync.max() > sync.min():
                extra[1].append((w, sync - sync.min()))
        seconds = np.array([c.seconds for c in chosen])
        weights = np.array([c.parameter_bytes for c in chosen])
        if weights.max() > weights.min():
            seconds = seconds + (widths[0] - 1) * again * weights
        else:
            resent[v] = again * weights[0]
        items.append(
            Items(
                tuple(position for position, _ in variants),
                seconds,
                np.array([snap(c.moving_bytes) for c in chosen]),
                np.array([snap(c.moving_bytes + c.fixed_bytes) for c in chosen]),
                tuple(extra[0]),
                tuple(extra[1]),
            )
        )
    return Menu(degree, widths, tuple(items), entering, leaving, resent)


def _undominated(node: MenuNode, degree: int) -> list[tuple[int, NodeVariant]]:
    """Variants that no other one equals or beats in everything that counts."""
    variants = list(enumerate(node.variants.get(degree, ())))
    figures = [
        (
            v.seconds,
            v.parameter_bytes,
            v.moving_bytes,
            v.moving_bytes + v.fixed_bytes,
            *(v.sync_forward[u] for u in sorted(v.sync_forward)),
            *(v.sync_backward[w] for w in sorted(v.sync_backward)),
        )
        for _, v in variants
    ]
    kept = []
    for i, mine in enumerate(figures):
        beaten = any(
            all(a <= b for a, b in zip(other, mine, strict=True)) and (other != mine or j < i)
            for j, other in enumerate(figures)
            if j != i
        )
        if not beaten:
            kept.append(variants[i])
    return kept


def _snap(problem: MenuProblem) -> Callable[[float], float]:
    """Rounds bytes to a power of two that makes every sum of them exact.

    Integers below 2^52 in sum stay as they are.  Without it, equal sums of fractions in unequal
    order would differ in the last digit, and none would dominate the other.
    """
    total = math.fsum(
        max(v.moving_bytes + v.fixed_bytes for vs in node.variants.values() for v in vs)
        for node in problem.nodes
    )
    quantum = 2.0 ** (math.ceil(math.log2(total)) - 52) if total > 0 else 1.0
    return lambda number: round(number / quantum) * quantum


def device_seconds(problem: MenuProblem) -> float:
    """A threshold below which K devices cannot hold and compute all nodes; inf: never.

    A stage with load at most T takes d·t ≥ t·Σ seconds/T devices, and d·t ≥ t·Σ bytes/limit ones
    (d ≥ 1; at least one microbatch is in flight).  So K ≥ Σ over the nodes of the least, over
    degrees and variants, of t·(α·seconds/T + (1 − α)·bytes/limit), for every α from 0 to 1.
    """
    if any(min(node.variants) > problem.devices for node in problem.nodes):
        return math.inf
    fit = problem.devices * (1 + 1e-9)

    def needs(weight: float, threshold: float) -> float:
        return math.fsum(weighted(problem, weight, threshold))

    if needs(0.0, 1.0) > fit:
        return math.inf
    best = needs(1.0, 1.0) / fit
    for weight in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
        # Double the threshold until the devices suffice; then halve the interval.
        low, high = best, best
        while high > 0 and needs(weight, high) > fit and high < 1e300:
            low, high = high, 2 * high
        if low == high:
            continue
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if needs(weight, middle) > fit else (low, middle)
        best = max(best, low)
    return best


def weighted(problem: MenuProblem, weight: float, threshold: float) -> Floats:
    """[node] the least of t·(weight·seconds/threshold + (1 − weight)·bytes/limit)."""
    found = np.zeros(len(problem.nodes))
    for v, node in enumerate(problem.nodes):
        found[v] = min(
            degree
            * (
                weight * variant.seconds / threshold
                + (1 - weight) * (variant.moving_bytes + variant.fixed_bytes) / problem.memory_bytes
            )
            for degree, variants in node.variants.items()
            if degree <= problem.devices
            for variant in variants
        )
    return found


def heaviest_alone(problem: MenuProblem) -> tuple[int, float] | None:
    """The node that needs most bytes by itself, and how many, if that is above the limit."""
    worst: tuple[int, float] | None = None
    for v, node in enumerate(problem.nodes):
        least = min(
            (
                variant.moving_bytes + variant.fixed_bytes
                for degree, variants in node.variants.items()
                if degree <= problem.devices
                for variant in variants
            ),
            default=math.inf,
        )
        if least > problem.memory_bytes and (worst is None or least > worst[1]):
            worst = (v, least)
    return worst


EMPTY: Floats = np.zeros((3, 1))


def extend(points: Floats, options: Floats, limit: float, seconds: float) -> Floats:
    """Every point with every option of one more node, as far as it can still be part of a stage.

    `limit` on the bytes with one microbatch in flight, `seconds` on the seconds.
    """
    merged = (points[:, :, None] + options[:, None, :]).reshape(3, -1)
    merged = merged[:, (merged[2] <= limit) & (merged[0] <= seconds)]
    return pareto(merged) if options.shape[1] > 1 else merged


def pareto(points: Floats) -> Floats:
    """Those that no other one equals or beats in all three; ascending seconds."""
    if points.shape[1] < 2:
        return points
    points = points[:, np.lexsort((points[2], points[1], points[0]))]
    _, moving, first = points
    if first.min() == first.max():
        return points[:, _falling(moving)]
    if len(first) <= 400:
        beats = (moving[:, None] <= moving) & (first[:, None] <= first)
        return points[:, ~np.triu(beats, 1).any(axis=0)]
    # Sweep: a staircase of the (moving, first) seen so far, moving ascending, first descending.
    keep = []
    xs: list[float] = []
    ys: list[float] = []
    for i, (x, y) in enumerate(zip(moving.tolist(), first.tolist(), strict=True)):
        at = bisect.bisect_right(xs, x)
        if at and ys[at - 1] <= y:
            continue
        keep.append(i)
        start = bisect.bisect_left(xs, x)
        stop = start
        while stop < len(xs) and ys[stop] >= y:
            stop += 1
        xs[start:stop] = [x]
        ys[start:stop] = [y]
    return points[:, keep]


def thin(points: Floats, most: int) -> Floats:
    """Points, at most `most` of them, evenly spaced in the order of seconds, with both ends."""
    count = points.shape[1]
    if count <= most:
        return points
    return points[:, np.unique(np.linspace(0, count - 1, most).astype(np.int64))]


def flights_within(limit: float, moving: Floats, first: Floats, most: int) -> Floats:
    """Most microbatches in flight that fit into `limit` bytes, at most `most`; 0: none."""
    if math.isinf(limit):
        return np.full(moving.shape, float(most))
    with np.errstate(divide="ignore", invalid="ignore"):
        more = np.where(moving > 0, np.floor((limit - first) / moving), float(most))
    return np.where(first <= limit, np.minimum(1 + more, most), 0.0)


def stairs(points: Floats, limit: float, most: int) -> tuple[Floats, Floats]:
    """(seconds ascending, microbatches in flight that fit, ascending), at most `most` each."""
    seconds, moving, first = points
    order = np.argsort(seconds, kind="stable")
    seconds, moving, first = seconds[order], moving[order], first[order]
    flights = flights_within(limit, moving, first, most)
    rising = np.flatnonzero(_falling(-flights))
    rising = rising[flights[rising] >= 1]
    return seconds[rising], flights[rising]


def pick(options: list[Floats], limit: float, flights: int, most: int) -> list[int] | None:
    """The fastest choice of one column of each, at `flights` microbatches; None: none fits.

    Exact while there are at most `most` pairs of (seconds, bytes) that are not dominated.
    """
    seconds, held = np.zeros(1), np.zeros(1)
    trail: list[tuple[NDArray[np.int64], int]] = []
    for option in options:
        cost = option[2] + option[1] * (flights - 1)
        width = len(cost)
        time = (seconds[:, None] + option[0]).ravel()
        size = (held[:, None] + cost).ravel()
        order = np.lexsort((size, time))
        order = order[size[order] <= limit]
        order = order[_falling(size[order])] if len(order) else order
        if len(order) > most:
            order = order[np.unique(np.linspace(0, len(order) - 1, most).astype(np.int64))]
        if not len(order):
            return None
        trail.append((order, width))
        seconds, held = time[order], size[order]
    at = 0
    chosen = []
    for order, width in reversed(trail):
        at, column = divmod(int(order[at]), width)
        chosen.append(column)
    return chosen[::-1]


def _falling(values: Floats) -> NDArray[np.bool_]:
    """Mask of the values that are below all before it."""
    if not len(values):
        return np.zeros(0, dtype=np.bool_)
    least = np.minimum.accumulate(values)
    result: NDArray[np.bool_] = np.r_[True, values[1:] < least[:-1]]
    return result
