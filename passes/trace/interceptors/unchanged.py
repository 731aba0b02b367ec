"""Leaves out writes that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.passes.trace.tape.interceptor import Interceptor, Proceed, patched
from pdcompile.releases.torch_internals import MODULE_MOVE, NoTorchFunction, no_dispatch_modes

_BY_ONE = frozenset(("mul_", "div_", "multiply_", "divide_", "true_divide_", "__imul__",
                     "__itruediv__", "pow_"))  # fmt: skip


class UnchangedTensors(Interceptor):
    """Leaves out writes that change nothing."""

    def call(self, func: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        return args[0] if _writes_nothing(func, args, kwargs) else proceed(func, args, kwargs)

    def around(self) -> AbstractContextManager[None]:
        """Makes ``module.to(dtype)`` do nothing where all tensors have the dtype and device.

        It would assign every parameter's ``data`` to itself.
        """
        home, name = MODULE_MOVE
        plain = getattr(home, name)

        def move(self: nn.Module, change: Callable[[Tensor], Tensor], *args: Any) -> Any:
            tensors = (*self.parameters(), *self.buffers())
            with torch.no_grad(), no_dispatch_modes(), NoTorchFunction():
                if all(change(tensor) is tensor for tensor in tensors):
                    return self
            return plain(self, change, *args)

        return patched((home, name, move))


def _writes_nothing(
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
