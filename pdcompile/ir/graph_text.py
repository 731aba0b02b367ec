"""Formats an OpGraph as readable text: one op a line, with shapes as comments."""

from __future__ import annotations

from collections.abc import Iterator
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
    Slice,
    TorchLiteral,
    Value,
)

if TYPE_CHECKING:
    from pdcompile.ir.graph import OpGraph

_SHORT = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64",
    "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8",
}  # fmt: skip
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
    if not value.is_tensor:
        return value.dtype
    sizes = ", ".join(str(size) for size in value.shape)
    return f"{_SHORT.get(value.dtype, value.dtype)}[{sizes}]"


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
        module = _section(op)
        if module != inside:
            inside = module
            yield f"  # {_section_title(graph, op)}"
        yield _with_comment(f"  {format_op(op)}", _facts(graph, op))
    yield f"  return {format_argument(graph.output)}"
    if graph.loss is not None:
        yield f"  # loss: {graph.loss}"
    for note in graph.notes:
        yield f"  # note: {note}"


def _section(op: Op) -> tuple[str, str]:
    """The heading that an op is shown under: the module whose forward calls it."""
    path = op.module_path
    if op.kind in ("module", "opaque"):
        path = path.rpartition(".")[0]
    return (op.region, path)


def _section_title(graph: OpGraph, op: Op) -> str:
    region, path = _section(op)
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
