"""Autograd functions that take as much memory as an op, and compute nothing.

They imitate what cannot run on fake tensors: ops without a shape rule, opaque modules, and
attention on a GPU, where torch chooses other kernels than on the CPU, whose tensors fake ones are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pdcompile.ir.graph import size_at
from pdcompile.passes.costs.costed_op import CostedOp, Operand, laid_out

ATTENTION = "scaleddotproductattention"
FLOAT = 4  # bytes
ROWS = 32  # to multiples of which their number is rounded up


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that an op keeps until backward, by position among its operands and its results;
    `extra_bytes`: beside those."""

    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    extra_bytes: int


def guessed(call: CostedOp) -> Footprint:
    """A safe footprint of an op that does not run: it keeps what it computes with."""
    inputs = range(len(call.inputs))
    if not call.requires_grad:
        return Footprint((), (), 0)
    if call.op.saved_bytes is not None:  # measured when the model was captured
        return Footprint(tuple(inputs), (), size_at(call.op.saved_bytes, call.index.b))
    if call.op.opaque:
        twice = sum(output.bytes for output in call.outputs)
        return Footprint(tuple(inputs), tuple(range(len(call.outputs))), twice)
    floating = ("float", "bfloat", "complex")
    return Footprint(tuple(i for i in inputs if call.inputs[i].dtype.startswith(floating)), (), 0)


def fused_attention(call: CostedOp) -> Footprint | None:
    """Attention as GPUs compute it: no matrix of scores is kept, with dropout or without.

    Kept are the operands, the result, and a sum in float32 for each row of the scores; a mask of
    bools becomes one of numbers.  None for float64, for which torch has no such kernel.
    """
    dtypes = {one.dtype for one in call.outputs}
    if call.name != ATTENTION or not call.requires_grad or "float64" in dtypes:
        return None
    numbers = [i for i, one in enumerate(call.inputs) if one.dtype != "bool"]
    masks = sum(int(one.elements) for one in call.inputs if one.dtype == "bool")
    out = call.outputs[0]
    rows = math.prod(out.shape[:-2]) * (-(-out.shape[-2] // ROWS) * ROWS)
    size = int(out.bytes) // max(int(out.elements), 1)
    return Footprint(tuple(numbers), (0,), FLOAT * rows + size * masks)


class _Imitation(torch.autograd.Function):
    """(footprint, operands of the results, tensors) -> results of the right sizes."""

    @staticmethod
    def forward(ctx: Any, footprint: Footprint, shown: Sequence[Operand], *tensors: Tensor) -> Any:
        results = tuple(empty(one) for one in shown)
        ctx.mark_non_differentiable(
            *(r for r, one in zip(results, shown, strict=True) if not one.requires_grad)
        )
        extra = torch.empty(footprint.extra_bytes, dtype=torch.uint8)
        kept = [tensors[i] for i in footprint.kept_inputs if i < len(tensors)]
        kept += [results[i] for i in footprint.kept_outputs if i < len(results)]
        ctx.save_for_backward(extra, *kept)
        ctx.like = [(t.shape, t.dtype, t.requires_grad) for t in tensors]
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = [
            torch.empty(shape, dtype=dtype) if wanted else None for shape, dtype, wanted in ctx.like
        ]
        return (None, None, *found)


def empty(operand: Operand) -> Tensor:
    """A tensor like the operand, in its layout."""
    make = partial(torch.empty, dtype=getattr(torch, operand.dtype))
    return laid_out(operand.shape, operand.stride_order, make)


def imitate(call: CostedOp, footprint: Footprint, tensors: Sequence[Tensor]) -> Any:
    """The result of the op: a tensor, or a dict in a container's place, by key.

    Args:
        tensors: what the op reads, in the order of `call.inputs`.
    """
    results = iter(_Imitation.apply(footprint, call.outputs, *tensors))  # type: ignore[no-untyped-call]
    return _arranged(call, call.op.name, results)


def _arranged(call: CostedOp, name: str, results: Any) -> Any:
    index = call.index
    if index.graph.values[name].is_tensor:
        return next(results)
    by_name = {op.name: op for op in index.graph.ops if name in op.inputs}
    return {
        by_name[part].args[1]: _arranged(call, part, results) for part in index.parts.get(name, ())
    }
