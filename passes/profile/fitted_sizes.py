"""Costs at any microbatch size from measurements at two or three.

Work is what the roofline says of the op at that size, so that a product of matrices, a copy and
an op that does not depend on the microbatch each follow a straight line between measured sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from pdcompile.cluster import HOST_KIND
from pdcompile.hardware import devices
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.costs import CostedOp, costed_ops, seconds, structural_key
from pdcompile.passes.profile import (
    Progress,
    Say,
    apply,
    check_costs,
    estimated,
    machine_for,
    machine_here,
    measure,
    other_device,
    said_of,
    with_costs,
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
    """The graph with `op.cost` of one microbatch filled in, at every size of a search.

    Args:
        model: its leaf modules are copied to be measured; never run as a whole, never changed.
        sizes: microbatch sizes that will be asked for; of measured costs, others are interpolated.
        costs: ``"measured"``; ``"estimated"``: from shapes alone, nothing is executed; or a
            `Profile`.
        device_kind: what estimates are for, of `costs.machines.KINDS`; others count as a CPU.
            Measured is on this host's GPU for any kind but the CPU, if torch finds one.
        say: told where measured costs come from, when that is not this process.
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
        self._graph, self._costs, self._device_kind = graph, costs, device_kind
        self._say = say or (lambda _: None)
        self._profiles: list[Profile] = []
        self._wanted = measured_sizes(sizes)
        self._measure = partial(
            measure, graph, model, device_kind=device_kind, progress=progress, say=say
        )
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
        """The graph with costs at this size.

        Raises:
            ConfigError: `costs` is something else.
            CostError: the profile is stale, or of another model.
        """
        graph, kind = self._graph, self._device_kind
        if self._costs == "estimated":
            machine = machine_for(self._costs, kind)
            return with_costs(graph, estimated(graph, size, machine, kind))
        if self._costs == "measured":
            return apply(graph, self._measured(size), device_kind=kind)
        check_costs(self._costs)
        self._costs.check(
            torch_version=torch.__version__,
            device=devices.label(devices.of_kind(kind)),
            microbatch_size=size,
        )
        return apply(graph, self._costs, complete=True, device_kind=kind)

    def _measured(self, size: int) -> Profile:
        if not self._profiles:
            self._profiles = [self._measure(microbatch_size=one) for one in self._wanted]
            for found in self._profiles if self._profiles[0].device != HOST_KIND else ():
                self._say(said_of(self._graph, found))
        known = (one for one in self._profiles if one.microbatch_size == size)
        return next(known, None) or interpolated(
            self._graph, self._profiles, size, self._device_kind
        )
