"""Op times at any microbatch size from measurements at two or three: seconds = α + β·work.

Work is what the roofline says of the op at that size, so that a product of matrices, a copy and
an op that does not depend on the microbatch each follow a straight line.  One line is fitted for
each kind of op (equal structural keys at every measured size), forward and backward apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdcompile.ir.graph import OpGraph
from pdcompile.passes.costs import Call, Index, Machine, calibrate, seconds
from pdcompile.passes.profile.keys import structural_key
from pdcompile.passes.profile.store import Entry, Profile

LEAST_SECONDS = 1e-9  # what counts as no time at all, so that errors can be relative


@dataclass(frozen=True, slots=True)
class Line:
    """``alpha_seconds + beta * work``, neither below 0; work in seconds of the roofline."""

    alpha_seconds: float
    beta: float

    def at(self, work: float) -> float:
        """Seconds for that much work."""
        return self.alpha_seconds + self.beta * work


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """The line of the least relative errors through (work, seconds), at least one of them.

    One point, or points of equal work, say nothing of the slope: then the time is taken to be
    proportional to the work (one point) or constant.
    """
    rows = [(work, max(took, LEAST_SECONDS)) for work, took in points]
    x, y = [1 / t for _, t in rows], [w / t for w, t in rows]  # of alpha and beta, to sum up to 1
    xx, yy = math.fsum(a * a for a in x), math.fsum(b * b for b in y)
    xy = math.fsum(a * b for a, b in zip(x, y, strict=True))
    constant = Line(math.fsum(x) / xx, 0.0)
    if not yy:
        return constant
    proportional = Line(0.0, math.fsum(y) / yy)
    if len(rows) == 1:
        return proportional
    determinant = xx * yy - xy * xy
    if determinant <= 1e-9 * xx * yy:
        return constant
    alpha = (math.fsum(x) * yy - math.fsum(y) * xy) / determinant
    beta = (math.fsum(y) * xx - math.fsum(x) * xy) / determinant
    if alpha < 0:
        return proportional
    return constant if beta < 0 else Line(alpha, beta)


def fitted(graph: OpGraph, profiles: Sequence[Profile], microbatch_size: int) -> Profile:
    """A profile of a size that was not measured, from profiles of the same graph at others.

    Ops that no profile lists are left out, as in a measured one.
    """
    machine = calibrate()
    sizes = [profile.microbatch_size for profile in profiles]
    known = [{entry.key: entry for entry in profile.entries} for profile in profiles]
    indices = [Index.of(graph, size) for size in sizes]
    index = Index.of(graph, microbatch_size)
    lines: dict[tuple[str, ...], tuple[Line, Line]] = {}
    found: dict[str, Entry] = {}
    for op in graph.ops:
        call = Call(op, index)
        key = structural_key(call, microbatch_size)
        if key in found:
            continue
        calls = [Call(op, one) for one in indices]
        keys = tuple(structural_key(c, size) for c, size in zip(calls, sizes, strict=True))
        entries = {i: known[i][k] for i, k in enumerate(keys) if k in known[i]}
        if not entries:
            continue
        if keys not in lines:
            lines[keys] = _lines(calls, entries, machine)
        forward, backward = lines[keys]
        work = seconds(call, machine)
        near = min(entries, key=lambda i: abs(sizes[i] - microbatch_size))
        found[key] = Entry(
            key,
            op.target,
            forward.at(work[0]),
            backward.at(work[1]),
            _bytes({sizes[i]: entry.extra_bytes for i, entry in entries.items()}, microbatch_size),
            entries[near].saved_inputs,
        )
    first = profiles[0]
    return Profile(first.torch_version, first.device, microbatch_size, tuple(found.values()))


def _lines(
    calls: Sequence[Call], entries: Mapping[int, Entry], machine: Machine
) -> tuple[Line, Line]:
    work = {i: seconds(calls[i], machine) for i in entries}
    return (
        fit_line([(work[i][0], entry.forward_seconds) for i, entry in entries.items()]),
        fit_line([(work[i][1], entry.backward_seconds) for i, entry in entries.items()]),
    )


def _bytes(measured: Mapping[int, int | None], size: int) -> int | None:
    """What is kept for backward is affine in the size: through the first and the last."""
    known = {b: count for b, count in measured.items() if count is not None}
    if not known:
        return None
    low, high = min(known), max(known)
    if low == high:
        return known[low] * size // low
    slope = (known[high] - known[low]) / (high - low)
    return max(0, round(known[low] + slope * (size - low)))
