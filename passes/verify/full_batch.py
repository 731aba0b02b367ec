"""Differences from one full-batch step of eager that remain although every microbatch is exact.

A pipeline computes the same as gradient accumulation.  That is the gradient of the full batch only
where the loss is linear in the batch and has the right weights: both are computed here in plain
PyTorch, with dropout off, and the cause is named where it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pdcompile.batch import BatchLayout, FlatCall, follow_batch, resize, split, weights
from pdcompile.batch.step_result import own_loss
from pdcompile.eager.randomness import is_random_function, preserved_rng
from pdcompile.errors import PdcompileError, some
from pdcompile.ir.graph import Op, OpGraph
from pdcompile.passes.costs.costed_op import plain_name
from pdcompile.passes.trace.python_state import preserved_state
from pdcompile.plan import Training
from pdcompile.releases.torch_internals import BatchNorm

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
    notes = [*graph.notes]
    norms = [path for path, module in model.named_modules() if isinstance(module, BatchNorm)]
    count = -(-layout.size // graph.batch_size) if layout.splits else 1
    if graph.loss is None or count < 2:
        return tuple(notes), ()
    count = count if most is None else min(count, most)
    rows = min(layout.size, count * graph.batch_size)
    joined = flat if rows == layout.size else resize(flat, layout, rows)
    own = follow_batch(joined, layout)
    check = _BatchGradients(model, joined, own, loss_fn, reduction, count)
    try:
        gap = check.gap(frozen=False)
        if norms and gap is not None:
            notes.append(
                f"batch norm takes the statistics of each microbatch ({some(norms)}), so that "
                f"gradients are not those of one full batch of {rows}: {gap}"
            )
            gap = check.gap(frozen=True)
        hint = check.cause(frozen=bool(norms)) if gap is not None else ""
    except NotComparable as error:
        notes.append(f"gradients of one full batch of {rows} were not compared: {error}")
        return tuple(notes), ()
    if gap is not None and not hint:
        hint = (
            "the loss is not linear in the batch (a mean over targets of which samples have unlike "
            "numbers, which loss_reduction can count; an auxiliary or contrastive loss; statistics "
            f"over samples), so that gradients are not those of one full batch of {rows}: {gap}; "
            "microbatches=1 keeps the batch whole"
        )
    return tuple(notes), (hint,) if hint else ()


class NotComparable(Exception):
    """The gradients of a model cannot be compared, for this reason."""


class _BatchGradients:
    """Gradients of a batch and of its microbatches, at some entries of each parameter."""

    def __init__(
        self,
        model: nn.Module,
        flat: FlatCall,
        layout: BatchLayout,
        loss_fn: Callable[..., Any] | None,
        reduction: Reduction,
        count: int,
    ) -> None:
        self._model, self._flat, self._loss_fn = model, flat, loss_fn
        self._reduction = reduction
        self._parts = [FlatCall(part, flat.spec) for part in split(flat.leaves, layout, count)]
        self._weights = {
            kind: torch.tensor(weights(kind, flat, layout, count), dtype=torch.float64)  # type: ignore[arg-type]
            for kind in dict.fromkeys((reduction, "mean", "sum"))
        }
        self._known: dict[bool, tuple[Tensor, Tensor, list[str]]] = {}
        dtypes = [str(p.dtype.to_real()).removeprefix("torch.") for p in model.parameters()]
        self._tolerance = max((TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=0.0)

    def gap(self, *, frozen: bool) -> str | None:
        """The difference of the weighted sum from the full batch, in words; None where they agree.

        `frozen`: batch norm uses its running statistics.
        """
        error, name = self._error(self._reduction, frozen)
        if error <= self._tolerance:
            return None
        return f"up to {error:.2g} of a gradient's size, in {name!r}"

    def cause(self, *, frozen: bool) -> str:
        """A hint at weights of the microbatches that agree with the full batch; "" for none."""
        shown = self._reduction if isinstance(self._reduction, str) else "your callable"
        for kind, word in (("sum", "a sum over samples"), ("mean", "a mean over samples")):
            if kind != self._reduction and self._error(kind, frozen)[0] <= self._tolerance:
                return (
                    f"your loss looks like {word}: loss_reduction={kind!r} would agree with eager "
                    f"on the full batch, loss_reduction={shown!r} does not"
                )
        return ""

    def _error(self, kind: Reduction, frozen: bool) -> tuple[float, str]:
        """The largest difference of the weighted sum from the full batch, and its parameter."""
        full, parts, names = self._gradients(frozen)
        error = (self._weights[kind] @ parts - full).abs()
        return float(error.max()), names[int(error.argmax())]

    def _gradients(self, frozen: bool) -> tuple[Tensor, Tensor, list[str]]:
        """Gradients of the full batch (k), of each microbatch (m, k); the parameter of each place.

        They are in units of the parameter's largest gradient.
        """
        if frozen not in self._known:
            full = self._gradient(self._flat, frozen)
            places = {name: _places(gradient) for name, gradient in full.items()}
            names = [name for name, found in places.items() for _ in found]
            rows = [_taken(full, places)]
            del full
            rows += [_taken(self._gradient(part, frozen), places) for part in self._parts]
            everything = torch.stack(rows)
            if not names or not bool(torch.isfinite(everything).all()):
                raise NotComparable("they are missing or not finite")
            scale = everything.abs().amax(0)
            sizes: dict[str, float] = {}
            for name, size in zip(names, scale.tolist(), strict=True):
                sizes[name] = max(size, sizes.get(name, 0.0))
            least = NOISE * max(sizes.values())
            scale = torch.tensor([max(sizes[name], least) or 1.0 for name in names]).double()
            self._known[frozen] = (everything[0] / scale, everything[1:] / scale, names)
        return self._known[frozen]

    def _gradient(self, call: FlatCall, frozen: bool) -> dict[str, Tensor]:
        model = self._model
        device = next((p.device for p in model.parameters()), None)
        args, kwargs, target = call.unflatten(call.copied_leaves())
        with preserved_rng(device), preserved_state(model, True):
            model.zero_grad(set_to_none=True)
            for module in model.modules():
                if isinstance(module, nn.RNNBase):
                    module.dropout = 0.0
                elif frozen and isinstance(module, BatchNorm) and module.running_mean is not None:
                    module.training = False  # takes its running statistics
            with _NoDropout() as mode, torch.enable_grad():
                try:
                    output = model(*args, **kwargs)
                    loss = self._loss_fn(output, target) if self._loss_fn else own_loss(output)
                    if loss is None or not loss.requires_grad:
                        raise NotComparable("the model has no loss to differentiate")
                    if mode.drawn:
                        raise NotComparable(f"{mode.drawn} draws random numbers")
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


class _NoDropout(TorchFunctionMode):
    """Switches dropout off; `drawn` names another function that drew."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        elif name == "multi_head_attention_forward":
            kwargs["training"] = False
        elif is_random_function(func) and not name.endswith(("lstm", "gru", "rnn_tanh")):
            self.drawn = self.drawn or name
        return func(*args, **kwargs)


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
    yield from _own_statistics(graph, training)


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


def _own_statistics(graph: OpGraph, training: Training) -> Iterator[str]:
    """A note on batch norm, which sees one microbatch at a time."""
    norms = [
        op for op in graph.ops if op.buffers_written and plain_name(op).startswith("batchnorm")
    ]
    size = -(-training.batch_size // max(1, training.num_microbatches))
    if norms and size < training.batch_size:
        named = some([*dict.fromkeys(op.module_path or op.source for op in norms)], 3)
        yield (
            f"batch norm takes the statistics of each microbatch, {size} of the minibatch's "
            f"{training.batch_size} samples ({named}): gradients depend on microbatches= "
            "(--microbatches)"
        )
