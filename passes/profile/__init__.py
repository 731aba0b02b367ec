"""Fills in the cost of every op, estimated from shapes, measured, or from a profile.

Measured means: every distinct op runs on this machine with synthetic operands, forward and
backward, for a few seconds in all: on its GPU for a plan for GPUs, else on its CPU.  Sums of such
times are about as far from a stage's measured time as the machine is noisy; they rank ops well,
which is what the planner needs.

Costs at any microbatch size follow from measurements at two or three, by the work of each op: what
the roofline says of it at that size, so that a product of matrices, a copy and an op that does not
depend on the microbatch each follow a straight line between measured sizes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from pdcompile.cluster import HOST_KIND
from pdcompile.errors import ConfigError, CostError
from pdcompile.files import VARIABLE
from pdcompile.hardware import devices
from pdcompile.ir.graph import OpCost, OpGraph
from pdcompile.passes.costs import (
    REFERENCE,
    CostedOp,
    Machine,
    calibrate,
    costed_ops,
    estimate,
    seconds,
    structural_key,
)
from pdcompile.passes.costs.machines import KINDS
from pdcompile.passes.costs.workspaces import Kernels
from pdcompile.passes.profile import cache
from pdcompile.passes.profile.entries import SECONDS, Entry, Profile
from pdcompile.units import format_seconds

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Entry", "Profile", "measure", "structural_key"]

# progress(done, total, what): called before each distinct op is measured, and once at the end.
Progress = Callable[[int, int, str], None]
Say = Callable[[str], None]

_LOG = logging.getLogger(__name__)

ON_CPU = "costs measured on a CPU"
NO_GPU_HERE = "torch finds no GPU here to time operators on: costs are estimated instead"
BUDGET_SECONDS = 2.0
MAX_OPERAND_BYTES = 2 << 30
GPU_SHARE = 8  # of a GPU's memory, that operands of an op may take: its backward has copies of them


def machine_for(costs: Any, device_kind: str) -> Machine:
    """The machine of what is not measured op by op: this one where ops are measured on it."""
    if costs != "measured":
        return KINDS.get(device_kind, REFERENCE)
    return machine_here(device_kind)


def machine_here(device_kind: str) -> Machine:
    """The machine of this host for a kind of device, as it was measured."""
    return calibrate(device=str(devices.of_kind(device_kind)))


def source_of(costs: Any, device_kind: str) -> str:
    """Source of costs; "" if they were measured on the kind of device that a plan is for."""
    from pdcompile.hardware.data_sheets import kind_of_name

    if costs == "estimated":
        return "estimated costs" if device_kind in KINDS else "estimated costs of a CPU core"
    if device_kind == HOST_KIND:
        return ""
    device = devices.of_kind(device_kind)
    if devices.is_host(device):
        return ON_CPU
    name = devices.gpu_name(device)
    if device_kind not in KINDS or kind_of_name(name) == device_kind:
        return ""
    return f"costs measured on {name}"


def possible(costs: Any, device_kind: str) -> Any:
    """The option ``costs`` for a kind of device: where measured ones would be a CPU's, and it has a
    data sheet, estimated ones."""
    of_cpu = costs == "measured" and source_of(costs, device_kind) == ON_CPU
    return "estimated" if of_cpu and device_kind in KINDS else costs


def other_device(costs: Any, device_kind: str) -> str:
    """A sentence where costs were not measured on the kind of device that a plan is for; or ""."""
    source = "" if costs == "estimated" else source_of(costs, device_kind)
    if not source:
        return ""
    remedy = f'costs="estimated" (--costs estimated) goes by the data sheet of {device_kind}'
    if device_kind not in KINDS:
        remedy = f"plan where there is one, or name its kind: {', '.join(KINDS)}"
    said = source.replace("costs", "costs were", 1)
    if source == ON_CPU:
        said += ", as torch finds no GPU here, and stages balance as they would on that CPU"
    return f"{said}, and the plan is for {device_kind}; {remedy}"


def check_costs(costs: Any) -> None:
    """Raises ConfigError for what the option ``costs`` cannot be, before anything is measured."""
    if costs not in ("measured", "estimated") and not isinstance(costs, Profile):
        raise ConfigError(
            f"costs={costs!r} is not known", remedy="'measured', 'estimated', or a Profile"
        )


def measure(
    graph: OpGraph,
    model: nn.Module | None,
    *,
    microbatch_size: int,
    device_kind: str = HOST_KIND,
    progress: Progress | None = None,
    say: Say | None = None,
    budget_seconds: float = BUDGET_SECONDS,
) -> Profile:
    """Measures every distinct op that the cache does not know; takes about `budget_seconds`.

    An op that cannot run alone (too large for the device, unknown to this process) is left out,
    and `apply` estimates it.
    """
    from pdcompile.eager.randomness import preserved_rng
    from pdcompile.passes.profile.op_bench import measure as measure_one

    device = devices.of_kind(device_kind)
    distinct = distinct_calls(graph, microbatch_size)
    environment = cache.Environment.here(device, microbatch_size)
    lasting = {key for key, call in distinct.items() if cache.lasting(call.op)}
    known = cache.load(environment, lasting)
    entries = {entry.key: entry for entry in known.entries} if known else {}
    if known and say:
        say(
            f"times of {len(entries)} of {len(distinct)} distinct ops at microbatch size "
            f"{microbatch_size} come from the cache, measured {known.measured} "
            f"({VARIABLE}=off measures again)"
        )
    machine, limit = machine_here(device_kind), MAX_OPERAND_BYTES
    if not devices.is_host(device):
        limit = devices.gpu_memory_bytes(device) // GPU_SHARE
    share = budget_seconds / max(len(distinct), 1)
    with preserved_rng(device):
        for done, (key, call) in enumerate(distinct.items()):
            if progress:
                progress(done, len(distinct), call.op.target)
            too_long = sum(seconds(call, machine)) > budget_seconds
            size = sum(operand.bytes for operand in (*call.inputs, *call.outputs))
            if key in entries or too_long or size > limit:
                continue
            try:
                entries[key] = measure_one(call, key, model, microbatch_size, share, device)
            except Exception as error:  # the op is a user's: whatever it raises, it is estimated
                _LOG.info(
                    "%s (%s, %s) cannot run alone and is estimated: %s",
                    call.op.name, call.op.target, call.op.source, error,
                )  # fmt: skip
    devices.hand_back(device)
    if progress:
        progress(len(distinct), len(distinct), "")
    if known is None:
        cache.save(environment, lasting, (e for key, e in entries.items() if key in lasting))
    return Profile(
        torch.__version__, devices.label(device), microbatch_size, tuple(entries.values())
    )


def distinct_calls(graph: OpGraph, microbatch_size: int) -> dict[str, CostedOp]:
    """Ops that do work, one of each structural key."""
    distinct: dict[str, CostedOp] = {}
    for call in costed_ops(graph, microbatch_size):
        if not (call.name == "getitem" and call.is_view):
            distinct.setdefault(structural_key(call), call)
    return distinct


def apply(
    graph: OpGraph, found: Profile, *, complete: bool = False, device_kind: str = HOST_KIND
) -> OpGraph:
    """Costs of a profile; ops that it does not list are estimated with this machine's figures.

    On a GPU the host queues ops while earlier ones run.  What it takes longer than they do, over
    the whole graph, is added to each op in proportion to what it takes to be queued.

    Raises CostError when `complete` and more than views are missing: the profile is of another
    model.
    """
    b = found.microbatch_size
    known = _known(graph, found)
    if complete and known and not any(known):
        raise CostError(
            "the profile lists none of this model's ops",
            remedy="measure this model, at this microbatch size",
        )
    kernels, machine = Kernels.of(device_kind), machine_here(device_kind)
    from_shapes = estimate(graph, microbatch_size=b, machine=machine, kernels=kernels)
    work, queueing = _work_and_queueing(known)
    waits = max(0.0, 1 - work / queueing) if queueing else 0.0
    costs = zip(from_shapes, known, strict=True)
    return with_costs(graph, tuple(_measured(cost, entry, waits) for cost, entry in costs))


def said_of(graph: OpGraph, found: Profile) -> str:
    """Note of a plan about costs that were measured on a GPU."""
    work, queueing = _work_and_queueing(_known(graph, found))
    return (
        f"costs were measured on {found.device}: a microbatch of {found.microbatch_size} takes it "
        f"{format_seconds(work)}, and its host {format_seconds(queueing)} to queue"
    )


def _known(graph: OpGraph, found: Profile) -> list[Entry | None]:
    """The entry of each op; None for those that the profile does not list."""
    entries = {entry.key: entry for entry in found.entries}
    calls = costed_ops(graph, found.microbatch_size)
    return [entries.get(structural_key(call)) for call in calls]


def _work_and_queueing(entries: Sequence[Entry | None]) -> tuple[float, float]:
    """Seconds of the device and of the host for these ops, forward and backward."""
    known = [one for one in entries if one is not None]
    return (
        math.fsum(one.forward_seconds + one.backward_seconds for one in known),
        math.fsum(one.forward_dispatch_seconds + one.backward_dispatch_seconds for one in known),
    )


def _measured(cost: OpCost, entry: Entry | None, waits: float) -> OpCost:
    if entry is None:
        return cost
    return replace(
        cost,
        forward_seconds=entry.forward_seconds + waits * entry.forward_dispatch_seconds,
        backward_seconds=entry.backward_seconds + waits * entry.backward_dispatch_seconds,
        origin="measured",
    )


def with_costs(graph: OpGraph, costs: tuple[OpCost, ...]) -> OpGraph:
    """The graph with these costs of its ops, in their order."""
    return replace(
        graph, ops=tuple(replace(op, cost=c) for op, c in zip(graph.ops, costs, strict=True))
    )


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
            kernels, machine = Kernels.of(kind), machine_for(self._costs, kind)
            costs = estimate(graph, microbatch_size=size, machine=machine, kernels=kernels)
            return with_costs(graph, costs)
        if self._costs == "measured":
            return apply(graph, self._measured(size), device_kind=kind)
        check_costs(self._costs)
        here = devices.label(devices.of_kind(kind))
        self._costs.check(torch_version=torch.__version__, device=here, microbatch_size=size)
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
