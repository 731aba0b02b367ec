"""Costs at any microbatch size from measurements at two or three: seconds = α + β·work.

Work is what the roofline says of the op at that size, so that a product of matrices, a copy and
an op that does not depend on the microbatch each follow a straight line.  One line is fitted for
each kind of op (equal structural keys at every measured size), forward and backward apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdcompile.cluster import HOST_KIND
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.costs import CostedOp, Machine, costed_ops, seconds, structural_key
from pdcompile.passes.profile import (
    Progress,
    Say,
    apply,
    machine_here,
    measure,
    other_device,
    profile,
    said_of,
)
from pdcompile.passes.profile.entries import SECONDS, Entry, Profile

if TYPE_CHECKING:
    from torch import nn


LEAST_SECONDS = 1e-9  # shorter times count as this, so that errors can be relative


@dataclass(frozen=True, slots=True)
class FittedLine:
    """``alpha_seconds + beta * work``, neither below 0; work in seconds of the roofline."""

    alpha_seconds: float
    beta: float

    def at(self, work: float) -> float:
        """Seconds for that much work."""
        return self.alpha_seconds + self.beta * work


def fit_line(points: Sequence[tuple[float, float]]) -> FittedLine:
    """The line of the least relative errors through (work, seconds), at least one of them.

    The slope is unknown for one point (then seconds are proportional to the work) and for points
    of equal work (then seconds are constant).
    """
    rows = [(work, max(took, LEAST_SECONDS)) for work, took in points]
    x, y = [1 / t for _, t in rows], [w / t for w, t in rows]  # of alpha and beta, to sum up to 1
    xx, yy = math.fsum(a * a for a in x), math.fsum(b * b for b in y)
    xy = math.fsum(a * b for a, b in zip(x, y, strict=True))
    constant = FittedLine(math.fsum(x) / xx, 0.0)
    if not yy:
        return constant
    proportional = FittedLine(0.0, math.fsum(y) / yy)
    if len(rows) == 1:
        return proportional
    determinant = xx * yy - xy * xy
    if determinant <= 1e-9 * xx * yy:
        return constant
    alpha = (math.fsum(x) * yy - math.fsum(y) * xy) / determinant
    beta = (math.fsum(y) * xx - math.fsum(x) * xy) / determinant
    if alpha < 0:
        return proportional
    return constant if beta < 0 else FittedLine(alpha, beta)


def interpolated(
    graph: OpGraph,
    profiles: Sequence[Profile],
    microbatch_size: int,
    device_kind: str = HOST_KIND,
) -> Profile:
    """A profile of a size that was not measured, from profiles of the same graph at others.

    Ops that no profile lists are left out, as in a measured one.
    """
    machine = machine_here(device_kind)
    sizes = [profile.microbatch_size for profile in profiles]
    known = [{entry.key: entry for entry in profile.entries} for profile in profiles]
    measured = list(zip(*(costed_ops(graph, size) for size in sizes), strict=True))
    lines: dict[tuple[str, ...], tuple[FittedLine, ...]] = {}
    found: dict[str, Entry] = {}
    for call, calls in zip(costed_ops(graph, microbatch_size), measured, strict=True):
        key = structural_key(call)
        if key in found:
            continue
        keys = tuple(map(structural_key, calls))
        entries = {i: known[i][k] for i, k in enumerate(keys) if k in known[i]}
        if not entries:
            continue
        if keys not in lines:
            lines[keys] = _lines(calls, entries, machine)
        work = 2 * seconds(call, machine)  # of forward and backward, and again to queue them
        at = [line.at(own) for line, own in zip(lines[keys], work, strict=True)]
        found[key] = Entry(key, call.op.target, *at)
    first = profiles[0]
    return Profile(first.torch_version, first.device, microbatch_size, tuple(found.values()))


def _lines(
    calls: Sequence[CostedOp], entries: Mapping[int, Entry], machine: Machine
) -> tuple[FittedLine, ...]:
    """One for each of `SECONDS`."""
    work = {i: 2 * seconds(calls[i], machine) for i in entries}
    return tuple(
        fit_line([(work[i][n], getattr(entry, name)) for i, entry in entries.items()])
        for n, name in enumerate(SECONDS)
    )


MIDDLE_FROM = 8  # times the smallest size: the largest one from which a third is measured


def measured_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes to measure: the ends, and one in the middle where they are far apart."""
    ordered = sorted(set(sizes))
    if len(ordered) <= 2:
        return tuple(ordered)
    low, high = ordered[0], ordered[-1]
    ends = (low, high)
    if high < MIDDLE_FROM * low:
        return ends
    middle = (low * high) ** 0.5
    return (low, min(ordered[1:-1], key=lambda size: abs(size / middle - middle / size)), high)


class Sizes:
    """The graph with costs of one microbatch, at every size of a search.

    Args:
        costs, device_kind: as for `profile`; only measured ones are fitted.
        sizes: microbatch sizes that will be asked for; others are fitted as well.
    """

    def __init__(
        self,
        graph: OpGraph,
        model: nn.Module | None,
        sizes: Sequence[int],
        *,
        costs: Any = "measured",
        device_kind: str = HOST_KIND,
        progress: Progress | None = None,
        say: Say | None = None,
    ) -> None:
        self._graph, self._model, self._costs = graph, model, costs
        self._device_kind = device_kind
        self._progress = progress
        self._say = say or (lambda _: None)
        self._profiles: list[Profile] = []
        self._wanted = measured_sizes(sizes)
        others = sorted(set(sizes) - set(self._wanted))
        if elsewhere := other_device(costs, device_kind):
            self._say(elsewhere)
        if costs == "measured" and others:
            self._say(
                f"costs at microbatch size{'s' if len(others) > 1 else ''} "
                f"{', '.join(map(str, others))} follow from those measured at "
                f"{', '.join(map(str, self._wanted))}: alpha + beta x work for each "
                "kind of op"
            )

    def at(self, size: int) -> OpGraph:
        """The graph with costs at this size.  Raises what `profile` raises."""
        if self._costs != "measured":
            return profile(
                self._graph, self._model, microbatch_size=size, costs=self._costs,
                device_kind=self._device_kind, progress=self._progress, say=self._say,
            )  # fmt: skip
        if not self._profiles:
            self._profiles = [
                measure(
                    self._graph, self._model, microbatch_size=one,
                    device_kind=self._device_kind, progress=self._progress, say=self._say,
                )
                for one in self._wanted
            ]  # fmt: skip
            for found in self._profiles if self._profiles[0].device != HOST_KIND else ():
                self._say(said_of(self._graph, found))
        for known in self._profiles:
            if known.microbatch_size == size:
                return apply(self._graph, known, device_kind=self._device_kind)
        found = interpolated(self._graph, self._profiles, size, self._device_kind)
        return apply(self._graph, found, device_kind=self._device_kind)
