"""A module's op as a call of the function that it calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pdcompile.ir.graph import Argument, Op
from pdcompile.passes.costs.costed_op import plain_name

_CONVOLVES = "stride padding dilation groups"
#: The function of each kind of module, and what it takes of what the module is built with.
_FUNCTIONS = {
    "linear": ("linear", ""),
    "embedding": ("embedding", "padding_idx"),
    "layernorm": ("layer_norm", "normalized_shape eps"),
    "rmsnorm": ("rms_norm", "normalized_shape eps"),
    "groupnorm": ("group_norm", "num_groups eps"),
    **{f"conv{n}d": (f"conv{n}d", _CONVOLVES) for n in (1, 2, 3)},
    **{
        f"convtranspose{n}d": (f"conv_transpose{n}d", f"{_CONVOLVES} output_padding")
        for n in (1, 2, 3)
    },
}


def has_function(op: Op) -> bool:
    """True if `as_function` knows the module."""
    padding = dict(op.constructor).get("padding_mode", "zeros")
    return plain_name(op) in _FUNCTIONS and padding == "zeros"


def as_function(op: Op, tensors: Mapping[str, Argument], scope: str) -> Op:
    """A module's op as a call of the function that it calls, on these tensors of its own.

    For modules whose tensors another layout is needed of, or without the bias that is added later.
    """
    (function, words), known = _FUNCTIONS[plain_name(op)], dict(op.constructor)
    sizes = known.get("normalized_shape")
    known |= {"normalized_shape": (sizes,)} if isinstance(sizes, int) else {}
    kwargs = [(word, known[word]) for word in words.split() if known.get(word) is not None]
    args, named = list(op.args), [(word, tensors[word]) for word in tensors]
    if not function.endswith("norm"):
        args, named = args + [tensor for _, tensor in named], []
    return replace(
        op, kind="function", target=f"torch.nn.functional.{function}", args=tuple(args),
        kwargs=(*named, *kwargs), module_path=scope, parameters=(), constructor=(),
    )  # fmt: skip
