"""Formats an OpGraph as readable text: one op a line, with shapes as comments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pdcompile.ir.records import (
    CHECK,
    Affine,
    Argument,
    Attr,
    DictOf,
    LeftOut,
    ListOf,
    Op,
    Ref,
    Size,
    Slice,
    TorchLiteral,
    Value,
)

if TYPE_CHECKING:
    from pdcompile.ir.graph import OpGraph

_LETTERS = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}
BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "matmul": "@", "and_": "&", "or_": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
_WIDTH = 64


def format_graph(graph: OpGraph) -> str:
    """The text of a graph; equal graphs have equal text."""
    return "\n".join(_lines(graph)) + "\n"


def format_op(op: Op) -> str:
    """``add = x + 1``, in Python's notation."""
    arguments = [format_argument(argument) for argument in op.args]
    if op.kind == "function" and op.target.startswith("operator.") and not op.kwargs:
        return _format_operator(op, op.target.removeprefix("operator."), arguments)
    if op.kind == "getattr":
        return f"{op.name} = {arguments[0]}.{op.target}"
    arguments += [f"{name}={format_argument(argument)}" for name, argument in op.kwargs]
    if op.kind == "method":
        return f"{op.name} = {arguments[0]}.{op.target}({', '.join(arguments[1:])})"
    if op.target == CHECK:
        return f"{op.target}({', '.join(arguments)})"
    function = op.target.removeprefix("torch.nn.functional.")
    if op.kind in ("module", "opaque"):
        function = f"self.{op.module_path}"
    return f"{op.name} = {function}({', '.join(arguments)})"


def _format_operator(op: Op, name: str, arguments: list[str]) -> str:
    index = arguments[1].removeprefix("(").removesuffix(")") if len(arguments) > 1 else ""
    if name == "getitem":
        return f"{op.name} = {arguments[0]}[{index}]"
    if name == "setitem":
        return f"{arguments[0]}[{index}] = {arguments[2]}"
    if name in BINARY and len(arguments) == 2:
        return f"{op.name} = {arguments[0]} {BINARY[name]} {arguments[1]}"
    return f"{op.name} = operator.{name}({', '.join(arguments)})"


def format_value(value: Value) -> str:
    """``f32[b, 16]``, or ``container``."""
    return format_shape(value.shape, value.dtype) if value.is_tensor else value.dtype


def format_shape(shape: Iterable[Size | str], dtype: str) -> str:
    """``f32[b, 16, 32]``."""
    short = re.sub(rf"^({'|'.join(_LETTERS)})", lambda kind: _LETTERS[kind[1]], dtype)
    return f"{short}[{', '.join(map(str, shape))}]"


def format_argument(argument: Argument) -> str:
    """An argument as Python would write it; ``b`` is the microbatch size."""
    match argument:
        case Ref(name):
            return name
        case Attr(fqn):
            return f"self.{fqn}"
        case LeftOut(name):
            return f"<{name} left out>"
        case Affine():
            return str(argument)
        case TorchLiteral("device", "self"):
            return "self.device"
        case TorchLiteral(_, text):
            return f"torch.{text}"
        case ListOf(items):
            return f"[{', '.join(map(format_argument, items))}]"
        case DictOf(items):
            return "{" + ", ".join(f"{k!r}: {format_argument(v)}" for k, v in items) + "}"
        case Slice(start, stop, step):
            parts = [start, stop] if step is None else [start, stop, step]
            return ":".join("" if part is None else format_argument(part) for part in parts)
        case tuple():
            inner = ", ".join(map(format_argument, argument))
            return f"({inner},)" if len(argument) == 1 else f"({inner})"
    return "..." if argument is ... else repr(argument)


def _lines(graph: OpGraph) -> Iterator[str]:
    mode = "train" if graph.training else "eval"
    inputs = ", ".join(entry.name for entry in graph.inputs)
    yield f"graph {mode}({inputs}):  # {len(graph.ops)} ops, {_tensors(graph)}"
    for entry in graph.inputs:
        split = "not split" if entry.batch_dim is None else f"split along dim {entry.batch_dim}"
        text = f"{entry.name}: {format_value(graph.values[entry.name])}"
        yield _with_comment(f"  {text}", f"input {entry.path}, {split}")
    inside: tuple[str, str] | None = None
    for op in graph.ops:
        if (section := (op.region, op.scope)) != inside:
            inside = section
            yield f"  # {_section_title(graph, *section)}"
        yield _with_comment(f"  {format_op(op)}", _facts(graph, op))
    yield f"  return {format_argument(graph.output)}"
    if graph.loss is not None:
        yield f"  # loss: {graph.loss}"
    for note in graph.notes:
        yield f"  # note: {note}"


def _section_title(graph: OpGraph, region: str, path: str) -> str:
    """The heading of ops: the module whose forward calls them."""
    if region == "loss":
        return "loss_fn"
    name, source = graph.classes.get(path, ("", ""))
    return f"{path or 'the model'} ({name.rpartition('.')[2]}, {source})"


def _facts(graph: OpGraph, op: Op) -> str:
    facts: list[Any] = [format_value(graph.values[op.name])]
    if op.draw is not None:
        facts.append(f"draw {op.draw}")
    if op.mutates or op.buffers_written:
        facts.append(f"writes {', '.join((*op.mutates, *op.buffers_written))}")
    if not op.grad_enabled:
        facts.append("no_grad")
    if op.autocast is not None:
        facts.append(f"autocast {op.autocast}")
    if op.source:
        facts.append(op.source)
    return ", ".join(facts)


def _tensors(graph: OpGraph) -> str:
    count = sum(info.kind == "parameter" for info in graph.tensors.values())
    total = sum(info.bytes for info in graph.tensors.values())
    return f"{count} parameters, {total} bytes in all tensors"


def _with_comment(text: str, comment: str) -> str:
    return f"{text:<{_WIDTH}}  # {comment}"
