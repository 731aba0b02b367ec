"""Writes an OpGraph as strict JSON and reads it back; computes its fingerprint.

The pytree spec and the tensors of kind "constant" are not written: a graph that was read back can
be printed, compared, costed and planned, but not run.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from functools import cache
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import msgspec

from pdcompile import jsonio
from pdcompile.errors import PlanError
from pdcompile.ir.records import (
    CHECK,
    DTYPE_BYTES,
    Affine,
    Argument,
    Attr,
    DictOf,
    GraphInput,
    LeftOut,
    ListOf,
    Op,
    Ref,
    Slice,
    TensorInfo,
    TorchLiteral,
    Value,
    rewritten,
    walk,
)

if TYPE_CHECKING:
    from pdcompile.ir.graph import OpGraph

VERSION = 1
_ARGUMENT_FIELDS = {"args", "kwargs", "constructor", "output", "shape"}
_NOT_SAVED = {"output_spec", "tensor_values", "sizes", "origin", "whole"}
# Fields that do not change the computation.
_NOT_IN_FINGERPRINT = {
    "source", "variable", "cost", "flops", "saved_bytes", "batch_size", "classes", "notes",
    "passed",
}  # fmt: skip
# Fields that hold records, by the class of these.
_KINDS: dict[str, Any] = {"ops": Op, "values": Value, "inputs": GraphInput, "tensors": TensorInfo}


def to_json(graph: OpGraph) -> str:
    """The graph as readable JSON; `from_json` gives an equal graph."""
    return jsonio.dumps(to_record(graph))


def to_record(graph: OpGraph) -> dict[str, Any]:
    """The graph as plain values for a document that holds it."""
    return {"version": VERSION, **_record(graph, frozenset())}


def fingerprint(graph: OpGraph) -> str:
    """Hex digest of the computation: equal for equal models, whatever file they are in.

    Names, shapes, dtypes, arguments and the mode count; source lines, costs and the microbatch
    size of the capture do not.
    """
    try:
        return graph._fingerprint
    except AttributeError:
        pass
    # The message of a check names a line of the model's source.
    ops = tuple(replace(op, args=op.args[:1]) if op.target == CHECK else op for op in graph.ops)
    # The name of what is left out is no part of what is computed.
    output = rewritten(graph.output, lambda part: None if isinstance(part, LeftOut) else part)
    record = _record(replace(graph, ops=ops, output=output), frozenset(_NOT_IN_FINGERPRINT))
    digest = hashlib.sha256(jsonio.canonical_tree(record)).hexdigest()
    object.__setattr__(graph, "_fingerprint", digest)
    return digest


def from_json(kind: type[OpGraph], text: str | bytes, *, where: str = "graph.json") -> OpGraph:
    """The graph that `to_json` wrote.

    Raises:
        PlanError: the text is not a graph; names the place in it.
    """
    data = jsonio.loads(text, where=where, remedy="write it anew: OpGraph.to_json")
    return from_record(kind, data, where)


def from_record(kind: type[OpGraph], data: Any, where: str) -> OpGraph:
    """The graph that `to_record` wrote; raises PlanError as `from_json`."""
    if not isinstance(data, dict) or data.pop("version", None) != VERSION:
        raise PlanError(f"not a graph of format version {VERSION}", where=where)
    graph: OpGraph = _rebuild(kind, data, where)
    for place, message in _nonsense(graph):
        raise PlanError(message, where=f"{where}: {place}", remedy="write the graph again")
    return graph


def _nonsense(graph: OpGraph) -> Iterator[tuple[str, str]]:
    """Contradictions in a graph: (place, message)."""
    if graph.batch_size < 1:
        yield "batch_size", f"{graph.batch_size} samples"
    for name, value in graph.values.items():
        if value.is_tensor and value.dtype not in DTYPE_BYTES:
            yield "values", f"{name!r} has the unknown dtype {value.dtype!r}"
    for name, info in graph.tensors.items():
        if info.dtype not in DTYPE_BYTES or any(type(n) is not int or n < 0 for n in info.shape):
            yield "tensors", f"{name!r} is {info.dtype} {info.shape}"
    made = {entry.name for entry in graph.inputs}
    for name in made - graph.values.keys():
        yield "inputs", f"{name!r} is not a value"
    for i, op in enumerate(graph.ops):
        place = f"ops[{i}]"
        if op.name in made:
            yield place, f"the name {op.name!r} is there twice"
        if op.name not in graph.values:
            yield place, f"op {op.name!r} makes what is not a value"
        for name in op.inputs:
            if name not in made:
                yield place, f"op {op.name!r} reads {name!r}, which nothing before it makes"
        for name in op.mutates:
            if name not in graph.values:
                yield place, f"op {op.name!r} writes {name!r}, which is not a value"
        if len(op.args) < _LEAST_ARGUMENTS.get(op.kind, _LEAST_ARGUMENTS.get(op.target, 0)):
            yield place, f"op {op.name!r} has {len(op.args)} arguments"
        made.add(op.name)
    loss = () if graph.loss is None else (graph.loss,)
    for name in (*loss, *(ref.name for ref in walk(graph.output, Ref))):
        if name not in made:
            yield "output", f"{name!r} is not a value"


_LEAST_ARGUMENTS = {"method": 1, "getattr": 1, "operator.getitem": 2, "operator.setitem": 3}


def _record(value: Any, without: frozenset[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    kind: Any = type(value)
    for name, default in _written(kind, without):
        part = getattr(value, name)
        if name in _KINDS:
            if isinstance(part, dict):
                found[name] = [_record(item, without) for item in part.values()]
            else:
                found[name] = [_record(item, without) for item in part]
        elif name in _ARGUMENT_FIELDS:
            found[name] = encode(part)
        elif default is MISSING or part != default:
            found[name] = jsonio.encode(part)
    return found


@cache
def _written(kind: Any, without: frozenset[str]) -> tuple[tuple[str, Any], ...]:
    """Name and default of each field that is written."""
    left_out = _NOT_SAVED | without
    return tuple((f.name, f.default) for f in fields(kind) if f.name not in left_out)


def encode(argument: Argument) -> Any:
    """JSON for an argument: plain scalars, and one-key objects for everything else."""
    if type(argument) is str or argument is None:
        return argument
    if type(argument) is Ref:
        return {"ref": argument.name}
    match argument:
        case float() if not math.isfinite(argument):
            return {"float": repr(argument)}
        case int() if abs(argument) >= 2**63:
            return {"int": str(argument)}
        case None | bool() | int() | float() | str():
            return argument
        case complex():
            return {"complex": [encode(argument.real), encode(argument.imag)]}
        case EllipsisType():
            return {"ellipsis": True}
        case Affine(scale, offset):
            return {"affine": [scale, offset]}
        case Attr(fqn):
            return {"attr": fqn}
        case LeftOut(name):
            return {"left_out": name}
        case TorchLiteral(kind, text):
            return {"torch": [kind, text]}
        case ListOf(items):
            return {"list": [encode(item) for item in items]}
        case tuple():
            return {"tuple": [encode(item) for item in argument]}
        case DictOf(items):
            return {"dict": [[key, encode(item)] for key, item in items]}
        case Slice(start, stop, step):
            return {"slice": [encode(part) for part in (start, stop, step)]}
    raise PlanError(f"an argument of type {type(argument).__name__} cannot be saved")


def decode(data: Any, where: str) -> Argument:
    """The argument that `encode` wrote; raises PlanError for anything else."""
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if not isinstance(data, dict) or len(data) != 1:
        raise PlanError("not an argument: expected an object with one key", where=where)
    ((kind, content),) = data.items()
    match kind, content:
        case "float", "nan" | "inf" | "-inf":
            return float(content)
        case "int", str() if re.fullmatch(r"-?[0-9]{1,400}", content):
            return int(content)
        case "complex", [real, imaginary]:
            parts = [decode(part, where) for part in (real, imaginary)]
            numbers = [part for part in parts if isinstance(part, int | float)]
            if len(numbers) == 2:
                return complex(*numbers)
        case "ellipsis", True:
            return ...
        case "affine", [int(scale), int(offset)]:
            return Affine(scale, offset)
        case "ref", str():
            return Ref(content)
        case "attr", str():
            return Attr(content)
        case "left_out", str():
            return LeftOut(content)
        case "torch", ["dtype" | "device" | "layout" | "memory_format" as what, str(text)]:
            return TorchLiteral(what, text)
        case "list", list():
            return ListOf(tuple(decode(item, where) for item in content))
        case "tuple", list():
            return tuple(decode(item, where) for item in content)
        case "dict", list() if all(_is_pair(item) for item in content):
            return DictOf(tuple((key, decode(item, where)) for key, item in content))
        case "slice", [start, stop, step]:
            return Slice(*(decode(part, where) for part in (start, stop, step)))
    raise PlanError(f"not an argument: {str(data)[:80]}", where=where)


def _is_pair(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)


def _rebuild(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise PlanError(f"expected a {kind.__name__}", where=where)
    hints = jsonio.hints_of(kind)
    known = {entry.name for entry in fields(kind)} - _NOT_SAVED
    unknown = sorted(set(data) - known)
    if unknown:
        raise PlanError(f"unknown key {unknown[0]!r}", where=where)
    built: dict[str, Any] = {}
    for name, part in data.items():
        place = f"{where}: {name}"
        if name in _KINDS:
            if not isinstance(part, list):
                raise PlanError("expected a list", where=place)
            items = [_rebuild(_KINDS[name], x, f"{place}[{i}]") for i, x in enumerate(part)]
            built[name] = _keyed(name, items, place)
        elif name in _ARGUMENT_FIELDS:
            built[name] = _checked(name, decode(part, place), place)
        else:
            try:
                built[name] = msgspec.convert(part, hints[name])
            except msgspec.ValidationError as wrong:
                raise PlanError(str(wrong).lower(), where=place) from wrong
    try:
        return kind(**built)
    except TypeError as wrong:
        raise PlanError(f"incomplete: {wrong}", where=where) from wrong


def _checked(name: str, argument: Argument, where: str) -> Argument:
    """The argument; raises PlanError unless it has the form of this field."""
    items = argument if isinstance(argument, tuple) else None
    if name == "output" or (name == "args" and items is not None):
        return argument
    if name == "shape" and items is not None:
        if all(type(item) is int or isinstance(item, Affine) for item in items):
            return argument
    elif items is not None and name != "args":
        pairs = [item for item in items if isinstance(item, tuple) and len(item) == 2]
        if len(pairs) == len(items) and all(isinstance(key, str) for key, _ in pairs):
            return argument
    form = {"args": "of arguments", "shape": "of sizes"}.get(name, "of (name, argument) pairs")
    raise PlanError(f"expected a tuple {form}", where=where)


def _keyed(name: str, items: list[Any], where: str) -> Any:
    key = {"values": "name", "tensors": "fqn"}.get(name)
    if key is None:
        return tuple(items)
    found: dict[str, Any] = {}
    for item in items:
        if found.setdefault(getattr(item, key), item) is not item:
            raise PlanError(f"{getattr(item, key)!r} is there twice", where=where)
    return found
