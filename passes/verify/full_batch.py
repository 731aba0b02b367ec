"""Differences from one full-batch step of eager that remain although every microbatch is exact.

A pipeline computes the same as gradient accumulation.  That is the gradient of the full batch only
where the loss is linear in the batch and has the right weights: both are computed here in plain
PyTorch, in evaluation mode, and the cause is named where it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pdcompile.batch import BatchLayout, FlatCall, follow_batch, resize, split, weights
from pdcompile.batch.call import copied
from pdcompile.batch.step_result import own_loss
from pdcompile.eager.randomness import preserved_rng
from pdcompile.errors import PdcompileError, some
from pdcompile.hardware import devices
from pdcompile.ir.graph import Op, OpGraph
from pdcompile.passes.costs.costed_op import plain_name
from pdcompile.passes.trace.python_state import preserved_state
from pdcompile.plan import Training

Reduction: TypeAlias = str | Callable[..., Any]  # "mean", "sum", or a count of items

TOLERANCE = {"bfloat16": 5e-2, "float16": 2e-2, "float32": 2e-3, "float64": 1e-6}
SAMPLES = 64  # of each parameter's gradient: the largest, and as many evenly spread
NOISE = 1e-4  # of the largest gradient: a smaller one may be rounding alone


def full_batch_notes(
    model: nn.Module,
    graph: OpGraph,
    flat: FlatCall,
    layout: BatchLayout,
    loss_fn: Callable[..., Any] | None,
    reduction: Reduction,
    *,
    most: int | None = None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Notes on intended differences, and hints at an option that may be wrong.

    Args:
        graph: the capture in training mode; its batch size is the microbatch.
        flat, layout: a minibatch; of it the first `most` microbatches are used, None: all.
        reduction: the weights of the microbatches' losses.
    """
    count = -(-layout.size // graph.batch_size) if layout.splits else 1
    if graph.loss is None or count < 2:
        return graph.notes, ()
    notes = (*graph.notes, *_own_statistics(graph, graph.batch_size, layout.size))
    count = count if most is None else min(count, most)
    rows = min(layout.size, count * graph.batch_size)
    joined = flat if rows == layout.size else resize(flat, layout, rows)
    try:
        gaps = _gaps(model, joined, follow_batch(joined, layout), loss_fn, reduction, count)
    except NotComparable as error:
        return (*notes, f"gradients of one full batch of {rows} were not compared: {error}"), ()
    dtypes = [str(p.dtype.to_real()).removeprefix("torch.") for p in model.parameters()]
    tolerance = max((TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    gap, name = gaps[reduction]
    if gap <= tolerance:
        return notes, ()
    for kind, word in (("sum", "a sum over samples"), ("mean", "a mean over samples")):
        if gaps[kind][0] <= tolerance:
            shown = reduction if isinstance(reduction, str) else "your callable"
            hint = f"your loss looks like {word}: loss_reduction={kind!r} would agree with eager "
            return notes, (f"{hint}on the full batch, loss_reduction={shown!r} does not",)
    return notes, (
        "the loss is not linear in the batch (a mean over targets of which samples have unlike "
        "numbers, which loss_reduction can count; an auxiliary or contrastive loss; statistics "
        f"over samples), so that gradients are not those of one full batch of {rows}: up to "
        f"{gap:.2g} of a gradient's size, in {name!r}; microbatches=1 keeps the batch whole",
    )


class NotComparable(Exception):
    """The gradients of a model cannot be compared, for this reason."""


def _gaps(
    model: nn.Module,
    flat: FlatCall,
    layout: BatchLayout,
    loss_fn: Callable[..., Any] | None,
    reduction: Reduction,
    count: int,
) -> dict[Reduction, tuple[float, str]]:
    """The largest difference of the microbatches' weighted gradients from the full batch's, and its
    parameter, by reduction: of some entries of each parameter, in units of its largest gradient."""
    full = _gradient(model, flat, loss_fn)
    places = {name: _places(gradient) for name, gradient in full.items()}
    names = [name for name, found in places.items() for _ in found]
    rows = [_taken(full, places)]
    del full
    for part in split(flat.leaves, layout, count):
        rows.append(_taken(_gradient(model, FlatCall(part, flat.spec), loss_fn), places))
    everything = torch.stack(rows)
    if not names or not bool(torch.isfinite(everything).all()):
        raise NotComparable("they are missing or not finite")
    sizes: dict[str, float] = {}
    for name, size in zip(names, everything.abs().amax(0).tolist(), strict=True):
        sizes[name] = max(size, sizes.get(name, 0.0))
    least = NOISE * max(sizes.values())
    everything /= torch.tensor([max(sizes[name], least) or 1.0 for name in names]).double()
    found = dict[Reduction, tuple[float, str]]()
    for kind in (reduction, "mean", "sum"):
        share = torch.tensor(weights(kind, flat, layout, count)).double()  # type: ignore[arg-type]
        error = (share @ everything[1:] - everything[0]).abs()
        found[kind] = float(error.max()), names[int(error.argmax())]
    return found


def _gradient(model: nn.Module, call: FlatCall, loss_fn: Any) -> dict[str, Tensor]:
    """The gradient of each parameter in evaluation mode: without dropout, and with the running
    statistics of batch norm, as those of a microbatch are another matter."""
    device = next((p.device for p in model.parameters()), devices.HOST)
    args, kwargs, target = call.unflatten(copied(call.leaves))
    on_host = devices.is_host(device)
    generator = torch.default_generator if on_host else devices.generator(device)
    with preserved_rng(device), preserved_state(model, False), torch.enable_grad():
        model.zero_grad(set_to_none=True)
        state = generator.get_state()
        try:
            output = model(*args, **kwargs)
            loss = loss_fn(output, target) if loss_fn else own_loss(output)
            if loss is None or not loss.requires_grad:
                raise NotComparable("the model has no loss to differentiate")
            if not torch.equal(state, generator.get_state()):
                raise NotComparable("the model draws random numbers in evaluation too")
            loss.backward()
        except (PdcompileError, RuntimeError, ValueError, IndexError) as error:
            first = (str(error).splitlines() or [""])[0]
            raise NotComparable(f"the model fails on it ({first})") from error
        found = {}
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if parameter.requires_grad:
                dense = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
                found[name] = torch.view_as_real(dense) if dense.is_complex() else dense
        return found


def _places(gradient: Tensor) -> Tensor:
    """The entries to compare: the largest ones, and some evenly spread."""
    flat = gradient.reshape(-1).abs().float()
    largest = flat.topk(min(SAMPLES, flat.numel())).indices
    spread = torch.arange(0, flat.numel(), max(flat.numel() // SAMPLES, 1), device=flat.device)
    return torch.cat([largest, spread])


def _taken(gradients: dict[str, Tensor], places: dict[str, Tensor]) -> Tensor:
    taken = [gradients[name].reshape(-1)[where] for name, where in places.items()]
    return torch.cat([one.double().cpu() for one in taken]) if taken else torch.zeros(0).double()


_MEANS = ("cross_entropy", "nll_loss")


def notes_on_microbatches(graph: OpGraph, training: Training) -> Iterator[str]:
    """Notes on what may make gradients others than those of the whole minibatch."""
    yield from _uneven_means(graph, training)
    size = -(-training.batch_size // max(1, training.num_microbatches))
    yield from _own_statistics(graph, size, training.batch_size)


def _uneven_means(graph: OpGraph, training: Training) -> Iterator[str]:
    """A note where a minibatch's loss may differ from the mean of its microbatches' losses, also if
    those of the example (`full_batch_notes`) do not."""
    chosen = sorted({text for op in graph.ops for text in _choices(op)})
    if chosen and training.loss_reduction == "mean" and training.num_microbatches > 1:
        yield (
            f"{some(chosen)}: the loss is a mean over the targets that count, and microbatches "
            "count by their samples: where these have unlike numbers of such targets, loss and "
            "gradients are not those of the whole minibatch; loss_reduction (--loss-reduction) "
            "takes a function that counts them"
        )


def _choices(op: Op) -> Iterator[str]:
    """Arguments that make an op a mean over some of its targets."""
    word, given = op.target.rpartition(".")[2], dict[str, Any](op.kwargs)
    if op.kind == "function" and word in _MEANS and given.get("reduction", "mean") == "mean":
        if given.get("ignore_index") is not None:
            yield f"{word} with ignore_index={given['ignore_index']}"
        if given.get("weight") is not None:
            yield f"{word} with weight="


def _own_statistics(graph: OpGraph, size: int, batch_size: int) -> Iterator[str]:
    """A note on batch norm, which sees one microbatch of `size` samples at a time."""
    norms = [
        op for op in graph.ops if op.buffers_written and plain_name(op).startswith("batchnorm")
    ]
    if norms and size < batch_size:
        named = some([*dict.fromkeys(op.module_path or op.source for op in norms)], 3)
        yield (
            f"batch norm takes the statistics of each microbatch, {size} of the minibatch's "
            f"{batch_size} samples ({named}): gradients depend on microbatches= "
            "(--microbatches)"
        )
