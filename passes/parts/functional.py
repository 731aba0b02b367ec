"""A module's op as a call of the function that it calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pdcompile.errors import PlanError
from pdcompile.ir.graph import Argument, Op
from pdcompile.passes.costs.costed_op import plain_name


def as_function(op: Op, tensors: Mapping[str, Argument], scope: str) -> Op:
    """A module's op as a call of the function that it calls, on these tensors of its own.

    For modules whose tensors another layout is needed of, or without the bias that is added later.
    """
    name, known = plain_name(op), dict(op.constructor)
    called = [*op.args, *(tensors[key] for key in ("weight", "bias") if key in tensors)]
    words: tuple[str, ...] = ()
    if name == "embedding":
        words = ("padding_idx",)
    elif name == "layernorm":
        sizes = known["normalized_shape"]
        called.insert(1, (sizes,) if isinstance(sizes, int) else sizes)
        words = ("eps",)
    elif name in ("conv1d", "conv2d", "conv3d") and known.get("padding_mode", "zeros") == "zeros":
        words = ("stride", "padding", "dilation", "groups")
    elif name != "linear":
        raise _mistake(op, f"the tensors of a {op.target} are needed in another layout")
    kwargs = tuple((word, known[word]) for word in words if known.get(word) is not None)
    function = "layer_norm" if name == "layernorm" else name
    return replace(
        op, kind="function", target=f"torch.nn.functional.{function}", args=tuple(called),
        kwargs=kwargs, module_path=scope, parameters=(), constructor=(),
    )  # fmt: skip


def _mistake(op: Op, what: str) -> PlanError:
    remedy = "this is a mistake in pdcompile: please report it with the model"
    return PlanError(what, where=f"{op.module_path} ({op.source})", remedy=remedy)
