"""A kept capture: what it was found to be, what it depends on, and its form in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch import Tensor, nn

from pdcompile import jsonio
from pdcompile.batch import FlatCall
from pdcompile.errors import PlanError
from pdcompile.ir import graph_json
from pdcompile.ir.graph import Capture, OpGraph, SizeRange
from pdcompile.passes.trace.kept import structure_record
from pdcompile.passes.trace.kept.description import digest_of_values
from pdcompile.passes.trace.kept.source_files import SourceFile

SCHEMA = "pdcompile.capture/1"


@dataclass(frozen=True, slots=True)
class Header:
    """What a kept capture depends on besides its key, and what was said when it was made.

    `captured` is a date and time in UTC.  `numbers` are digests of the tensors whose values are
    Python numbers in the capture; `example` is that of the example's, "" where only their shapes
    count.
    """

    key: str
    captured: str
    seconds: float
    files: tuple[SourceFile, ...]
    numbers: tuple[tuple[str, str], ...]
    example: str
    warnings: tuple[str, ...]
    schema: str = SCHEMA


def to_bytes(header: Header, found: Capture) -> bytes:
    """The file of a capture.  Raises NotWritten: its output has no form in a file."""
    same = replace(found.eval, training=found.train.training) == found.train
    same = same and found.eval.output_spec == found.train.output_spec
    same = same and found.eval.sizes == found.train.sizes
    document = {
        "header": jsonio.encode(header),
        "attributes": [list(place) for place in found.attributes],
        "numbers": list(found.numbers),
        "by_values": found.by_values,
        "of_device": list(found.of_device),
        "train": _graph_record(found.train),
        "eval": None if same else _graph_record(found.eval),
    }
    return msgspec.json.encode(document)


def from_bytes(data: bytes, where: str) -> tuple[Header, Capture]:
    """What `to_bytes` wrote.  Raises PlanError: it is no capture."""
    document = jsonio.loads(data, where=where)
    names = {"header", "attributes", "numbers", "by_values", "of_device", "train", "eval"}
    if not isinstance(document, dict) or set(document) != names:
        raise PlanError("not a capture", where=where)
    header = jsonio.decode(Header, document["header"], where=where)
    if header.schema != SCHEMA:
        raise PlanError(f"not a capture of format {SCHEMA}", where=where)
    try:
        attributes = msgspec.convert(document["attributes"], tuple[tuple[str, ...], ...])
        numbers = msgspec.convert(document["numbers"], tuple[str, ...])
        by_values = msgspec.convert(document["by_values"], bool)
        of_device = msgspec.convert(document["of_device"], tuple[str, ...])
    except msgspec.ValidationError as wrong:
        raise PlanError(str(wrong).lower(), where=where) from wrong
    train = _graph(document["train"], f"{where}: train")
    other = document["eval"]
    evaluation = (
        replace(train, training=not train.training)
        if other is None
        else _graph(other, f"{where}: eval")
    )
    return header, Capture(train, evaluation, attributes, numbers, by_values, of_device=of_device)


def number_digests(model: nn.Module, names: tuple[str, ...]) -> tuple[tuple[str, str], ...] | None:
    """Digests of the model's tensors of these names; None where one of them is not there."""
    found: list[tuple[str, str]] = []
    for fqn in names:
        path, _, name = fqn.rpartition(".")
        try:
            tensor = getattr(model.get_submodule(path), name)
        except AttributeError:
            return None
        if not isinstance(tensor, Tensor):
            return None
        found.append((fqn, digest_of_values(tensor)))
    return tuple(found)


def example_digest(flat: FlatCall) -> str:
    """A text that is equal for examples of equal values."""
    leaves: Mapping[str, Any] = flat.leaves
    tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    return "; ".join(f"{path} {digest_of_values(leaf)}" for path, leaf in tensors.items())


def _graph_record(graph: OpGraph) -> dict[str, Any]:
    return {
        "graph": graph_json.to_record(graph),
        "sizes": jsonio.encode(graph.sizes),
        "output": structure_record.to_record(graph.output_spec),
    }


def _graph(data: Any, where: str) -> OpGraph:
    if not isinstance(data, dict) or set(data) != {"graph", "sizes", "output"}:
        raise PlanError("not a captured graph", where=where)
    graph = graph_json.from_record(OpGraph, data["graph"], where)
    try:
        output = structure_record.from_record(data["output"])
    except structure_record.NotWritten as wrong:
        raise PlanError(str(wrong), where=where) from wrong
    sizes = jsonio.decode(SizeRange, data["sizes"], where=where)
    return replace(graph, sizes=sizes, output_spec=output)
