"""The capture beside a plan: written by `plan -o`, read by verbs that neither train nor verify.

Nobody can tell from outside all that a model's forward depends on, so whatever trains or verifies
captures anew.  The file has the ops of both modes, enough to write stages, and not the structure of
the model's output: what is read cannot be run.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch

import pdcompile
from pdcompile import jsonio
from pdcompile.errors import ConfigError, PdcompileError, errors_as
from pdcompile.files import read_limited, write_whole
from pdcompile.ir import graph_json
from pdcompile.ir.graph import Capture, OpGraph, fingerprint, size_at
from pdcompile.ir.targets import dtype_name
from pdcompile.passes.trace import attached
from pdcompile.passes.trace.subject import CaptureCall
from pdcompile.passes.trace.tape.observer import is_user
from pdcompile.plan import Plan

SCHEMA = "pdcompile.capture/5"


def made_with() -> str:
    """The versions that a capture is of."""
    return f"pdcompile {pdcompile.__version__}, torch {torch.__version__}"


@dataclass(frozen=True, slots=True)
class _Document:
    """The file; `plan`: fingerprints of the model of the plan beside it, and of the ops; `files`:
    digests of the source files that were loaded when it was made; `target`: of the command line."""

    schema: str
    made_with: str
    plan: str
    target: str
    files: dict[str, str]
    train: Any
    eval: Any


def write_capture(found: Capture, path: Path, plan: Plan, target: str) -> str:
    """Writes the file beside a plan; where that cannot be, removes one of another capture, and says
    why.

    Raises:
        ConfigError: the system does not let it.
    """
    with errors_as(ConfigError, "cannot write the file", path, "choose another place with -o"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if constants := {**found.train.tensor_values, **found.eval.tensor_values}:
            path.unlink(missing_ok=True)
            return f"forward uses a tensor that is no parameter or buffer ({next(iter(constants))})"
        train, evaluation = (graph_json.to_record(graph) for graph in (found.train, found.eval))
        document = _Document(
            SCHEMA, made_with(), _prints(plan, found.train), target, _files(), train, evaluation
        )  # fmt: skip
        write_whole(path, msgspec.json.encode(document))
    return ""


def read_capture(path: Path, plan: Plan, call: CaptureCall, target: str) -> Capture | str:
    """The capture of a plan, or the reason why it has to be made again.

    What it depends on besides the files, tensors and inputs of the model is not looked at.

    Args:
        target: of the command line, which made the model of the call.
    """
    if not path.is_file():
        return f"there is no {path} beside the plan"
    try:
        written = path.stat().st_mtime
        data = jsonio.loads(read_limited(path), where=str(path))
        document = jsonio.decode(_Document, data, where=str(path))
        if (document.schema, document.made_with) != (SCHEMA, made_with()):
            return f"{path} is of {document.made_with}"
        train, evaluation = (
            graph_json.from_record(OpGraph, record, f"{path}: {mode}")
            for mode, record in (("train", document.train), ("eval", document.eval))
        )
    except (PdcompileError, OSError) as error:
        return f"{path} cannot be read: {error}"
    if document.target != target:
        return f"{path} is of {document.target}"
    if changed := next((f for f, one in document.files.items() if _digest(f) != one), None):
        return f"{changed} was changed since {path} was written"
    if document.plan != _prints(plan, train):
        return f"{path} is of another plan"
    if train.batch_size != call.size:
        return f"{path} is of microbatches of {train.batch_size} samples"
    if differs := _of_another_call(train, call):
        return f"{path} has another {differs}"
    made = datetime.fromtimestamp(written, UTC)
    return replace(
        attached(Capture(train, evaluation), call), kept=f"{path} of {made:%Y-%m-%d %H:%M} UTC"
    )


def _prints(plan: Plan, graph: OpGraph) -> str:
    return f"{plan.fingerprint.partition('.')[0]}.{fingerprint(graph)}"


def _files() -> dict[str, str]:
    """Digests of the files of this process's modules that are not torch's, Python's or ours."""
    paths = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    found = {path for path in paths if isinstance(path, str) and is_user(path)}
    return {path: _digest(path) for path in sorted(found)}


def _digest(path: str) -> str:
    """A digest of a file; "" where it is not there."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _of_another_call(graph: OpGraph, call: CaptureCall) -> str:
    """The first tensor of the model or the call that is not as in a graph; "" where all are."""
    held = {
        **dict(call.model.named_buffers(remove_duplicate=False)),
        **dict(call.model.named_parameters(remove_duplicate=False)),
    }
    for name, info in graph.tensors.items():
        tensor = held.get(name)
        if tensor is None or _form(tensor) != (info.shape, info.dtype):
            return name
    leaves = call.call(graph.batch_size).leaves
    for given in graph.inputs:
        value, leaf = graph.values[given.name], leaves.get(given.path)
        shape = tuple(size_at(size, graph.batch_size) for size in value.shape)
        if not isinstance(leaf, torch.Tensor) or _form(leaf) != (shape, value.dtype):
            return given.path
    return next((path for path, text in graph.constants if repr(leaves.get(path)) != text), "")


def _form(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), dtype_name(tensor.dtype)
