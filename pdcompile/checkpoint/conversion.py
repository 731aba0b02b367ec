"""Checkpoints as plain safetensors files, which transformers and `weights=` read."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pdcompile.checkpoint.contents import Contents, open_checkpoint
from pdcompile.checkpoint.holding import Holding, HoldingKind
from pdcompile.errors import CheckpointError, PdcompileError, some
from pdcompile.files import write_whole
from pdcompile.weights.tensor_files import INDEX

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
