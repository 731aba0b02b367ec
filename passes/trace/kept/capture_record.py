"""A kept capture: what it is, the files and values that it depends on, and its form in a file."""

from __future__ import annotations

import operator
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
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
from pdcompile.passes.trace.tape.observer import STANDARD, TORCH

SCHEMA = "pdcompile.capture/1"
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was when a model was captured."""

    path: str
    bytes: int
    changed_ns: int

    @property
    def is_same(self) -> bool:
        """Whether it is still so."""
        try:
            state = os.stat(self.path)
        except OSError:
            return False
        return (state.st_size, state.st_mtime_ns) == (self.bytes, self.changed_ns)


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


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph, with what its own JSON leaves out."""

    graph: Any
    sizes: SizeRange
    output: Any

    @staticmethod
    def of(graph: OpGraph) -> _Graph:
        output = structure_record.to_record(graph.output_spec)
        return _Graph(graph_json.to_record(graph), graph.sizes, output)

    def read(self, where: str) -> OpGraph:
        graph = graph_json.from_record(OpGraph, self.graph, where)
        try:
            output = structure_record.from_record(self.output)
        except structure_record.NotWritten as wrong:
            raise PlanError(str(wrong), where=where) from wrong
        return replace(graph, sizes=self.sizes, output_spec=output)


@dataclass(frozen=True, slots=True)
class _Document:
    """The file of a capture; `eval` is None where it is as `train`."""

    header: Header
    attributes: tuple[tuple[str, ...], ...]
    numbers: tuple[str, ...]
    by_values: bool
    of_device: tuple[str, ...]
    train: _Graph
    eval: _Graph | None


def to_bytes(header: Header, found: Capture) -> bytes:
    """The file of a capture.  Raises NotWritten: its output has no form in a file."""
    same = replace(found.eval, training=found.train.training) == found.train
    same = same and found.eval.output_spec == found.train.output_spec
    same = same and found.eval.sizes == found.train.sizes
    evaluation = None if same else _Graph.of(found.eval)
    return msgspec.json.encode(_Document(
        header, found.attributes, found.numbers, found.by_values, found.of_device,
        _Graph.of(found.train), evaluation,
    ))  # fmt: skip


def from_bytes(data: bytes, where: str) -> tuple[Header, Capture]:
    """What `to_bytes` wrote.  Raises PlanError: it is no capture."""
    document = jsonio.decode(_Document, jsonio.loads(data, where=where), where=where)
    if document.header.schema != SCHEMA:
        raise PlanError(f"not a capture of format {SCHEMA}", where=where)
    train = document.train.read(f"{where}: train")
    if document.eval is None:
        evaluation = replace(train, training=not train.training)
    else:
        evaluation = document.eval.read(f"{where}: eval")
    return document.header, Capture(
        train, evaluation, document.attributes, document.numbers, document.by_values,
        of_device=document.of_device,
    )  # fmt: skip


def number_digests(model: nn.Module, names: tuple[str, ...]) -> tuple[tuple[str, str], ...] | None:
    """Digests of the model's tensors of these names; None where one of them is not there."""
    found: list[tuple[str, str]] = []
    for fqn in names:
        try:
            tensor = operator.attrgetter(fqn)(model)
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


def loaded_files() -> tuple[SourceFile, ...]:
    """The files of all modules of this process, without those of Python and torch, which their
    versions stand for."""
    found: dict[str, SourceFile] = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or path in found or path.startswith(TORCH):
            continue
        if path.startswith(STANDARD) and "-packages" not in path:
            continue
        try:
            state = os.stat(path)
        except OSError:  # in an archive
            continue
        found[path] = SourceFile(os.path.abspath(path), state.st_size, state.st_mtime_ns)
    return tuple(found[path] for path in sorted(found))


def changed_since_start(files: tuple[SourceFile, ...]) -> str | None:
    """The path of a file that is younger than this process, whose modules may be older then."""
    start = started_ns()
    return next((one.path for one in files if one.changed_ns >= start), None)


def started_ns() -> int:
    """When this process started, in nanoseconds since 1970."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    up = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    return time.time_ns() - int((up - int(fields[19]) / _TICKS) * 1e9)
