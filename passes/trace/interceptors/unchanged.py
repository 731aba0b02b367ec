"""Leaves out writes that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.passes.trace.tape.interceptor import Interceptor, Proceed
from pdcompile.releases.torch_internals import NoTorchFunction, parse_to

_BY_ONE = frozenset(("mul_", "div_", "multiply_", "divide_", "true_divide_", "__imul__",
                     "__itruediv__", "pow_"))  # fmt: skip
_DTYPES = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16,
    "bfloat16": torch.bfloat16,
}  # fmt: skip


class UnchangedTensors(Interceptor):
    """Leaves out writes that change nothing."""

    def call(self, func: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        return args[0] if _writes_nothing(func, args, kwargs) else proceed(func, args, kwargs)

    def around(self) -> AbstractContextManager[None]:
        return _without_empty_moves()


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


@contextmanager
def _without_empty_moves() -> Iterator[None]:
    """Makes ``module.to(dtype)`` do nothing where all tensors have the dtype and device already.

    It would assign every parameter's ``data`` to itself.
    """
    plain = {name: vars(nn.Module)[name] for name in ("to", *_DTYPES)}

    def watched(name: str) -> Callable[..., Any]:
        def move(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = (*args, _DTYPES[name]) if name in _DTYPES else args
            with NoTorchFunction():
                nothing = _is_there(self, given, kwargs)
            return self if nothing else plain[name](self, *args, **kwargs)

        return move

    for name in plain:
        setattr(nn.Module, name, watched(name))
    try:
        yield
    finally:
        for name, method in plain.items():
            setattr(nn.Module, name, method)


def _is_there(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether all tensors have the device and dtype that ``module.to(*args)`` asks for."""
    try:
        device, dtype, _, memory_format = parse_to(*args, **kwargs)
    except (RuntimeError, TypeError):
        return False  # the call itself raises
    return memory_format is None and all(
        (device is None or tensor.device == device)
        and (dtype in (None, tensor.dtype) or not _is_continuous(tensor))
        for tensor in (*module.parameters(), *module.buffers())
    )


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
