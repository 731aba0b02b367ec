"""Which variants a stage's nodes take: sums of (seconds, moving, first) that are not dominated.

A set of points is an array of three rows: seconds for the whole batch, bytes for each further
microbatch in flight, and bytes with one in flight.
"""

from __future__ import annotations

import bisect
import math

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.published.piper.model import Floats

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
    """At most `most` of them, evenly spaced in the order of seconds, both ends among them."""
    count = points.shape[1]
    if count <= most:
        return points
    return points[:, np.unique(np.linspace(0, count - 1, most).astype(np.int64))]


def stairs(points: Floats, limit: float, most: int) -> tuple[Floats, Floats]:
    """(seconds ascending, microbatches in flight that fit, ascending), at most `most` each."""
    seconds, moving, first = points
    order = np.argsort(seconds, kind="stable")
    seconds, moving, first = seconds[order], moving[order], first[order]
    if math.isinf(limit):
        flights = np.full(len(seconds), float(most))
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            more = np.where(moving > 0, np.floor((limit - first) / moving), float(most))
        flights = np.where(first <= limit, np.minimum(1 + more, most), 0.0)
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
    """Where a value is below all before it."""
    if not len(values):
        return np.zeros(0, dtype=np.bool_)
    least = np.minimum.accumulate(values)
    result: NDArray[np.bool_] = np.r_[True, values[1:] < least[:-1]]
    return result
