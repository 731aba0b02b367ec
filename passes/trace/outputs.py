"""The model's output as data, and the loss in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pdcompile.errors import TraceError
from pdcompile.graph import Argument, DictOf, ListOf, Ref


def structure(output: Any, leaf: Callable[[Any], Argument]) -> tuple[Argument, Any]:
    """(Argument with the leaves in pytree order, pytree spec) of a model's output.

    Containers that are neither tuple nor list become dicts: of their keys where the pytree
    registration tells them, else ``"0"``, ``"1"``, …
    """
    leaves, spec = pytree.tree_flatten(output)
    named = [_leaf(item, leaf) for item in leaves]
    return _build(output, spec, iter(named)), spec


def _leaf(value: Any, leaf: Callable[[Any], Argument]) -> Argument:
    plain = value is None or isinstance(value, torch.Tensor | bool | int | float | complex | str)
    if plain or isinstance(value, torch.dtype | torch.device):
        return leaf(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TraceError(
        f"the model returns an object of class {kind}, which pytrees do not know",
        where="the model's output",
        remedy=f"return a dict, tuple or named tuple, or register {type(value).__name__} with "
        "torch.utils._pytree (register_dataclass, register_pytree_node)",
    )


def _build(value: Any, spec: Any, leaves: Any) -> Argument:
    if spec.is_leaf():
        leaf: Argument = next(leaves)
        return leaf
    node = pytree.SUPPORTED_NODES[spec.type]
    children, _ = node.flatten_fn(value)
    items = tuple(
        _build(child, part, leaves) for child, part in zip(children, spec.children(), strict=True)
    )
    if spec.type is list:
        return ListOf(items)
    if spec.type is tuple:
        return items
    keys = spec.context if isinstance(spec.context, list) else None
    if keys is None or len(keys) != len(items) or not all(isinstance(k, str) for k in keys):
        keys = getattr(value, "_fields", None) or [str(i) for i in range(len(items))]
    return DictOf(tuple(zip((str(key) for key in keys), items, strict=True)))


def find_loss(
    output: Any, loss: Any, name: Callable[[torch.Tensor], Argument], *, given: bool
) -> str | None:
    """The value to differentiate: what loss_fn returned, else the loss in the output.

    Raises:
        TraceError: loss_fn returned something else than a scalar tensor.
    """
    if given:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TraceError(
                f"loss_fn returned {what} instead of a scalar tensor",
                where="loss_fn",
                remedy="reduce it: loss.mean() or loss.sum()",
            )
    else:
        loss = _loss_in(output)
        if loss is None:
            return None
    found = name(loss)
    if not isinstance(found, Ref):
        raise TraceError("the loss is a tensor of the model itself", where="loss_fn")
    return found.name


def _loss_in(output: Any) -> torch.Tensor | None:
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, dict):
        candidates.append(output.get("loss"))
    for candidate in candidates:
        if isinstance(candidate, torch.Tensor) and candidate.dim() == 0:
            return candidate
    return None
