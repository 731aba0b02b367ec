"""A call of a torch function as data: kind, target and arguments, and the autocast around it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from pdcompile.errors import TraceError
from pdcompile.ir.graph import Argument, DictOf, ListOf, Ref, Slice
from pdcompile.ir.targets import literal, method_name, name_of, operator_for

# Methods that return the tensor itself where there is nothing to convert.
NO_OP_CASTS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("to", "type", "type_as", "float", "half", "bfloat16", "double", "long", "int")
)

_BUILTINS: dict[Any, Any] = {int: int.__index__, float: float.__float__, str: str.__str__}


def target_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, str, tuple[Any, ...]]:
    """(kind, target, args in the target's order) of the op for a call."""
    method = method_name(func)
    if method is None:
        return "function", name_of(func), args
    found = operator_for(method)
    if found is not None and not kwargs and len(args) <= 3:
        function, swapped = found
        return "function", name_of(function), args[::-1] if swapped else args
    return "method", method, args


def is_public(func: Any, name: str) -> bool:
    """True if a function is torch's or Tensor's of this name."""
    homes = (torch, torch.autograd)
    return method_name(func) == name or any(getattr(home, name, None) == func for home in homes)


def open_autocast(device: str) -> str | None:
    """The text of the autocast region that is open; None where autocast is off."""
    if not torch.is_autocast_enabled(device):
        return None
    return f"{device}:{str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"


def _no_tensor(value: torch.Tensor) -> Argument:
    raise TraceError(f"a tensor of shape {tuple(value.shape)} where a literal is due")


def with_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """A plain tuple, list, dict or slice with other parts; the value itself where none changes."""
    kind = type(value)
    if kind is dict:
        return {key: change(item) for key, item in value.items()}
    if kind is slice:
        return slice(change(value.start), change(value.stop), change(value.step))
    if kind is not tuple and kind is not list:
        return value
    items = [change(item) for item in value]
    return value if all(a is b for a, b in zip(items, value, strict=True)) else kind(items)


def to_argument(
    value: Any,
    tensor: Callable[[torch.Tensor], Argument] = _no_tensor,
    device: torch.device | None = None,
) -> Argument:
    """The Argument for a Python value; `tensor` names the tensors in it.

    Subclasses of numbers and strings become the plain builtin, so that no code of the model (a
    ``__repr__``) runs when the argument is printed.

    Raises:
        TraceError: the value is of a kind that a graph cannot hold.
    """
    if value is None or value is Ellipsis or type(value) in (bool, int, float, complex, str):
        return value
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, Ref):
        return value
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return literal(value, device)
    if isinstance(value, tuple | list | range):
        items = tuple(to_argument(item, tensor, device) for item in value)
        return ListOf(items) if isinstance(value, list) else items
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TraceError(
                "an operator receives a dict with keys that are not strings",
                remedy="pass strings as keys",
            )
        return DictOf(
            tuple((str.__str__(k), to_argument(v, tensor, device)) for k, v in value.items())
        )
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return Slice(*(to_argument(part, tensor, device) for part in parts))
    for kind, plain in _BUILTINS.items():
        if isinstance(value, kind):
            return plain(value)
    return _number_or_refuse(value)


def to_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensor: Callable[[torch.Tensor], Argument],
    device: torch.device,
) -> tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
    """The Arguments of a call; a device given as text becomes a device."""
    named = {
        key: torch.device(value) if key == "device" and isinstance(value, str) else value
        for key, value in kwargs.items()
    }
    return (
        tuple(to_argument(value, tensor, device) for value in args),
        tuple((key, to_argument(value, tensor, device)) for key, value in named.items()),
    )


def without_defaults(func: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments other than defaults, all of which torch.nn.functional passes on."""
    defaults = _defaults(func)
    return {
        name: value
        for name, value in kwargs.items()
        if name not in defaults
        or name == "training"  # read where the two modes are compared
        or type(value) is not type(defaults[name])
        or isinstance(value, torch.Tensor)
        or value != defaults[name]
    }


@functools.lru_cache(maxsize=1024)
def _defaults(func: Callable[..., Any]) -> dict[str, Any]:
    if not hasattr(func, "__code__"):
        return {}
    # A wrapper that torch.Tensor puts around a builtin leads to one without a signature.
    parameters = inspect.signature(func, follow_wrapped=False).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def _number_or_refuse(value: Any) -> Argument:
    """The number of a numpy scalar, or the device; raises TraceError for other values."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind.startswith("numpy.") and getattr(value, "ndim", None) == 0:
        return value.item()
    if kind == "torch.device":
        return literal(torch.device(str(value)))
    remedy = "pass tensors, numbers, strings or containers of them"
    if kind.startswith("numpy."):
        remedy = "register the array as a buffer: self.register_buffer(name, torch.from_numpy(…))"
    if isinstance(value, torch.Generator):
        remedy = "draw from torch's default generator: pdcompile seeds it for every draw"
    raise TraceError(f"an operator receives an argument of type {kind}", remedy=remedy)
