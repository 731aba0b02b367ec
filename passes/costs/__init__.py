"""Costs from shapes alone: seconds, operations and bytes of every op, nothing is executed.

`forward_flops` of an op and the sizes of its results are exact; seconds are a roofline of them;
the bytes that autograd keeps follow torch's own derivatives, each storage counted once over the
graph.  A profile replaces seconds by measured ones, the rest stays.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdcompile.ir.graph import OpCost, OpGraph
from pdcompile.passes.costs.costed_op import CostedOp, GraphIndex, Operand, costed_ops, product
from pdcompile.passes.costs.flops import forward_flops
from pdcompile.passes.costs.forecast import forecast
from pdcompile.passes.costs.machines import REFERENCE, Machine, calibrate, seconds
from pdcompile.passes.costs.resident import Resident, newly_saved, residents
from pdcompile.passes.costs.saved import Saved, has_rule, saved

__all__ = [
    "REFERENCE",
    "CostedOp",
    "GraphIndex",
    "Machine",
    "Operand",
    "Resident",
    "Saved",
    "calibrate",
    "costed_ops",
    "estimate",
    "forecast",
    "forward_flops",
    "has_rule",
    "newly_saved",
    "product",
    "residents",
    "saved",
    "seconds",
]  # fmt: skip


def estimate(
    graph: OpGraph,
    *,
    microbatch_size: int,
    machine: Machine = REFERENCE,
    kept: Mapping[str, Saved] | None = None,
) -> tuple[OpCost, ...]:
    """The cost of each op of the graph, in its order, for one microbatch.

    `flops` are those of the forward.  Ops outside of autograd (no_grad, or nothing requires
    grad) have no backward and save nothing.  Views take no time.  `kept` replaces, by op name,
    the rule for what autograd keeps.
    """
    calls = costed_ops(graph, microbatch_size)
    known = kept or {}
    rules = [known.get(call.op.name) or saved(call) for call in calls]
    return tuple(
        _cost(call, saved_bytes, microbatch_size, machine)
        for call, saved_bytes in zip(calls, newly_saved(calls, rules), strict=True)
    )


def _cost(call: CostedOp, saved_bytes: int, microbatch_size: int, machine: Machine) -> OpCost:
    flops = int(forward_flops(call))
    forward, backward = seconds(call, machine)
    return OpCost(
        forward_seconds=forward,
        backward_seconds=backward,
        flops=flops,
        parameter_bytes=sum(operand.bytes for operand in call.inputs if operand.held),
        saved_bytes=saved_bytes,
        output_bytes=call.output_bytes,
        workspace_bytes=workspace_bytes(call),
        microbatch_size=microbatch_size,
        origin="estimated",
    )


def workspace_bytes(call: CostedOp) -> int:
    """The largest transient: gradients of results and inputs while the backward runs."""
    if not call.differentiated or call.is_view:
        return 0
    outgoing = sum(operand.bytes for operand in call.inputs if operand.requires_grad)
    return int(sum(output.bytes for output in call.outputs if output.requires_grad) + outgoing)
