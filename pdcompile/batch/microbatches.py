"""Splits a minibatch into microbatches, weighs their losses, and joins their outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from pdcompile.batch.call import FlatCall
from pdcompile.batch.layout import BatchLayout, dense, memory_order
from pdcompile.batch.structure import flatten_output, unflatten_output
from pdcompile.errors import ConfigError, InputError, errors_as


def resize(flat: FlatCall, layout: BatchLayout, size: int) -> FlatCall:
    """The same call with `size` samples: rows repeated in turn, or cut.

    Tensors have no gaps in memory and keep the order of their dimensions.
    """
    leaves = {
        path: (dense(leaf) if isinstance(leaf, Tensor) else leaf)
        if layout.dims[path] is None
        else take_cyclically(leaf, layout.dims[path] or 0, size)
        for path, leaf in flat.leaves.items()
    }
    return FlatCall(leaves, flat.spec)


def microbatch_sizes(batch_size: int, num_microbatches: int) -> list[int]:
    """Samples of each microbatch, as `torch.tensor_split` makes them; never 0.

    With fewer samples than microbatches there are fewer microbatches, of one sample each.
    """
    count = min(num_microbatches, batch_size)
    small, larger = divmod(batch_size, count)
    return [small + 1] * larger + [small] * (count - larger)


def split(
    flat_leaves: Mapping[str, Any],
    layout: BatchLayout,
    num_microbatches: int,
    part: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """One dict of leaves for each microbatch: parts along the batch dimension, the rest shared.

    `part`: the microbatches whose samples the leaves have, where not all; others are empty.

    Tensors have no gaps in memory and their dimensions are in the order of `layout.orders`, as
    the model was captured: views where they have this layout already, else copies.

    A leaf that is None although it has a batch dimension (a rank that does not need it) stays
    None.  Without any batch dimension there is one microbatch.
    """
    sizes = microbatch_sizes(layout.size, num_microbatches) if layout.splits else [layout.size]
    mine = range(len(sizes)) if part is None else part
    parts: list[dict[str, Any]] = [{} for _ in sizes]
    for path, leaf in flat_leaves.items():
        dim = layout.dims[path]
        pieces: Sequence[Any] = [leaf] * len(mine)
        if isinstance(leaf, Tensor):
            order = layout.orders.get(path)
            if dim is None:
                pieces = [dense(leaf, order)] * len(mine)
            else:
                ends = list(accumulate(sizes[i] for i in mine))[:-1]
                pieces = [dense(piece, order) for piece in torch.tensor_split(leaf, ends, dim)]
        for i, piece in zip(mine, pieces, strict=True):
            parts[i][path] = piece
    return parts


def weights(
    reduction: Literal["mean", "sum"] | Callable[..., Any],
    flat: FlatCall,
    layout: BatchLayout,
    num_microbatches: int,
) -> list[float]:
    """The factor of each microbatch's loss, applied before its backward.

    ``mean``: n_i/N by samples; ``sum``: 1; a callable (args, kwargs, target) -> number of items:
    items_i / Σ items.  Python floats, computed in this order on every rank.

    Raises:
        InputError: a callable returned something negative, not finite, or 0 throughout.
        ConfigError: it raised, or returned no number.
    """
    if reduction == "mean" or reduction == "sum":
        if not layout.splits:
            return [1.0]
        sizes = microbatch_sizes(layout.size, num_microbatches)
        return [n / layout.size for n in sizes] if reduction == "mean" else [1.0] * len(sizes)
    parts = split(flat.leaves, layout, num_microbatches)
    items = [_items(reduction, *flat.unflatten(part)) for part in parts]
    total = sum(items)
    if not all(math.isfinite(count) and count >= 0 for count in items) or total == 0:
        raise InputError(
            f"loss_reduction counted {items} items in the microbatches of one minibatch",
            remedy="it has to return the number of items that the loss averages over, and a "
            "minibatch has to contain at least one",
        )
    return [count / total for count in items]


def _items(reduction: Callable[..., Any], args: Any, kwargs: Any, target: Any) -> float:
    remedy = (
        f"it is called with (args, kwargs, target) as forward binds them, here with {len(args)} "
        f"positional arguments and the keywords {sorted(kwargs)}"
    )
    with errors_as(ConfigError, "loss_reduction fails", "loss_reduction", remedy, Exception):
        items = reduction(args, kwargs, target)
    try:
        return float(items)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"loss_reduction returned {type(items).__name__}, which is not one number: {error}",
            remedy="return the number of items, as (target != -100).sum()",
        ) from None


def concatenate(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    *,
    loss: Tensor | None = None,
    loss_leaf: int | None = None,
    batch_dim: int = 0,
    sample_dims: Mapping[int, Collection[int]] = MappingProxyType({}),
) -> Any:
    """Joins the outputs of the microbatches into the minibatch's output.

    Args:
        outputs: one value for each microbatch, of any class, equal in structure.
        sizes: samples of each microbatch.
        loss: the minibatch's loss, which takes the place of leaf number `loss_leaf`.
        batch_dim: the dimension to try first when looking for the one that counts samples.
        sample_dims: those that count samples, by leaf: two layers do not where there are two.

    Tensors are concatenated along the dimension whose size is the microbatch's in every
    microbatch (`batch_dim`, else the first that fits); tensors without one (scalars, auxiliary
    losses) are stacked along a new first dimension.  Other leaves are those of the first
    microbatch.  A single microbatch's output is returned as it is.

    Raises:
        InputError: microbatches returned unlike structures, or tensors that do not fit.
    """
    flat = [flatten_output(output) for output in outputs]
    tree = flat[0][1]
    for index, (_, other) in enumerate(flat):
        if other != tree:
            raise InputError(
                f"microbatch {index} returned another structure than microbatch 0: {other}, "
                f"not {tree}",
                remedy="a model's output structure may not depend on the values of its inputs",
            )
    joined = []
    for number, parts in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
        if number == loss_leaf and loss is not None:
            joined.append(loss)
        elif len(parts) == 1 or not all(isinstance(part, Tensor) for part in parts):
            joined.append(parts[0])
        else:
            dims = sample_dims.get(number, range(parts[0].ndim))
            joined.append(_join(number, parts, sizes, batch_dim, dims))
    return unflatten_output(joined, tree)


def _join(
    number: int, parts: Sequence[Tensor], sizes: Sequence[int], first: int, dims: Collection[int]
) -> Tensor:
    shape = parts[0].shape
    for dim in sorted(dims, key=lambda dim: dim != min(first, len(shape) - 1)):
        if all(
            part.shape == (*shape[:dim], n, *shape[dim + 1 :])
            for part, n in zip(parts, sizes, strict=True)
        ):
            return torch.cat(list(parts), dim)
    if len({part.shape for part in parts}) > 1:
        shapes = ", ".join(dict.fromkeys(str(tuple(part.shape)) for part in parts))
        raise InputError(
            f"leaf {number} of the output has no dimension that counts samples, and unlike shapes "
            f"in the microbatches: {shapes}",
            remedy="return tensors with one row for each sample, or use minibatches that the "
            "number of microbatches divides",
        )
    return torch.stack(list(parts))


def take_cyclically(leaf: Tensor, dim: int, size: int) -> Tensor:
    """A tensor with so many entries along a dim: its own, repeated in turn, or cut."""
    rows = torch.arange(size, device=leaf.device) % leaf.shape[dim]
    taken = dense(leaf.detach().index_select(dim, rows), memory_order(leaf))
    return taken.requires_grad_(leaf.requires_grad)
