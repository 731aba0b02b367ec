"""Attention that drops out, written out: its kernels draw by the sizes that they are given.

Each part draws for the weights of the whole, as torch does on CPUs, and takes its own share: what
drops out is what the model drops out.  Sums are in another order than those of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from pdcompile.ir.graph import Argument, Attr, Op, Ref, Size, TorchLiteral

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
Shape = tuple[Size, ...]


class Add(Protocol):
    """Adds an op with a result of this shape; `dtype`: "" for that of the attention."""

    def __call__(
        self, word: str, target: str, *args: Argument, shape: Shape, dtype: str = ""
    ) -> Ref: ...


def arguments(op: Op) -> dict[str, Any]:
    """The arguments of an attention by name."""
    return dict(zip(NAMES, op.args, strict=False)) | dict(op.kwargs)


def weights(
    op: Op, given: Mapping[str, Ref | Attr], shapes: Mapping[str, Shape], masks: bool, add: Add
) -> tuple[Ref, Ref | Attr]:
    """Adds what comes before dropout; gives the weights, and the values that they are of.

    Args:
        given: query, key, value and mask, by name.
        shapes: those of one part.
        masks: the mask says what is seen (bool), and is not added.
    """
    known, query, key = arguments(op), shapes["query"], shapes["key"]
    of, keys, values = given["query"], given["key"], given["value"]
    if known.get("enable_gqa") and query[1] != key[1]:
        times = query[1] // key[1] if isinstance(query[1], int) and isinstance(key[1], int) else 1
        key = (*query[:2], *key[2:])
        shape = (*query[:2], *shapes["value"][2:])
        keys = add("keys", "torch.repeat_interleave", keys, times, 1, shape=key)
        values = add("values", "torch.repeat_interleave", values, times, 1, shape=shape)
    shape = (*query[:-1], key[-2])
    turned = add("turned", "torch.transpose", keys, -2, -1, shape=(*key[:-2], key[-1], key[-2]))
    scores = add("scores", "torch.matmul", of, turned, shape=shape)
    scale = known.get("scale")
    scale = 1 / math.sqrt(int(str(query[-1]))) if scale is None else scale
    scores = add("scaled", "operator.mul", scores, scale, shape=shape)
    mask, seen = given.get("attn_mask"), shapes.get("attn_mask", ())
    if known.get("is_causal"):
        seen, masks = (query[-2], key[-2]), True
        kind = TorchLiteral("dtype", "bool"), TorchLiteral("device", "self")
        ones = add("all", "torch.ones", seen, *kind, shape=seen, dtype="bool")
        mask = add("seen", "torch.tril", ones, shape=seen, dtype="bool")
    if mask is not None and masks:
        hidden = add("hidden", "torch.logical_not", mask, shape=seen, dtype="bool")
        scores = add("masked", "torch.masked_fill", scores, hidden, -math.inf, shape=shape)
    elif mask is not None:
        scores = add("masked", "operator.add", scores, mask, shape=shape)
    return add("weights", "torch.softmax", scores, -1, shape=shape), values
