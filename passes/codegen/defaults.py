"""Keyword arguments that say nothing: the default of the function that takes them."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from pdcompile.errors import SourceError
from pdcompile.ir.graph import Op
from pdcompile.ir.targets import resolve

_MISSING = object()


def says_nothing(op: Op, key: str, value: Any) -> bool:
    """Whether ``key=value`` is what the op assumes without it."""
    if value is not None and type(value) not in (bool, int, float, str):
        return False
    default = _default(op.kind, op.target, key)
    return type(default) is type(value) and bool(default == value)


@functools.lru_cache(maxsize=4096)
def _default(kind: str, target: str, key: str) -> Any:
    if kind == "method":
        return _of_schema(target, key)
    if kind != "function" or not target.startswith("torch."):
        return _MISSING
    try:
        function: Any = resolve(target)
    except SourceError:
        return _MISSING  # whoever writes the call says so
    # max_pool2d and its like choose between two functions by `return_indices`.
    closure = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    function = closure.get("if_false", function)
    if not inspect.isfunction(function):
        return _of_schema(target.rpartition(".")[2], key)
    parameter = inspect.signature(function).parameters.get(key)
    return parameter.default if parameter is not None else _MISSING


def _of_schema(name: str, key: str) -> Any:
    """The default that all overloads of an ATen op with such an argument agree on."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return _MISSING
    found = []
    for overload in packet.overloads():
        for argument in getattr(packet, overload)._schema.arguments:
            if argument.name == key:
                found.append(argument.default_value if argument.has_default_value() else _MISSING)
    if not found or any(type(each) is not type(found[0]) or each != found[0] for each in found):
        return _MISSING
    return found[0]
