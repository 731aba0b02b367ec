"""Tensors that forward makes of numpy arrays: tables and grids, the same in every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pdcompile.eager.snapshot import is_array
from pdcompile.passes.trace.tape.interceptor import Interceptor, Proceed
from pdcompile.releases.torch_internals import FakeTensor, NoTorchFunction, no_dispatch_modes

_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)


class Arrays(Interceptor):
    """Tensors that are made of arrays become constants."""

    def call(self, func: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        made = _of_array(func, args, kwargs)
        if made is None:
            return proceed(func, args, kwargs)
        self.tape.table.fresh(made)
        return made


def _of_array(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """The real tensor where a call makes one of an array; None for every other call.

    An array never comes from a fake tensor, which has no values.
    """
    if func is torch.ops.aten.lift_fresh.default:  # the only call that torch.from_numpy shows
        made = args[0]
        return made if _is_real(made) else None
    if func not in _MAKERS or not args or not is_array(args[0]):
        return None
    with no_dispatch_modes(), NoTorchFunction():
        made = func(*args, **kwargs)
    return made if _is_real(made) else None


def _is_real(value: Any) -> bool:
    fake = isinstance(value, FakeTensor)
    return isinstance(value, torch.Tensor) and not fake and not value.requires_grad
