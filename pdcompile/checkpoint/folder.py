"""Folder of a training's checkpoints: each is complete, or it is not there.

A checkpoint is written under a name that nobody reads, brought to the disk, and renamed.  A process
may be killed anywhere in between: what can be found is whole.
Its safetensors files are written with checksums, and read against them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from pdcompile.checkpoint.manifest import (
    MANIFEST,
    PLAN,
    Manifest,
    StoredFile,
    StoredTensor,
)
from pdcompile.eager.digest import flat_bytes
from pdcompile.errors import CheckpointError, errors_as
from pdcompile.files import write_whole
from pdcompile.ir.targets import dtype_name
from pdcompile.warn import warn
from pdcompile.weights.tensor_files import INDEX, OpenFile

_MAX_HEADER = 100 * 2**20  # as the library has it
_ANOTHER = "load another checkpoint of the folder, or copy the file again"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], identity: str) -> StoredFile:
    """Write tensors, and wait until they are on the disk; half a file is never there.

    `identity`: of their checkpoint, for the header.

    Raises:
        CheckpointError: the file cannot be written, or a tensor has no place in the format.
    """
    plain: dict[str, Tensor] = {}
    memories: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        memory = value.untyped_storage().data_ptr()
        plain[name] = value.clone() if memory in memories else value
        memories.add(memory)
    beside = path.with_name(f".{path.name}.tmp")
    with unwritten(path, Exception):  # the library has several kinds
        try:
            save_file(plain, beside, {"format": "pt", "pdcompile": identity})
            synced(beside)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
        size, header = path.stat().st_size, _header_crc32(path)
    listed = (
        StoredTensor(name, dtype_name(value.dtype), tuple(value.shape), _checksum(value))
        for name, value in plain.items()
    )
    return StoredFile(path.name, size, header, tuple(listed))


def unwritten(path: Path, kind: type[Exception] = OSError) -> AbstractContextManager[None]:
    """Raises CheckpointError in place of errors of a kind while files are written."""
    remedy = "make room or give another folder, and try again; earlier checkpoints are as they were"
    return errors_as(CheckpointError, "the checkpoint cannot be written", path, remedy, kind)


def synced(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk.  Raises OSError."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class TensorFile:
    """A file that is read, each tensor compared with its checksum.

    Raises:
        CheckpointError: it is missing, no plain file, of another size or another checkpoint, or its
            header is damaged.
    """

    def __init__(self, folder: Path, stored: StoredFile) -> None:
        self.path = folder / stored.name
        self._crc32 = {tensor.name: tensor.crc32 for tensor in stored.tensors}
        missing = "a file of the checkpoint is missing, or cannot be read"
        with errors_as(CheckpointError, missing, self.path, _ANOTHER):
            found = self.path.lstat()
            if not stat.S_ISREG(found.st_mode):
                raise self._wrong("this is no plain file (a link or a folder)")
            header = _header_crc32(self.path)
        if found.st_size != stored.num_bytes:
            raise self._wrong(
                f"this file has {found.st_size} bytes, {stored.num_bytes} were written"
            )
        if header != stored.header_crc32:
            raise self._wrong(
                "the header of this file is damaged, or of another checkpoint: its checksum does "
                "not fit"
            )
        self._open = OpenFile(self.path, CheckpointError, _ANOTHER)

    def tensor(self, name: str) -> Tensor:
        """A tensor in memory of its own.

        Raises:
            CheckpointError: its bytes are not those that were written, or it is not there.
        """
        found = self._open.tensor(name)
        if name not in self._crc32 or _checksum(found) != self._crc32[name]:
            raise self._wrong(f"{name} is damaged: its checksum does not fit")
        return found.clone()

    def _wrong(self, message: str) -> CheckpointError:
        return CheckpointError(message, where=str(self.path), remedy=_ANOTHER)


def _checksum(tensor: Tensor) -> int:
    flat = flat_bytes(tensor)
    return zlib.crc32(flat.numpy().data) if flat.numel() else 0


def _header_crc32(path: Path) -> int:
    """CRC-32 of the length and the JSON before the tensors.  Raises OSError."""
    with path.open("rb") as file:
        length = file.read(8)
        return zlib.crc32(length + file.read(min(int.from_bytes(length, "little"), _MAX_HEADER)))


_WRITING, _GONE = ".writing-", ".removed-"
_NAME = re.compile(r"save-(\d+)-minibatch-(\d+)")


def complete(folder: Path) -> list[Path]:
    """The checkpoints of a folder, in the order in which they were saved."""
    names = [place.name for place in folder.iterdir()] if folder.is_dir() else []
    found = [(int(match[1]), folder / match[0]) for match in map(_NAME.fullmatch, names) if match]
    return [place for _, place in sorted(found)]


def foreign(folder: Path) -> tuple[str, ...]:
    """Names that keep a training that resumes from beginning here, as no checkpoint is among them:
    the path itself where that is no folder, or names in it of what no training wrote.

    Files whose name begins with a dot do not count: killed processes leave such, and file systems.
    """
    if folder.is_dir():
        return tuple(sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")))
    return (str(folder),) if folder.exists() else ()


def newest(folder: Path) -> Path | None:
    """The checkpoint that a folder stands for: itself, or the last one that it holds.

    None where there is none.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    with errors_as(
        CheckpointError,
        "the folder cannot be read",
        folder,
        "give the path of a folder that pipe.save wrote, and that this user can read",
    ):
        if (folder / MANIFEST).is_file():
            return folder
        there = complete(folder)
        return there[-1] if there else None


class OwnCheckpoints:
    """Checkpoints of this training: those that it saved, and those in a folder that it took one
    from."""

    def __init__(self) -> None:
        self._own: set[Path] = set()
        self._told: set[Path] = set()  # others that were warned of

    def took(self, place: Path) -> None:
        """Training goes on from this checkpoint."""
        self._own.update(complete(place.parent.resolve()))

    def made(self, place: Path, keep: int | None) -> None:
        """Remove this training's checkpoints but the last `keep`, of which `place` is one.

        Those of others are left, with a warning; a warning also says what cannot be removed.
        """
        place = place.resolve()
        self._own.add(place)
        try:
            there = complete(place.parent)
            for one in [one for one in there if one in self._own][: -keep if keep else 0]:
                _remove(one)
        except OSError as error:
            warn(f"old checkpoints cannot be found or removed: {error}")
            return
        if new := [one for one in there if one not in self._own | self._told]:
            warn(
                f"{place.parent} has checkpoints of another training, the last one {new[-1].name}: "
                "this one did not go on from it (compile(..., resume=folder) would), and keep= "
                "leaves them; give every training a folder of its own"
            )
            self._told.update(new)


def begin(folder: Path) -> Path:
    """A new folder to write a checkpoint into; what killed processes left is removed.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for place in folder.iterdir():
        if place.name.startswith((_WRITING, _GONE)):
            shutil.rmtree(place, ignore_errors=True)
    made = folder / f"{_WRITING}{secrets.token_hex(8)}"
    made.mkdir()
    return made


def finish(written: Path, manifest: Manifest, plan: str) -> Path:
    """Make a checkpoint of what all ranks have written: its new place.  Raises OSError."""
    folder = written.parent
    write_whole(written / PLAN, plan.encode())
    write_whole(written / INDEX, manifest.index())
    write_whole(written / MANIFEST, manifest.to_text().encode())
    synced(written)
    there = complete(folder)
    last = _NAME.fullmatch(there[-1].name) if there else None
    number = 1 + (int(last[1]) if last else 0)
    made = folder / f"save-{number:04d}-minibatch-{manifest.minibatches}"
    written.rename(made)
    try:
        synced(folder)
    except OSError:  # what is said not to be saved is not there
        _remove(made)
        raise
    return made


def discard(written: Path) -> None:
    """Remove what was written of a checkpoint that will not be."""
    shutil.rmtree(written, ignore_errors=True)


def _remove(place: Path) -> None:
    gone = place.with_name(f"{_GONE}{place.name}")
    os.replace(place, gone)
    shutil.rmtree(gone, ignore_errors=True)
