"""Copies of models that hold results of their last call."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from pdcompile.errors import InputError

_DEPTH = 3  # of containers in an attribute


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy.

    A tensor in an attribute that is part of an autograd graph (the weight that an old weight_norm
    computes, an auxiliary loss of the last call), which torch refuses to copy, has its value in
    the copy, and no history.

    Raises:
        InputError: something that hangs on the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in _tensors(vars(module), _DEPTH):
            if not tensor.is_leaf:
                memo[id(tensor)] = tensor.detach().clone()
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(
            f"the model cannot be copied, {type(error).__name__}: {error}",
            where=type(model).__qualname__,
            remedy="keep what copy.deepcopy refuses (generators, locks, open files) out of the "
            "attributes of its modules; keep_model=False trains without a copy",
        ) from error


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, depth - 1)
