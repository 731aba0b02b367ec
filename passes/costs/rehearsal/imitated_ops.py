"""Autograd functions that take as much memory as an op, and compute nothing.

They imitate what cannot run on fake tensors: ops without a shape rule, opaque modules, recurrent
layers, whose kernels choose another way on fake tensors than on real ones, and attention on a GPU,
where torch chooses other kernels than on the CPU, whose tensors fake ones are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.ir.graph import size_at
from pdcompile.ir.opaque import tensors_among
from pdcompile.passes.costs.costed_op import CostedOp, GraphIndex, Operand, laid_out
from pdcompile.passes.costs.rehearsal.live_storages import LiveStorages, saved_storages

RECURRENT = frozenset(("lstm", "gru", "rnn"))
ATTENTION = "scaleddotproductattention"
FLOAT = 4  # bytes
ROWS = 32  # to multiples of which their number is rounded up
REAL_BYTES = 1 << 28  # of one run on real tensors; larger ones are extrapolated from one sample


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that an op takes and keeps, by position among its operands and its results.

    `extra_bytes` are kept until backward beside those; `workspace_bytes` are alive in backward
    beside the gradients that it makes.
    """

    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    extra_bytes: int
    workspace_bytes: int = 0


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


def by_running(call: CostedOp, build: Callable[[], nn.Module]) -> Footprint:
    """The footprint of a recurrent layer, from real runs on zeros; bytes are affine in the batch,
    but for what oneDNN rounds up to pages.

    `build`: makes the module on real tensors.
    """
    b = int(call.index.b)
    size = sum(int(one.bytes) for one in (*call.inputs, *call.outputs))
    if size <= REAL_BYTES or b <= 3:
        return _run(call, build())
    # Kernels of a single sample may be others.
    few = (CostedOp(call.op, GraphIndex.of(call.index.graph, n)) for n in (2, 3))
    low, high = (_run(one, build()) for one in few)

    def line(first: int, second: int) -> int:
        return max(0, first + (second - first) * (b - 2))

    return Footprint(
        high.kept_inputs,
        high.kept_outputs,
        line(low.extra_bytes, high.extra_bytes),
        line(low.workspace_bytes, high.workspace_bytes),
    )


def _run(call: CostedOp, module: nn.Module) -> Footprint:
    operands = [one for one in call.inputs if not one.of_model]
    given = [
        torch.zeros(one.shape, dtype=getattr(torch, one.dtype)).requires_grad_(one.requires_grad)
        for one in operands
    ]
    weights = list(module.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    gradients = [w.grad for w in weights if w.grad is not None]
    live = LiveStorages([*given, *weights, *module.buffers(), *gradients])
    states = given[1:]
    with live, saved_storages() as saved_here:
        result = module(given[0], *([tuple(states)] if len(states) == 2 else states))
    kept = set(saved_here)
    saved_here.clear()  # backward has to free them
    results = [t for t in tensors_among(result) if t.requires_grad]
    # The stage holds the first result; final states are dropped unless autograd keeps them.
    result_bytes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in results}
    first = results[0].untyped_storage()._cdata
    extra = live.now_bytes - sum(n for s, n in result_bytes.items() if s == first or s not in kept)
    heads = [torch.zeros_like(t) for t in results[:1]]
    live.give(heads)
    before = live.now_bytes
    live.reset_peak()
    with live:
        torch.autograd.backward(results[:1], heads)
    made = [t for t in (*given, *weights) if t.requires_grad]
    workspace = live.peak_bytes - before - sum(t.numel() * t.element_size() for t in made)
    places = {one.name: i for i, one in enumerate(call.inputs)}
    return Footprint(
        tuple(
            places[one.name]
            for one, t in zip(operands, given, strict=True)
            if t.untyped_storage()._cdata in kept
        ),
        tuple(i for i, t in enumerate(results[:1]) if t.untyped_storage()._cdata in kept),
        max(0, extra),
        max(0, workspace),
    )


class _Imitation(torch.autograd.Function):
    """(footprint, operands of the results, tensors) -> results of the right sizes."""

    @staticmethod
    def forward(ctx: Any, footprint: Footprint, shown: Sequence[Operand], *tensors: Tensor) -> Any:
        results = tuple(_empty(one) for one in shown)
        ctx.mark_non_differentiable(
            *(r for r, one in zip(results, shown, strict=True) if not one.requires_grad)
        )
        extra = torch.empty(footprint.extra_bytes, dtype=torch.uint8)
        kept = [tensors[i] for i in footprint.kept_inputs if i < len(tensors)]
        kept += [results[i] for i in footprint.kept_outputs if i < len(results)]
        ctx.save_for_backward(extra, *kept)
        ctx.footprint = footprint
        ctx.like = [(t.shape, t.dtype, t.requires_grad) for t in tensors]
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        extra, *_ = ctx.saved_tensors
        workspace = extra.new_empty(ctx.footprint.workspace_bytes)
        found = [
            torch.empty(shape, dtype=dtype) if wanted else None for shape, dtype, wanted in ctx.like
        ]
        del workspace
        return (None, None, *found)


def _empty(operand: Operand) -> Tensor:
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
