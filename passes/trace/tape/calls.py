"""Kind and target of a torch function's op, and the autocast region around it."""

from __future__ import annotations

from typing import Any

import torch

from pdcompile.ir.targets import method_name, name_of, operator_for

# Methods that return the tensor itself where there is nothing to convert.
NO_OP_CASTS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("to", "type", "type_as", "float", "half", "bfloat16", "double", "long", "int")
)


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
    """Whether a function is torch's or Tensor's of this name."""
    homes = (torch, torch.autograd)
    return method_name(func) == name or any(getattr(home, name, None) == func for home in homes)


def open_autocast(device: str) -> str | None:
    """The text of the autocast region that is open; None where autocast is off."""
    if not torch.is_autocast_enabled(device):
        return None
    return f"{device}:{str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"
