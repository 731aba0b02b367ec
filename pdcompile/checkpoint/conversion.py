"""Checkpoints without a pipeline: in plain PyTorch, and as plain safetensors files.

The files are those that transformers and `weights=` read.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pdcompile.checkpoint.contents import Contents, open_checkpoint
from pdcompile.checkpoint.extra_states import set_extra_states
from pdcompile.checkpoint.manifest import Holding, HoldingKind
from pdcompile.checkpoint.named_optimizer import NamedGroup, check_named, load_named, names_of
from pdcompile.eager.optimizers import Optimizers
from pdcompile.errors import CheckpointError, InputError, PdcompileError, some
from pdcompile.files import write_whole
from pdcompile.ir.targets import dtype_name
from pdcompile.position import Position
from pdcompile.weights.source import slots
from pdcompile.weights.tensor_files import INDEX


def load_checkpoint(
    folder: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> Position:
    """Load a checkpoint of any plan into a model, and the optimizer's state into an optimizer.

    The newest weights are taken, also where a schedule computes on older ones.

    Args:
        folder: what `pipe.save` was given, or one checkpoint in it.
        optimizer: of the model's parameters, or several, in any order.  Where their groups are
            others than when it was saved, each keeps its own learning rate.

    Returns:
        The minibatches that it was trained on.

    Raises:
        CheckpointError: it is damaged, or of another model or optimizer; nothing was changed.
    """
    contents = open_checkpoint(Path(folder))
    every = slots(model)
    kept = {fqn: slot for fqn, slot in every.items() if slot.persistent}
    tensors = {
        name: (tuple(slot.tensor.shape), dtype_name(slot.tensor.dtype))
        for slot in kept.values()
        for name in slot.names
    }
    contents.check_model(tensors)
    stored = {fqn: contents.first_name(slot.names) for fqn, slot in kept.items()}
    held = {fqn: Holding(HoldingKind.WEIGHT, name) for fqn, name in stored.items()}
    for fqn, slot in every.items():
        for name in () if slot.persistent else slot.names:
            if (hidden := Holding(HoldingKind.BUFFER, name)) in contents:
                held.setdefault(fqn, hidden)
    values = {fqn: contents.tensor(one, every[fqn].tensor) for fqn, one in held.items()}
    parts = None
    if isinstance(optimizer, Sequence):
        optimizer = Optimizers(optimizer)
    if optimizer is not None:
        parts = optimizer_parts(
            contents, optimizer, {fqn: slot.tensor for fqn, slot in kept.items()}, stored
        )
    extra = contents.extra_states()
    with torch.no_grad():
        for fqn, value in values.items():
            every[fqn].tensor.copy_(value)
    set_extra_states(model, extra)
    if optimizer is not None and parts is not None:
        names, groups, state = parts
        load_named(optimizer, names, groups, state)
    contents.close()
    return contents.position


def optimizer_parts(
    contents: Contents,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, str],
    made: Sequence[NamedGroup] = (),
) -> tuple[dict[int, str], list[NamedGroup], dict[str, dict[str, Any]]]:
    """Names, groups and state of a checkpoint, as `load_named` takes them.

    Args:
        tensors: of the model, by name; `stored`: the name of each in the checkpoint.

    Raises:
        CheckpointError: it does not fit the optimizer.
    """
    if not contents.manifest.optimizer:
        raise CheckpointError(
            f"the checkpoint has the state of no optimizer, and this one is "
            f"{type(optimizer).__name__}",
            where=str(contents.place),
            remedy="make the optimizer that it was saved with, or load weights and position "
            "alone: pipe.load(folder, optimizer=False)",
        )
    names = names_of(tensors)
    known: dict[str, list[str]] = {}
    for fqn, one in stored.items():
        known.setdefault(one, []).append(fqn)
    groups = [
        one._replace(names=tuple(name for old in one.names for name in known.get(old, ())))
        for one in contents.groups()
    ]
    own = (names.get(id(p)) for group in optimizer.param_groups for p in group["params"])
    read = {name: contents.optimizer_state(stored[name]) for name in own if name is not None}
    state = {name: values for name, values in read.items() if values}
    try:
        check_named(optimizer, names, groups, state, made)
    except InputError as error:
        where = f"{contents.place}: {error.where}"
        raise CheckpointError(error.message, where=where, remedy=error.remedy) from error
    return names, groups, state


_METADATA = ".metadata"


def convert(source: Path, output: Path, prefix: str = "") -> list[str]:
    """Write the weights of a checkpoint of ours, or of torch.distributed.checkpoint.

    Args:
        source: a folder of either.
        output: a .safetensors file; else a folder for a file a stage and their index, of which
            one at a time is in memory.
        prefix: of the names in a torch.distributed.checkpoint: others are left out, and from these
            it is taken off (``model.``).

    Returns:
        The names that were written.

    Raises:
        CheckpointError: the source is none, is damaged or has no such names; or the output cannot
            be written.
    """
    if (source / _METADATA).is_file():
        parts: Iterable[Mapping[str, Tensor]] = [_of_torch(source, prefix)]
    elif prefix:
        raise CheckpointError(
            "a prefix is for folders of torch.distributed.checkpoint, and this is none",
            where=str(source),
            remedy="leave the prefix out: names are those of the model",
        )
    else:
        parts = _of_stages(open_checkpoint(source))
    try:
        return (
            _single(output, parts) if output.suffix == ".safetensors" else _sharded(output, parts)
        )
    except PdcompileError:
        raise
    except Exception as error:  # the library has several kinds
        raise CheckpointError(
            f"the file cannot be written: {error}", where=str(output), remedy="give another path"
        ) from error


def _of_stages(contents: Contents) -> Iterator[dict[str, Tensor]]:
    for stage in contents.manifest.stages:
        yield {
            one.name: contents.tensor(Holding(HoldingKind.WEIGHT, one.name))
            for one in stage.weights.tensors
        }


def _single(output: Path, parts: Iterable[Mapping[str, Tensor]]) -> list[str]:
    tensors = {name: value for part in parts for name, value in part.items()}
    _save(output, tensors)
    return [*tensors]


def _sharded(output: Path, parts: Iterable[Mapping[str, Tensor]]) -> list[str]:
    output.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    size = 0
    for number, part in enumerate(parts):
        name = f"model-{number:05d}.safetensors"
        if part:
            _save(output / name, part)
        index |= dict.fromkeys(part, name)
        size += sum(value.numel() * value.element_size() for value in part.values())
    document = {"metadata": {"total_size": size}, "weight_map": index}
    write_whole(output / INDEX, json.dumps(document, indent=2).encode())
    return [*index]


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file under another name first, so that no half of it is ever there."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    try:
        save_file(
            {name: one.contiguous() for name, one in tensors.items()}, beside, {"format": "pt"}
        )
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _of_torch(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors of a torch.distributed.checkpoint whose names have a prefix, without it."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = _metadata(folder)
    listed = metadata.state_dict_metadata
    tensors = {n: one for n, one in listed.items() if isinstance(one, TensorStorageMetadata)}
    chosen = {name: one for name, one in tensors.items() if name.startswith(prefix)}
    if not chosen:
        raise CheckpointError(
            f"no tensor's name begins with {prefix!r}: they are such as {some([*tensors])}",
            where=str(folder),
            remedy="give the prefix of the model's parameters (--prefix model.)",
        )

    class Reader(FileSystemReader):
        """Reads tensors alone, with metadata that executed nothing when it was read."""

        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return metadata

    try:
        found = {n: torch.empty(one.size, dtype=one.properties.dtype) for n, one in chosen.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is one process
            load(found, storage_reader=Reader(folder), no_dist=True)
    except (Exception, CheckpointException) as error:  # that one is no Exception
        raise CheckpointError(
            f"the torch.distributed.checkpoint cannot be read: {str(error).splitlines()[0]}",
            where=str(folder),
            remedy="copy it again: it has no checksums to say what is damaged",
        ) from error
    return {name.removeprefix(prefix): value for name, value in found.items()}


class _Restricted(pickle._Unpickler):
    """Knows the classes of torch's metadata and no others: nothing is executed.

    Python's own one: in the other one a pickle can set attributes of these classes themselves, for
    all of the process.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch}

    def load_build(self) -> None:
        """Give an object its state."""
        kind = type(self.stack[-2])
        if kind.__module__ not in _OF_TORCH or issubclass(kind, Enum):
            raise pickle.UnpicklingError(f"it changes a {kind.__name__}, which no metadata needs")
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined]

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module in _OF_TORCH and name in _NAMES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata needs")


_OF_TORCH = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_NAMES = (
    "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
    "ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_StorageInfo", "_StoragePrefix",
    "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_ALLOWED = {
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"), ("builtins", "set"), ("builtins", "frozenset"),
    *(("torch", str(one).removeprefix("torch.")) for one in vars(torch).values()
      if isinstance(one, torch.dtype)),
}  # fmt: skip


def _metadata(folder: Path) -> Any:
    """The metadata of a torch.distributed.checkpoint, which is a pickle."""
    from torch.distributed.checkpoint.metadata import Metadata

    place = folder / _METADATA
    try:
        with place.open("rb") as file:
            found = _Restricted(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError("it is none")
        names = [name for name in found.state_dict_metadata if not isinstance(name, str)]
        paths = [one.relative_path for one in (found.storage_data or {}).values()]
        outside = [path for path in paths if Path(path).name != path]
        if names or outside:
            raise pickle.UnpicklingError(f"{(names + outside)[0]!r} is no name or no file in it")
    except Exception as error:  # whatever a pickle can raise
        raise CheckpointError(
            f"the metadata of a torch.distributed.checkpoint cannot be read: {error}",
            where=str(place),
            remedy="give a folder that torch.distributed.checkpoint.save wrote",
        ) from error
    return found
