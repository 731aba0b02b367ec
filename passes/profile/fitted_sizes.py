"""Costs at any microbatch size from measurements at two or three.

Work is what the roofline says of the op at that size, so that a product of matrices, a copy and
an op that does not depend on the microbatch each follow a straight line between measured sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pdcompile.cluster import HOST_KIND
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.costs import CostedOp, costed_ops, seconds, structural_key
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


def seconds_at(work: float, points: Sequence[tuple[float, float]]) -> float:
    """Seconds for that much work from measured (work, seconds), at least one: on the line between
    neighbours, and beyond them in proportion to the nearest."""
    ordered = sorted(points)
    for (low, short), (high, long) in pairwise(ordered):
        if low <= work <= high and low < high:
            return short + (long - short) * (work - low) / (high - low)
    nearest, took = min(ordered, key=lambda point: abs(point[0] - work))
    return took * work / nearest if nearest else took


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
    measured: dict[str, list[tuple[CostedOp, Entry]]] = {}  # of each op, at several sizes
    for known in profiles:
        entries = {entry.key: entry for entry in known.entries}
        for call in costed_ops(graph, known.microbatch_size):
            if entry := entries.get(structural_key(call)):
                measured.setdefault(call.op.name, []).append((call, entry))
    found: dict[str, Entry] = {}
    for call in costed_ops(graph, microbatch_size):
        key, points = structural_key(call), measured.get(call.op.name)
        if key in found or not points:
            continue
        work = [2 * seconds(one, machine) for one, _ in points]
        at = [
            seconds_at(
                own,
                [(w[n], getattr(entry, name)) for w, (_, entry) in zip(work, points, strict=True)],
            )
            for n, (name, own) in enumerate(zip(SECONDS, 2 * seconds(call, machine), strict=True))
        ]  # of forward and backward, and again to queue them
        found[key] = Entry(key, call.op.target, *at)
    first = profiles[0]
    return Profile(first.torch_version, first.device, microbatch_size, tuple(found.values()))


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
        costs, device_kind: as for `profile`; only measured ones are interpolated.
        sizes: microbatch sizes that will be asked for; others are interpolated.
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
                f"{', '.join(map(str, self._wanted))}: on a line by the work of each op"
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
