"""Costs from shapes alone: seconds, operations and bytes of every op, nothing is executed.

`forward_flops` of an op and the sizes of its results are exact; seconds are a roofline of them;
the bytes that autograd keeps are seen on fake tensors, each storage counted once over the graph.
A profile replaces seconds by measured ones, the rest stays.
"""

from __future__ import annotations

from pdcompile.ir.graph import OpCost, OpGraph
from pdcompile.passes.costs.costed_op import (
    CostedOp,
    GraphIndex,
    Operand,
    costed_ops,
    structural_key,
)
from pdcompile.passes.costs.flops import forward_flops
from pdcompile.passes.costs.forecast import forecast
from pdcompile.passes.costs.machines import REFERENCE, Machine, calibrate, seconds
from pdcompile.passes.costs.stage_ports import Resident
from pdcompile.passes.costs.workspaces import HOST, Kernels

__all__ = [
    "REFERENCE", "CostedOp", "GraphIndex", "Machine", "Operand", "Resident", "calibrate",
    "costed_ops", "estimate", "forecast", "forward_flops", "seconds", "structural_key",
]  # fmt: skip


def estimate(
    graph: OpGraph, *, microbatch_size: int, machine: Machine = REFERENCE, kernels: Kernels = HOST
) -> tuple[OpCost, ...]:
    """The cost of each op of the graph, in its order, for one microbatch.

    `kernels`: those of the device, which decide what autograd keeps.

    `flops` are those of the forward.  Ops outside of autograd (no_grad, or nothing requires
    grad) have no backward and save nothing.  Views take no time.
    """
    from pdcompile.passes.costs.rehearsal.kept_storages import new_bytes

    kept = new_bytes(graph, microbatch_size, kernels)
    found = []
    for call in costed_ops(graph, microbatch_size):
        forward, backward = seconds(call, machine)
        cost = OpCost(
            forward_seconds=forward,
            backward_seconds=backward,
            flops=int(forward_flops(call)),
            parameter_bytes=sum(operand.bytes for operand in call.inputs if operand.of_model),
            saved_bytes=kept[call.op.name],
            output_bytes=call.output_bytes,
            workspace_bytes=call.workspace_bytes,
            microbatch_size=microbatch_size,
            origin="estimated",
        )
        found.append(cost)
    return tuple(found)
