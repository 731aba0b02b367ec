"""The model's output as data, and the loss in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pdcompile.batch.step_result import own_loss
from pdcompile.batch.structure import Instance, Part, Tree, flatten_output, unknown_in
from pdcompile.errors import TraceError
from pdcompile.ir.graph import Argument, DictOf, ListOf, Ref
from pdcompile.passes.trace.refusals import LOSS_AS_TENSOR


def structure(output: Any, leaf: Callable[[Any], Argument]) -> tuple[Argument, Tree]:
    """(Argument with the leaves in order, structure to rebuild it) of a model's output.

    A container other than a tuple or list becomes a dict: of its attributes or keys where they
    are known, else ``"0"``, ``"1"``, …

    Raises:
        TraceError: an object in it may hide tensors.
    """
    try:
        leaves, tree = flatten_output(output)
    except (RecursionError, ValueError) as error:
        raise TraceError(
            f"the model's output cannot be taken apart: {error}",
            where="the model's output",
            remedy="return tensors in plain containers",
        ) from error
    hidden = unknown_in(tree)
    if hidden is not None:
        kind = f"{type(hidden).__module__}.{type(hidden).__qualname__}"
        raise TraceError(
            f"the model returns an object of class {kind}, in which tensors may be hidden",
            where="the model's output",
            remedy="return tensors, numbers and objects that hold them as attributes",
        )
    return _build(tree, iter([leaf(item) for item in leaves])), tree


def _build(tree: Tree, leaves: Iterator[Argument]) -> Argument:
    parts = iter(tree.parts)

    def build(spec: Any) -> Argument:
        if spec.is_leaf():
            part = next(parts)
            return next(leaves) if part is None else _build_part(part, leaves)
        items = tuple(build(child) for child in spec.children())
        if spec.type is list:
            return ListOf(items)
        if spec.type is tuple:
            return items
        keys: Any = spec.context
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            keys = getattr(keys, "_fields", ())
        keys = keys if len(keys) == len(items) else range(len(items))
        return DictOf(tuple(zip((str(key) for key in keys), items, strict=True)))

    return build(tree.spec)


def _build_part(part: Part, leaves: Iterator[Argument]) -> Argument:
    if not isinstance(part, Instance):
        return ()  # it has no leaves
    content = _build(part.content, leaves)
    items = content.items if isinstance(content, ListOf) else ()
    names = [*map(str, range(len(items) - len(part.attributes))), *part.attributes]
    return DictOf(tuple(zip(names, items, strict=True)))


def find_loss(
    output: Any, loss: Any, name: Callable[[torch.Tensor], Argument], *, given: bool
) -> str | None:
    """The value to differentiate: the result of loss_fn, else the loss in the output.

    Raises:
        TraceError: loss_fn did not return a scalar tensor.
    """
    if given:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what, remedy = _no_scalar(loss)
            raise TraceError(
                f"loss_fn returned {what} instead of a scalar tensor",
                where="loss_fn",
                remedy=remedy,
            )
    else:
        loss = own_loss(output)
        if loss is None or loss.dim():
            return None
    found = name(loss)
    if not isinstance(found, Ref):
        raise TraceError(
            "the loss is a tensor of the model itself",
            where="loss_fn",
            remedy="compute it from the output and the target",
        )
    return found.name


def _no_scalar(loss: Any) -> tuple[str, str]:
    """(description of what loss_fn returned, remedy)."""
    if isinstance(loss, torch.Tensor):
        return f"a tensor of shape {tuple(loss.shape)}", "reduce it: loss.mean() or loss.sum()"
    if isinstance(loss, int | float):
        return "a Python number", LOSS_AS_TENSOR
    if loss is None:
        return "None", "let it return the loss"
    return (
        f"a {type(loss).__name__}",
        "return the loss alone; let the model return other results",
    )
