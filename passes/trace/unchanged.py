"""Writes that write what is there: no writes at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_BY_ONE = frozenset(("mul_", "div_", "multiply_", "divide_", "true_divide_", "__imul__",
                     "__itruediv__", "pow_"))  # fmt: skip


def writes_nothing(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a call scales a tensor in place by one, where nothing is recorded for gradients.

    A model that rescales layer i of n by ``2 ** (i // k)`` does this with its parameters, which
    no forward may write.
    """
    if getattr(func, "__name__", "") not in _BY_ONE or kwargs or len(args) != 2:
        return False
    tensor, factor = args
    if not isinstance(tensor, torch.Tensor) or type(factor) not in (int, float) or factor != 1:
        return False
    # An in-place operation on a tensor that requires grad would be part of its history.
    return tensor.is_floating_point() and not torch.is_grad_enabled()
