"""Fills in the cost of every op, estimated from shapes, measured, or from a file.

Measured means: every distinct op runs on this machine's CPU with synthetic operands, forward
and backward, for a few seconds in all.  Sums of such times are about as far from a stage's
measured time as the machine is noisy; they rank ops well, which is what the planner needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdcompile.cluster import HOST_KIND
from pdcompile.errors import ConfigError, CostError
from pdcompile.files import VARIABLE
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
from pdcompile.passes.costs.machines import machine_of
from pdcompile.passes.profile import cache
from pdcompile.passes.profile.entries import Entry, Profile

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Entry", "Profile", "measure", "profile", "structural_key"]

# progress(done, total, what): called before each distinct op is measured, and once at the end.
Progress = Callable[[int, int, str], None]
Say = Callable[[str], None]

_LOG = logging.getLogger(__name__)

BUDGET_SECONDS = 2.0
MAX_OPERAND_BYTES = 2 << 30
DEVICE = HOST_KIND


def profile(
    graph: OpGraph,
    model: nn.Module | None,
    *,
    microbatch_size: int,
    costs: Any = "measured",
    device_kind: str = HOST_KIND,
    progress: Progress | None = None,
    say: Say | None = None,
) -> OpGraph:
    """The same graph with `op.cost` filled in, in seconds and bytes of one microbatch.

    Args:
        model: its leaf modules are copied to be measured; never run as a whole, never changed.
        costs: ``"measured"``; ``"estimated"``: from shapes alone, nothing is executed; a
            `Profile` or the path of a saved one.
        device_kind: what estimates are for, of `costs.machines.KINDS`; others count as a CPU.
        say: told where measured costs come from, when that is not this process.

    Raises:
        ConfigError: `costs` is something else.
        CostError: a saved profile is malformed, stale, or lacks an op of this graph.
    """
    if costs == "estimated":
        machine = machine_for(costs, device_kind)
        return _with_costs(graph, estimate(graph, microbatch_size=microbatch_size, machine=machine))
    if costs == "measured":
        found = measure(graph, model, microbatch_size=microbatch_size, progress=progress, say=say)
        return apply(graph, found)
    check_costs(costs)
    if not isinstance(costs, Profile):
        costs = Profile.load(costs)
    import torch

    costs.check(torch_version=torch.__version__, device=DEVICE, microbatch_size=microbatch_size)
    return apply(graph, costs, complete=True)


def machine_for(costs: Any, device_kind: str) -> Machine:
    """The machine of what is not measured op by op: this one where ops are measured on it."""
    return calibrate() if costs == "measured" else machine_of(device_kind) or REFERENCE


def check_costs(costs: Any) -> None:
    """Raises ConfigError for what the option ``costs`` cannot be, before anything is measured."""
    if costs in ("measured", "estimated") or isinstance(costs, Path | Profile):
        return
    if not (isinstance(costs, str) and costs.endswith(".json")):
        raise ConfigError(
            f"costs={costs!r} is not known",
            remedy="'measured', 'estimated', a Profile, or the path of a saved one (*.json)",
        )


def measure(
    graph: OpGraph,
    model: nn.Module | None,
    *,
    microbatch_size: int,
    progress: Progress | None = None,
    say: Say | None = None,
    budget_seconds: float = BUDGET_SECONDS,
) -> Profile:
    """Measures every distinct op that the cache does not know; takes about `budget_seconds`.

    An op that cannot run alone (too large for this machine, unknown to this process) is left
    out, and `apply` estimates it.
    """
    import torch

    from pdcompile.eager.randomness import preserved_rng
    from pdcompile.passes.profile.op_bench import measure as measure_one

    distinct = distinct_calls(graph, microbatch_size)
    environment = cache.Environment.here(DEVICE, microbatch_size)
    lasting = {key for key, call in distinct.items() if cache.lasting(call.op)}
    known = cache.load(environment, lasting)
    entries = {entry.key: entry for entry in known.entries} if known else {}
    if known and say:
        say(
            f"times of {len(entries)} of {len(distinct)} distinct ops at microbatch size "
            f"{microbatch_size} come from the cache, measured {known.measured} "
            f"({VARIABLE}=off measures again)"
        )
    machine = calibrate()
    share = budget_seconds / max(len(distinct), 1)
    with preserved_rng():
        for done, (key, call) in enumerate(distinct.items()):
            if progress:
                progress(done, len(distinct), call.op.target)
            too_long = sum(seconds(call, machine)) > budget_seconds
            size = sum(operand.bytes for operand in (*call.inputs, *call.outputs))
            if key in entries or too_long or size > MAX_OPERAND_BYTES:
                continue
            try:
                entries[key] = measure_one(call, key, model, microbatch_size, share)
            except Exception as error:  # the op is a user's: whatever it raises, it is estimated
                _LOG.info(
                    "%s (%s, %s) cannot run alone and is estimated: %s",
                    call.op.name, call.op.target, call.op.source, error,
                )  # fmt: skip
    if progress:
        progress(len(distinct), len(distinct), "")
    if known is None:
        cache.save(environment, lasting, (e for key, e in entries.items() if key in lasting))
    return Profile(torch.__version__, DEVICE, microbatch_size, tuple(entries.values()))


def distinct_calls(graph: OpGraph, microbatch_size: int) -> dict[str, CostedOp]:
    """Ops that do work, one of each structural key."""
    distinct: dict[str, CostedOp] = {}
    for call in costed_ops(graph, microbatch_size):
        if not (call.name == "getitem" and call.is_view):
            distinct.setdefault(structural_key(call), call)
    return distinct


def apply(graph: OpGraph, found: Profile, *, complete: bool = False) -> OpGraph:
    """Costs of a profile; ops that it does not list are estimated with this machine's figures.

    Raises CostError when `complete` and more than views are missing: the profile is of another
    model.
    """
    b = found.microbatch_size
    entries = {entry.key: entry for entry in found.entries}
    calls = costed_ops(graph, b)
    known = [entries.get(structural_key(call)) for call in calls]
    if complete and calls and not any(known):
        raise CostError(
            "the profile lists none of this model's ops",
            remedy="measure this model, at this microbatch size",
        )
    estimated = estimate(graph, microbatch_size=b, machine=calibrate())
    return _with_costs(graph, tuple(_measured(c, e) for c, e in zip(estimated, known, strict=True)))


def _measured(cost: OpCost, entry: Entry | None) -> OpCost:
    if entry is None:
        return cost
    return replace(
        cost,
        forward_seconds=entry.forward_seconds,
        backward_seconds=entry.backward_seconds,
        origin="measured",
    )


def _with_costs(graph: OpGraph, costs: tuple[OpCost, ...]) -> OpGraph:
    return replace(
        graph, ops=tuple(replace(op, cost=c) for op, c in zip(graph.ops, costs, strict=True))
    )
