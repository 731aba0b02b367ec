"""Arguments and ops as Python expressions.

Identifiers are ours.  Whatever comes from a model appears as a literal of a built-in type that
is written here, or as a target that `pdcompile.ir.targets` resolves; everything else is refused.
"""

from __future__ import annotations

import ast
import functools
import inspect
import keyword
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pdcompile.errors import SourceError
from pdcompile.hardware import devices
from pdcompile.ir.graph import Affine, Attr, DictOf, ListOf, Op, Ref, Slice, TorchLiteral
from pdcompile.ir.graph_text import BINARY
from pdcompile.ir.targets import from_literal, resolve

UNARY = {"neg": "-", "invert": "~", "pos": "+", "not_": "not "}
IN_PLACE = {
    "iadd": "+=", "isub": "-=", "imul": "*=", "itruediv": "/=", "ifloordiv": "//=",
    "imod": "%=", "ipow": "**=", "imatmul": "@=", "iand": "&=", "ior": "|=", "ixor": "^=",
    "ilshift": "<<=", "irshift": ">>=",
}  # fmt: skip

_NUMBER = re.compile(r"\d+(\.\d*)?(e[-+]?\d+)?")
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Named:
    """A number that differs between the instances of a class: an argument of its constructor."""

    name: str


@dataclass(frozen=True, slots=True)
class Scope:
    """Writers of the parts that depend on the place in the source."""

    value: Callable[[str], str]  # the variable of a value
    tensor: Callable[[str], str]  # the expression of a tensor of the model
    size: Callable[[Affine], str]
    device: Callable[[], str]
    module: Callable[[str], str]  # the expression of a module, by FQN
    function: Callable[[str], str]  # the expression of a function target
    named: Callable[[str], str] = "self.{}".format  # of an argument of the constructor


def quote(text: str) -> str:
    """A string literal, in double quotes where that needs no escape."""
    plain = repr(text)
    if plain[0] == "'" and '"' not in plain and "\\'" not in plain:
        return f'"{plain[1:-1]}"'
    return plain


def literal(value: Any, scope: Scope) -> str:
    """An argument as source.  Raises SourceError for a type that has no literal."""
    kind = type(value)  # exactly: a subclass could print anything
    if kind is Ref:
        return scope.value(value.name)
    if kind is Attr:
        return scope.tensor(value.fqn)
    if kind is Affine:
        return scope.size(value)
    if kind is TorchLiteral:
        return torch_literal(value, scope)
    if kind is Named:
        return scope.named(value.name)
    if kind is tuple:
        items = [literal(each, scope) for each in value]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if kind is ListOf:
        return f"[{', '.join(literal(each, scope) for each in value.items)}]"
    if kind is DictOf:
        pairs = (f"{literal(key, scope)}: {literal(each, scope)}" for key, each in value.items)
        return f"{{{', '.join(pairs)}}}"
    if kind is Slice:
        parts = (value.start, value.stop, value.step)
        return f"slice({', '.join(literal(part, scope) for part in parts)})"
    return plain(value)


def plain(value: Any) -> str:
    """None, Ellipsis, a bool, number or string as a literal."""
    kind = type(value)
    if value is None or kind is bool or kind is int:
        return repr(value)
    if value is Ellipsis:
        return "..."
    if kind is str:
        return quote(value)
    if kind is float:
        if math.isnan(value):  # of which repr does not show the sign
            return "-" * (math.copysign(1, value) < 0) + 'float("nan")'
        return repr(value).replace("e+", "e") if math.isfinite(value) else f'float("{value}")'
    if kind is complex:
        return f"complex({plain(value.real)}, {plain(value.imag)})"
    raise SourceError(
        f"an argument of type {kind.__module__}.{kind.__qualname__} cannot be written as source",
        remedy="pass a number, a string, a tensor or a (nested) list or tuple of them",
    )


def torch_literal(value: TorchLiteral, scope: Scope) -> str:
    if value.kind == "device":
        if value.text == "self":
            return scope.device()
        try:
            return f"torch.device({quote(str(torch.device(value.text)))})"
        except RuntimeError as error:
            raise SourceError(f"{value.text!r} is not a device") from error
    from_literal(value, devices.HOST)  # it exists and is of its kind
    return f"torch.{value.text}"


def dual(train: Any, evaluation: Any, scope: Scope) -> str:
    """An argument that may differ between training and evaluation."""
    first = literal(train, scope)
    second = literal(evaluation, scope)
    if first == second:
        return first
    if (first, second) == ("True", "False"):
        return "self.training"
    if (first, second) == ("False", "True"):
        return "not self.training"
    return f"{first} if self.training else {second}"


def atom(text: str, *, dotted: bool = False) -> str:
    """The expression, in parentheses where an operator beside it could tear it apart.

    `dotted`: an attribute or subscript follows, which a bare number does not take.
    """
    return text if text.isidentifier() or _is_closed(text, dotted) else f"({text})"


@functools.lru_cache(maxsize=4096)
def _is_closed(text: str, dotted: bool) -> bool:
    """True if the expression is a call, subscript, attribute or literal, without an operator."""
    node = ast.parse(text, mode="eval").body
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bool | None) or not dotted
    return isinstance(node, ast.Call | ast.Subscript | ast.Attribute | ast.List | ast.Dict) or (
        text.startswith("(") and isinstance(node, ast.Tuple)
    )


def call(head: str, arguments: list[str]) -> str:
    return f"{head}({', '.join(arguments)})"


def arguments(op: Op, twin: Op | None, scope: Scope, skip: int = 0) -> list[str]:
    """Positional and keyword arguments of a call, in order."""
    other = twin or op
    found = [dual(a, b, scope) for a, b in zip(op.args[skip:], other.args[skip:], strict=True)]
    for (key, a), (_, b) in zip(op.kwargs, other.kwargs, strict=True):
        if is_default(op, key, a) and is_default(op, key, b):
            continue
        text = dual(a, b, scope)
        if key.isascii() and key.isidentifier() and not keyword.iskeyword(key):
            found.append(f"{key}={text}")
        else:
            found.append(f"**{{{quote(key)}: {text}}}")
    return found


def subscript(index: Any, other: Any, scope: Scope) -> str:
    """The text between the brackets of ``x[…]``."""
    if type(index) is tuple and type(other) is tuple and index and len(index) == len(other):
        parts = [subscript_part(a, b, scope) for a, b in zip(index, other, strict=True)]
        return f"{parts[0]}," if len(parts) == 1 else ", ".join(parts)
    return subscript_part(index, other, scope)


def subscript_part(index: Any, other: Any, scope: Scope) -> str:
    if type(index) is Slice and type(other) is Slice:
        start, stop, step = (
            "" if a is None and b is None else dual(a, b, scope)
            for a, b in (
                (index.start, other.start), (index.stop, other.stop), (index.step, other.step),
            )
        )  # fmt: skip
        return f"{start}:{stop}" + (f":{step}" if step else "")
    return dual(index, other, scope)


def tensor_attribute(name: str, *, method: bool) -> str:
    """The name of a method or property that Tensor really has.  Raises SourceError."""
    found = getattr(torch.Tensor, name, None)
    if name.startswith("__") or not name.isidentifier() or found is None or (
        callable(found) is not method
    ):  # fmt: skip
        raise SourceError(f"Tensor has no {'method' if method else 'property'} {name!r}")
    return name


def expression(op: Op, twin: Op | None, scope: Scope) -> str:
    """The right-hand side for one op, in training and, with a twin, in evaluation."""
    if op.kind in ("module", "opaque"):
        head = scope.module(op.module_path)
        return call(head, arguments(op, twin, scope))
    receiver = atom(literal(op.args[0], scope), dotted=True) if op.args else ""
    if op.kind == "method":
        head = f"{receiver}.{tensor_attribute(op.target, method=True)}"
        return call(head, arguments(op, twin, scope, skip=1))
    if op.kind == "getattr":
        return f"{receiver}.{tensor_attribute(op.target, method=False)}"
    other = twin or op
    name = op.target.removeprefix("operator.") if op.target.startswith("operator.") else ""
    if name == "getitem" and len(op.args) == 2:
        return f"{receiver}[{subscript(op.args[1], other.args[1], scope)}]"
    operands = arguments(op, twin, scope)
    if name in BINARY and len(operands) == 2:
        negative = operands[1].startswith("-") and _NUMBER.fullmatch(operands[1][1:])
        right = operands[1] if negative else atom(operands[1])
        return f"{atom(operands[0])} {BINARY[name]} {right}"
    if name in UNARY and len(operands) == 1:
        return f"{UNARY[name]}{atom(operands[0])}"
    return call(scope.function(op.target), operands)


def rough(op: Op, twin: Op | None, scope: Scope) -> str:
    """An op's expression before the variables have their final names, to measure its width."""
    if op.target.removeprefix("operator.") in {*IN_PLACE, "setitem"}:
        return ", ".join(literal(argument, scope) for argument in op.args)
    return expression(op, twin, scope)


def is_default(op: Op, key: str, value: Any) -> bool:
    """True if ``key=value`` is what the function assumes without it."""
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
        return _MISSING  # refused where the call is written
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
