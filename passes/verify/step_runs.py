"""The steps that are compared: their inputs, the stages' side, updates in between, and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pdcompile.batch import BatchLayout, FlatCall, microbatch_sizes, resize
from pdcompile.batch.call import copied
from pdcompile.eager.autocast import autocast_region
from pdcompile.errors import PdcompileError, VerifyError
from pdcompile.hardware import host
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.costs import estimate
from pdcompile.passes.stages.chain import Chain
from pdcompile.passes.trace.comparison.steps import Loss, ModelFails, Outputs, Step
from pdcompile.passes.trace.constants import shuffled
from pdcompile.passes.trace.python_state import kept_buffers, write_buffers
from pdcompile.passes.trace.tape.observer import stage_line_of
from pdcompile.passes.verify.parts_chain import PartsChain
from pdcompile.units import format_bytes


def needs_gradients(failed: ModelFails) -> ModelFails:
    """The error for a model that can be evaluated with autograd only."""
    cause = failed.__cause__
    said = failed.message if cause is None else f"{type(cause).__name__}: {cause}"
    return ModelFails(
        f"evaluation runs under torch.no_grad(), where the model fails: {said}",
        where=failed.where,
        remedy="in forward, put torch.enable_grad() around what is differentiated, and "
        "requires_grad_() on what it is differentiated by",
    )


def stages(chain: Chain | PartsChain, step: Step) -> tuple[Outputs, Loss]:
    """Runs one step by the generated stages.  Raises VerifyError, naming the stage that fails."""
    try:
        with autocast_region(step.autocast):
            outputs, loss = chain.forward(copied(step.call.leaves), step.minibatch)
        if chain.graph.training and loss is not None:
            chain.backward()
    except PdcompileError:
        raise
    except Exception as error:
        raise failed_stage(chain.running, chain.graph, error, chain.edited) from error
    return outputs, loss


def failed_stage(
    stage: int, graph: OpGraph, error: Exception, edited: tuple[str, ...]
) -> VerifyError:
    """The error for a stage whose Python raises one; `edited`: names of files."""
    file = f"stage_{stage}.py"
    return VerifyError(
        f"stage {stage} raises in {'training' if graph.training else 'evaluation'}, where the "
        f"model does not: {type(error).__name__}: {error}",
        where=stage_line_of(error) or file,
        remedy="undo the last edit of the stage's file"
        if file in edited
        else "please report this model: stages have to do what it does",
    )


STEP = 0.01  # of a parameter's size, so that weights change visibly in any dtype
LARGE_FLOPS = 2e9  # of one forward: above, a second step takes too long


def is_large(graph: OpGraph) -> bool:
    """True if one forward takes so long that compile compares one step only."""
    costs = estimate(graph, microbatch_size=graph.batch_size)
    return sum(cost.flops for cost in costs) > LARGE_FLOPS


def step_inputs(flat: FlatCall, layout: BatchLayout, graph: OpGraph, count: int) -> list[FlatCall]:
    """The inputs of each step: the first microbatch, then another one.

    That is the last microbatch of the minibatch with its own size; where there is one microbatch
    only, the same samples in another order, or for a single sample the same numbers in another
    order.  So all values come from the minibatch.
    """
    first = resize(flat, layout, graph.batch_size)
    return [first, _other(flat, layout, graph)] if count > 1 else [first]


def _other(flat: FlatCall, layout: BatchLayout, graph: OpGraph) -> FlatCall:
    size, rows = graph.batch_size, layout.size
    if layout.splits and rows > 1:
        last = microbatch_sizes(rows, -(-rows // size))[-1]
        last = last if graph.sizes.holds(last) else size
        return resize(_rolled(flat, layout, last if rows > size else rows // 2), layout, last)
    return resize(shuffled(flat), layout, size)


def _rolled(flat: FlatCall, layout: BatchLayout, rows: int) -> FlatCall:
    """The minibatch with its last rows first."""
    leaves = {}
    for path, leaf in flat.leaves.items():
        leaves[path] = leaf
        if (dim := layout.dims[path]) is not None:
            made = torch.empty_like(leaf, requires_grad=False).copy_(leaf.detach().roll(rows, dim))
            leaves[path] = made.requires_grad_(leaf.requires_grad)
    return FlatCall(leaves, flat.spec)


@contextmanager
def restored_weights(model: nn.Module) -> Iterator[None]:
    """Restores the parameters' data and the buffers' values, which may be replaced inside.

    The original memory of the parameters is never written.
    """
    data = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        with kept_buffers(model):
            yield
    finally:
        for parameter, original in data:
            parameter.data = original


def advance(
    model: nn.Module, gradients: Mapping[str, Tensor | None], buffers: Mapping[str, Tensor]
) -> None:
    """Puts the model in the state after a training step, one step down the gradient.

    The step is about a hundredth of each parameter, so that a weight that a stage read once and
    kept is noticed in the next step.
    """
    write_buffers(model, buffers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gradient = gradients.get(name)
            if gradient is None or gradient.layout != torch.strided or gradient.numel() == 0:
                continue
            size = parameter.data.abs().mean().clamp(min=1e-3) / gradient.abs().mean()
            if bool(torch.isfinite(size)) and float(size) > 0:
                parameter.data = parameter.data - gradient * (STEP * size).to(gradient.dtype)


SHARE = 0.5  # of the free memory, for a comparison


def too_large(model: nn.Module, graph: OpGraph) -> str:
    """The reason why numbers cannot be compared: gradients of eager and stages, updated weights,
    and both sides' activations do not fit; "" where they do."""
    tensors = (*model.parameters(), *model.buffers())
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    costs = estimate(graph, microbatch_size=graph.batch_size)
    needed = 3 * weights + 2 * sum(cost.saved_bytes for cost in costs)
    if needed <= SHARE * (host.free_bytes() or host.memory_bytes() or 0):
        return ""
    return f"model and stages side by side take {format_bytes(needed)}, over half of what is free"
