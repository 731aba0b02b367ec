"""Writes an OpGraph as strict JSON and reads it back; computes its fingerprint.

The pytree spec and the tensors of kind "constant" are not written: a graph that was read back can
be printed, compared, costed and planned, but not run.  A digest seals what is written: nobody edits
a graph, and one that was changed is no capture of anything.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
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
_NOT_SAVED = {"output_spec", "tensor_values", "sizes", "origin", "whole", "parts", "summed"}
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
    known = vars(graph)  # where its cached properties are
    if "fingerprint" in known:
        return str(known["fingerprint"])
    # The message of a check names a line of the model's source.
    ops = tuple(replace(op, args=op.args[:1]) if op.target == CHECK else op for op in graph.ops)
    # The name of what is left out is no part of what is computed.
    output = rewritten(graph.output, lambda part: None if isinstance(part, LeftOut) else part)
    record = _record(replace(graph, ops=ops, output=output), frozenset(_NOT_IN_FINGERPRINT))
    digest = hashlib.sha256(jsonio.canonical(record)).hexdigest()
    known["fingerprint"] = digest
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
    kind = tuple if isinstance(argument, tuple) else type(argument)
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"float": repr(argument)}
    if isinstance(argument, int) and abs(argument) >= 2**63:
        return {"int": str(argument)}
    if kind in _PLAIN:
        return argument
    if kind not in _WRITTEN_AS:
        raise PlanError(f"an argument of type {kind.__name__} cannot be saved")
    key, write = _WRITTEN_AS[kind]
    return {key: write(argument)}


def decode(data: Any) -> Argument:
    """The argument that `encode` wrote.

    Raises:
        LookupError, TypeError, ValueError: it did not write this.
    """
    if not isinstance(data, dict):
        return data
    ((key, content),) = data.items()
    return _READ_AS[key](content)


def _written_items(items: Iterable[Argument]) -> list[Any]:
    return [encode(item) for item in items]


def _items(content: Any) -> tuple[Any, ...]:
    return tuple(map(decode, content))


_PLAIN = frozenset((str, int, float, bool, type(None)))
#: the key of each class of arguments, what is written under it, and the argument read from that
_FORMS: tuple[tuple[str, type | None, Callable[[Any], Any], Callable[[Any], Argument]], ...] = (
    ("ref", Ref, lambda ref: ref.name, Ref),
    ("attr", Attr, lambda attr: attr.fqn, Attr),
    ("left_out", LeftOut, lambda leaf: leaf.name, LeftOut),
    ("affine", Affine, lambda n: [n.scale, n.offset, n.over], lambda content: Affine(*content)),
    ("torch", TorchLiteral, lambda x: [x.kind, x.text], lambda content: TorchLiteral(*content)),
    ("tuple", tuple, _written_items, _items),
    ("list", ListOf, lambda x: _written_items(x.items), lambda content: ListOf(_items(content))),
    ("dict", DictOf, lambda x: [[key, encode(item)] for key, item in x.items],
     lambda content: DictOf(tuple((key, decode(item)) for key, item in content))),
    ("slice", Slice, lambda x: _written_items((x.start, x.stop, x.step)),
     lambda content: Slice(*_items(content))),
    ("complex", complex, lambda n: _written_items((n.real, n.imag)),
     lambda content: complex(*_items(content))),
    ("ellipsis", EllipsisType, lambda _: True, lambda _: ...),
    ("float", None, repr, float),  # that is not finite
    ("int", None, str, int),  # of more than 63 bits
)  # fmt: skip
_WRITTEN_AS: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    kind: (key, write) for key, kind, write, _ in _FORMS
}
_READ_AS = {key: read for key, _, _, read in _FORMS}


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
