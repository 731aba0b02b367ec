"""Names of callables and literals, and back: the meaning of the strings in an OpGraph.

A graph is data that may come from a file, so a name is only ever looked up in the namespaces
listed here, and only operators on tensors and numbers are found: never torch.load.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional
import torch.overrides

from pdcompile.errors import SourceError, TraceError
from pdcompile.ir.records import FROM_PARTS, PARTS, TorchLiteral
from pdcompile.parts import conversions
from pdcompile.releases.torch_internals import (
    ASSERT,
    NN_FUNCTIONS,
    VARIABLE_FUNCTIONS,
    OpOverload,
    OpOverloadPacket,
)

# Where public functions live.  Of several names of one function the first found is used.
NAMESPACES: tuple[tuple[str, Any], ...] = (
    ("torch.nn.functional", torch.nn.functional),
    ("torch", torch),
    ("torch.linalg", torch.linalg),
    ("torch.fft", torch.fft),
    ("torch.special", torch.special),
    ("torch.functional", torch.functional),
    ("torch._C._nn", NN_FUNCTIONS),
    ("torch.autograd", torch.autograd),
    ("operator", operator),
    ("math", math),
)

sys.modules[PARTS] = conversions  # by this name stages import it, in whose folder it lies

# Tensor dunders that the Python operators reach, and methods that operators arrive as
# (`x + y` reaches a function mode as Tensor.add).
_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "matmul": operator.matmul, "pow": operator.pow, "neg": operator.neg, "gt": operator.gt,
    "ge": operator.ge, "lt": operator.lt, "le": operator.le, "eq": operator.eq,
    "ne": operator.ne, "__pow__": operator.pow, "__eq__": operator.eq,
    "__getitem__": operator.getitem, "__setitem__": operator.setitem,
    "__floordiv__": operator.floordiv, "__mod__": operator.mod, "__and__": operator.and_,
    "__or__": operator.or_, "__xor__": operator.xor, "__invert__": operator.invert,
    "bitwise_not": operator.invert, "remainder": operator.mod, "__lshift__": operator.lshift,
    "__rshift__": operator.rshift, "__neg__": operator.neg, "__pos__": operator.pos,
    "__abs__": operator.abs, "add_": operator.iadd, "sub_": operator.isub,
    "mul_": operator.imul, "div_": operator.itruediv, "__iand__": operator.iand,
    "__ior__": operator.ior, "__ixor__": operator.ixor, "__ipow__": operator.ipow,
    "__imod__": operator.imod, "__ifloordiv__": operator.ifloordiv,
    "__ilshift__": operator.ilshift, "__irshift__": operator.irshift,
}  # fmt: skip
_REFLECTED: dict[str, Callable[..., Any]] = {
    "__radd__": operator.add, "__rsub__": operator.sub, "__rmul__": operator.mul,
    "__rdiv__": operator.truediv, "__rtruediv__": operator.truediv,
    "__rmatmul__": operator.matmul, "__rpow__": operator.pow, "__rmod__": operator.mod,
    "__rfloordiv__": operator.floordiv, "__rand__": operator.and_, "__ror__": operator.or_,
    "__rxor__": operator.xor, "__rlshift__": operator.lshift, "__rrshift__": operator.rshift,
}  # fmt: skip

_ARITHMETIC = (
    {function for function in vars(math).values() if callable(function)}
    | set(_OPERATORS.values()) | set(_REFLECTED.values()) | {operator.not_, operator.is_}
)  # fmt: skip


@functools.cache
def _names() -> dict[Any, str]:
    table: dict[Any, str] = {}
    for prefix, namespace in NAMESPACES:
        for attribute in dir(namespace):
            value = getattr(namespace, attribute)
            if attribute.startswith("__") or not callable(value) or isinstance(value, type):
                continue
            if not isinstance(value, Hashable) or not _is_operator(value):
                continue
            known = value in table
            if not known or (attribute[0] != "_" and table[value].rpartition(".")[2][0] == "_"):
                table[value] = f"{prefix}.{attribute}"
    return table


@functools.cache
def _methods() -> dict[Any, str]:
    table: dict[Any, str] = {}
    for attribute in dir(torch.Tensor):
        value = getattr(torch.Tensor, attribute, None)
        if callable(value) and not isinstance(value, type):
            table.setdefault(value, attribute)
    return table


def method_name(function: Callable[..., Any]) -> str | None:
    """The name under which Tensor has this method; None for what is not a method."""
    return _methods().get(function)


def operator_for(method: str) -> tuple[Callable[..., Any], bool] | None:
    """The Python operator that a Tensor method implements, and whether operands are swapped."""
    if method in _REFLECTED:
        return _REFLECTED[method], True
    return (_OPERATORS[method], False) if method in _OPERATORS else None


def name_of(function: Callable[..., Any]) -> str:
    """The dotted name that `resolve` turns back into this function.

    ``torch.nn.functional.gelu``, ``operator.add``, ``torch.ops.aten.add.Tensor``, and
    ``pkg.mod.Cls.apply`` for the apply of an autograd.Function.

    Raises:
        TraceError: the function is not reachable by a public name.
    """
    if isinstance(function, OpOverload):
        namespace, _, name = function._schema.name.partition("::")
        return f"torch.ops.{namespace}.{name}.{function._overloadname}"
    if isinstance(function, OpOverloadPacket):
        return "torch.ops." + function._qualified_op_name.replace("::", ".")
    name = _names().get(function, "")
    if name:
        return name
    if getattr(function, "__module__", "") == conversions.__name__:
        return f"{PARTS}.{function.__name__}"
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return f"{owner.__module__}.{owner.__qualname__}.apply"
    way = "call it through a module of torch, or wrap it in a torch.library custom op"
    if getattr(function, "__module__", "") == torch.nn.init.__name__:  # a module is made
        way = "make parameters in __init__, or run the model once before it is compiled"
    raise TraceError(f"the function {function!r} has no public name below torch", remedy=way)


@functools.lru_cache(maxsize=4096)
def resolve(target: str) -> Callable[..., Any]:
    """The callable that a function target names.

    Allowed are attributes of torch, operator and math, conversions of parts, and
    ``pkg.mod.Cls.apply`` of an autograd.Function whose module is imported already.

    Raises:
        SourceError: the name is not allowed or leads nowhere.
    """
    found = _find(target)
    if found is None or not callable(found):
        remedy = None
        if target.endswith(".apply"):
            remedy = "define this autograd.Function at the top of a module, and import that first"
        raise SourceError(f"no operator is called {target!r}", where=target, remedy=remedy)
    return found  # type: ignore[no-any-return]


def _find(target: str) -> Any:
    parts = target.split(".")
    if target in FROM_PARTS:
        return getattr(conversions, parts[-1])
    if parts[-1] == "apply":
        cls = _function_class(parts[:-1])
        return cls.apply if cls is not None else None
    if parts[:2] == ["torch", "ops"]:
        return _registered_op(parts[2:])
    prefix, _, name = target.rpartition(".")
    # vars: torch imports some of its modules where they are asked for by name
    value = vars(dict(NAMESPACES).get(prefix, object)).get(name)
    return value if value is not None and _is_operator(value) else None


def _registered_op(parts: list[str]) -> Any:
    value: Any = torch.ops
    for part in parts:
        value = getattr(value, part, None)
        if value is None or part.startswith("__"):
            return None
    op = isinstance(value, OpOverload | OpOverloadPacket)
    return value if op and "from_file" not in parts else None


@functools.cache
def _overridable() -> set[Any]:
    return set(torch.overrides.get_testing_overrides())


def _is_operator(value: Any) -> bool:
    """True if a function computes on tensors and numbers only: torch.load must not pass."""
    if value in (ASSERT, torch.autograd.grad):
        return True
    if value in _ARITHMETIC or value in _overridable():
        return True
    factory = getattr(VARIABLE_FUNCTIONS, getattr(value, "__name__", ""), None)
    return bool(factory == value and value != torch.from_file)


def _function_class(parts: list[str]) -> Any:
    for cut in range(len(parts) - 1, 0, -1):
        value: Any = sys.modules.get(".".join(parts[:cut]))
        for part in parts[cut:]:
            value = getattr(value, "__dict__", {}).get(part)
        if isinstance(value, type) and issubclass(value, torch.autograd.Function):
            return value
    return None


_LITERALS: dict[Any, Any] = {
    "dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format,
}  # fmt: skip


def literal(value: Any, own_device: torch.device | None = None) -> TorchLiteral:
    """The TorchLiteral for a torch dtype, device, layout or memory format.

    A device of the type that the model runs on is ``self``, so that a plan can move it.
    """
    if isinstance(value, torch.device):
        own = own_device is not None and value.type == own_device.type
        return TorchLiteral("device", "self" if own else str(value))
    kind = next(kind for kind, cls in _LITERALS.items() if isinstance(value, cls))
    return TorchLiteral(kind, str(value).removeprefix("torch."))


def from_literal(value: TorchLiteral, own_device: torch.device) -> Any:
    """The torch object that a TorchLiteral stands for, on the given device."""
    if value.kind == "device":
        try:
            return own_device if value.text == "self" else torch.device(value.text)
        except (RuntimeError, ValueError) as error:
            raise SourceError(f"torch has no device called {value.text!r}") from error
    found = vars(torch).get(value.text)
    if not isinstance(found, _LITERALS[value.kind]):
        raise SourceError(f"torch has no {value.kind} called {value.text!r}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")
