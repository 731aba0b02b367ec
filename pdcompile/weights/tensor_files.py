"""Safetensors files: one tensor at a time, and the file of each name in a model's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pdcompile.errors import ConfigError, PdcompileError, errors_as
from pdcompile.files import read_limited
from pdcompile.jsonio import loads

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class OpenFile:
    """A safetensors file whose tensors are read one at a time.

    Args:
        error: raised, with `remedy`, where it is none or a tensor cannot be read.
    """

    def __init__(self, path: Path, error: type[PdcompileError], remedy: str) -> None:
        self._path, self._error, self._remedy = path, error, remedy
        with self._errors("this is not a readable safetensors file"):
            self._open: Any = safe_open(path, framework="pt", device="cpu")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._open.keys())

    def tensor(self, name: str) -> Tensor:
        """A tensor by its name; its memory may be the library's."""
        with self._errors(f"{name} cannot be read"):
            found: Tensor = self._open.get_tensor(name)
        return found

    def _errors(self, message: str) -> AbstractContextManager[None]:
        # The library has several kinds.
        return errors_as(self._error, message, self._path, self._remedy, Exception)


class TensorFiles:
    """Tensors in safetensors files, by name.  Values are read only when `tensor` is called.

    Args:
        given: files, each with ``.safetensors`` or an index (``….index.json``) of such files, or
            folders that hold `INDEX` or `SINGLE`, the layout of the Hugging Face hub.

    Raises:
        ConfigError: a file is missing or cannot be read, or two files have a tensor of the same
            name; names the file.
    """

    def __init__(self, given: Iterable[str | os.PathLike[str]]) -> None:
        self.files: dict[str, Path] = {}  # name of a tensor -> its file
        self._open: tuple[Path, OpenFile] | None = None
        for place in given:
            for name, file in _contents(Path(place)).items():
                if self.files.setdefault(name, file) != file:
                    raise ConfigError(
                        f"{name} is in two files: {self.files[name].name} and {file.name}",
                        where=f"weights: {place}",
                        remedy="give the files of one checkpoint",
                    )

    def tensor(self, name: str, like: Tensor) -> Tensor:
        """The value of a tensor, in memory of its own on the CPU.

        Args:
            name: one of `files`.
            like: the model's tensor, which must have the same shape.  The value gets its dtype
                and memory layout; a dtype that cannot represent it exactly is refused.

        Raises:
            ConfigError: shape or dtype do not fit, or the file lacks a tensor of its index.
        """
        file = self.files[name]
        if self._open is None or self._open[0] != file:
            self._open = None  # of two files one at a time is in memory
            self._open = file, _opened(file)
        found = self._open[1].tensor(name)
        if found.shape != like.shape:
            raise ConfigError(
                f"{name} has shape {tuple(found.shape)} in the checkpoint, and the model "
                f"expects {tuple(like.shape)}",
                where=str(file),
                remedy="build the model with the sizes of the checkpoint",
            )
        if not _fits(found.dtype, like.dtype):
            kind = str(found.dtype)
            raise ConfigError(
                f"{name} is {kind.removeprefix('torch.')} in the checkpoint, and the model "
                f"expects {str(like.dtype).removeprefix('torch.')}, which cannot hold it exactly",
                where=str(file),
                remedy=f"model.to({kind}) before compile, or a function as weights= that converts",
            )
        return torch.empty_like(like, device="cpu", requires_grad=False).copy_(found)


def _fits(found: torch.dtype, wanted: torch.dtype) -> bool:
    """True if every value of the first dtype can be represented in the other."""
    if found == wanted:
        return True
    same_kind = (
        found.is_floating_point == wanted.is_floating_point
        and found.is_complex == wanted.is_complex
        and torch.bool not in (found, wanted)
    )
    try:
        return same_kind and torch.promote_types(found, wanted) == wanted
    except RuntimeError:  # 8-bit floats have no promotion
        return False


def _contents(place: Path) -> dict[str, Path]:
    """Names in a file, an index or a folder, each with its file."""
    if place.is_dir():
        for name in (INDEX, SINGLE):
            if (place / name).is_file():
                return _contents(place / name)
        files = (*place.glob("*.safetensors*"), *place.glob(f"*/{INDEX}"))  # those of checkpoints
        others = sorted(str(file.relative_to(place)) for file in files)
        raise ConfigError(
            f"the folder holds neither {INDEX} nor {SINGLE}",
            where=f"weights: {place}",
            remedy=f"give its files by name: {', '.join(others[:4])}" if others else _CONVERT,
        )
    if not place.is_file():
        raise ConfigError(
            "there is no such file", where=f"weights: {place}",
            remedy=f"a .safetensors file, or a folder with {INDEX}; paths are relative to "
            f"{Path.cwd()}",
        )  # fmt: skip
    if place.name.endswith(".index.json"):
        return _index(place)
    if place.suffix != ".safetensors":
        raise ConfigError(
            f"{place.name} is not a safetensors file", where=f"weights: {place}", remedy=_CONVERT
        )
    return dict.fromkeys(_opened(place).names, place)


_CONVERT = "write one once: safetensors.torch.save_file(state_dict, 'model.safetensors')"


def _index(place: Path) -> dict[str, Path]:
    remedy = 'it maps names to files beside it: {"weight_map": {"a": "1.safetensors"}}'

    def bad(what: str) -> ConfigError:
        return ConfigError(f"the index {what}", where=str(place), remedy=remedy)

    with errors_as(ConfigError, "the index cannot be read", place, remedy):
        content = loads(read_limited(place), where=str(place), error=ConfigError, remedy=remedy)
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise bad("has no weight_map of names to files")
    for file in dict.fromkeys(found.values()):
        # A name with a folder in it could lead anywhere; writers of indexes use plain names.
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise bad(f"names {file!r}, which is not a safetensors file beside it")
        if not os.path.isfile(place.parent / file):  # False also for a name longer than any
            raise bad(f"names {file[:100]!r}, which is not there")
    return {name: place.parent / file for name, file in found.items()}


def _opened(file: Path) -> OpenFile:
    remedy = f"copy it again, with the index that belongs to it; or {_CONVERT}"
    return OpenFile(file, ConfigError, remedy)
