"""Writes an OpGraph as strict JSON and reads it back; computes its fingerprint.

The pytree spec and the tensors of kind "constant" are not written: a graph that was read back can
be printed, compared, costed and planned, but not run.  A digest seals what is written: nobody edits
a graph, and one that was changed is no capture of anything.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from functools import cache
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import msgspec

from pdcompile import jsonio
from pdcompile.errors import PlanError
from pdcompile.ir.records import (
    CHECK,
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
)

if TYPE_CHECKING:
    from pdcompile.ir.graph import OpGraph

VERSION = 2
REMEDY = "write it anew: OpGraph.to_json"
_ARGUMENT_FIELDS = {"args", "kwargs", "constructor", "output", "shape"}
_NOT_SAVED = {"output_spec", "tensor_values", "sizes", "origin", "whole"}
# Fields that do not change the computation.
_NOT_IN_FINGERPRINT = {
    "source", "variable", "cost", "flops", "saved_bytes", "batch_size", "classes", "notes",
    "passed",
}  # fmt: skip
# Fields that hold records, by the class of these.
_KINDS: dict[str, Any] = {"ops": Op, "values": Value, "inputs": GraphInput, "tensors": TensorInfo}
_KEYS = {"values": "name", "tensors": "fqn"}  # of those that are dicts


def to_record(graph: OpGraph) -> dict[str, Any]:
    """The graph as plain values for a document that holds it."""
    record = _record(graph, frozenset())
    return {"version": VERSION, "digest": _digest(record), **record}


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(record, order="sorted")).hexdigest()


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


def from_record(kind: type[OpGraph], data: Any, where: str) -> OpGraph:
    """The graph that `to_record` wrote.

    Raises:
        PlanError: the data is not a graph, or was changed since.
    """
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise PlanError(f"not a graph of format version {VERSION}", where=where, remedy=REMEDY)
    record = {name: part for name, part in data.items() if name not in ("version", "digest")}
    if data.get("digest") != _digest(record):
        raise PlanError("the graph was changed since it was written", where=where, remedy=REMEDY)
    try:
        graph: OpGraph = _rebuild(kind, record)
    except (TypeError, ValueError, LookupError, msgspec.ValidationError) as wrong:
        raise PlanError(f"not a graph: {wrong}", where=where, remedy=REMEDY) from wrong
    return graph


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


def decode(data: Any) -> Argument:
    """The argument that `encode` wrote.

    Raises:
        LookupError, TypeError, ValueError: it did not write this.
    """
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    return _DECODED[kind](content)


def _items(content: Any) -> tuple[Any, ...]:
    return tuple(map(decode, content))


_DECODED: dict[str, Callable[[Any], Argument]] = {
    "float": float,
    "int": int,
    "complex": lambda content: complex(*_items(content)),
    "ellipsis": lambda _: ...,
    "affine": lambda content: Affine(*content),
    "ref": Ref,
    "attr": Attr,
    "left_out": LeftOut,
    "torch": lambda content: TorchLiteral(*content),
    "list": lambda content: ListOf(_items(content)),
    "tuple": _items,
    "dict": lambda content: DictOf(tuple((key, decode(item)) for key, item in content)),
    "slice": lambda content: Slice(*_items(content)),
}


def _rebuild(kind: Any, record: dict[str, Any]) -> Any:
    hints = jsonio.hints_of(kind)
    built: dict[str, Any] = {}
    for name, part in record.items():
        if name in _KINDS:
            items = [_rebuild(_KINDS[name], item) for item in part]
            key = _KEYS.get(name)
            built[name] = tuple(items) if key is None else {getattr(i, key): i for i in items}
        elif name in _ARGUMENT_FIELDS:
            built[name] = decode(part)
        else:
            built[name] = msgspec.convert(part, hints[name])
    return kind(**built)
