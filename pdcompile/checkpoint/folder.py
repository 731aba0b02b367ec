"""Folder of a training's checkpoints: each is complete, or it is not there.

A checkpoint is written under a name that nobody reads, brought to the disk, and renamed; then the
pointer file is replaced.  A process may be killed anywhere in between: what can be found is whole.
Its safetensors files are written with checksums, and read against them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from pdcompile.checkpoint.manifest import (
    MANIFEST,
    PLAN,
    Manifest,
    StoredFile,
    StoredTensor,
    read_manifest,
)
from pdcompile.eager.digest import flat_bytes
from pdcompile.errors import CheckpointError, PdcompileError, os_errors_as
from pdcompile.files import write_whole
from pdcompile.ir.targets import dtype_name
from pdcompile.warn import warn

_LENGTH = 8  # bytes that hold the header's length
_MAX_HEADER = 100 * 2**20  # as the library has it
_ANOTHER = "load another checkpoint of the folder, or copy the file again"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], identity: str) -> StoredFile:
    """Write tensors, and wait until they are on the disk.

    Raises:
        CheckpointError: the file cannot be written, or a tensor has no place in the format.
    """
    from safetensors.torch import save_file

    plain: dict[str, Tensor] = {}
    memories: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        memory = value.untyped_storage().data_ptr()
        plain[name] = value.clone() if memory in memories else value
        memories.add(memory)
    with unwritten(path, Exception):  # the library has several kinds
        save_file(plain, path, {"format": "pt", "pdcompile": identity})
        synced(path)
        with path.open("rb") as file:
            header = zlib.crc32(_header(file.read(_LENGTH), file.read, path))
        size = path.stat().st_size
    listed = (
        StoredTensor(name, dtype_name(value.dtype), tuple(value.shape), _checksum(value))
        for name, value in plain.items()
    )
    return StoredFile(path.name, size, header, tuple(listed))


@contextmanager
def unwritten(path: Path, kind: type[Exception] = OSError) -> Iterator[None]:
    """Raises CheckpointError in place of errors of a kind while files are written."""
    try:
        yield
    except PdcompileError:
        raise
    except kind as error:
        raise CheckpointError(
            f"the checkpoint cannot be written: {error}",
            where=str(path),
            remedy="make room or give another folder, and save again; earlier checkpoints are as "
            "they were",
        ) from error


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
        CheckpointError: it is missing, no plain file, of another size, of another checkpoint, or
            its header is damaged.
    """

    def __init__(self, folder: Path, stored: StoredFile, identity: str) -> None:
        self.path = folder / stored.name
        self.stored = {tensor.name: tensor for tensor in stored.tensors}
        self._open: Any = None
        with os_errors_as(
            CheckpointError, "a file of the checkpoint is missing", self.path, _ANOTHER
        ):
            found = self.path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise self._wrong("this is no plain file (a link or a folder)")
        try:
            self._check_header(stored, found.st_size, identity)
        except OSError as error:
            raise self._wrong(f"it cannot be read: {error.strerror}") from error

    def _check_header(self, stored: StoredFile, size: int, identity: str) -> None:
        with self.path.open("rb") as file:
            header = _header(file.read(_LENGTH), file.read, self.path)
        if zlib.crc32(header) != stored.header_crc32:
            other = _identity(header)
            if other not in (None, identity):
                raise self._wrong("this file is of another checkpoint")
            raise self._wrong("the header of this file is damaged: its checksum does not fit")
        if size != stored.num_bytes:
            raise self._wrong(f"this file has {size} bytes, {stored.num_bytes} were written")

    def tensor(self, name: str) -> Tensor:
        """A tensor in memory of its own.

        Raises:
            CheckpointError: its bytes are not those that were written, or it is not there.
        """
        stored = self.stored.get(name)
        try:
            if self._open is None:
                from safetensors import safe_open

                self._open = safe_open(self.path, framework="pt", device="cpu")
            found: Tensor = self._open.get_tensor(name)
        except Exception as error:  # the library has several kinds
            raise self._wrong(f"{name} cannot be read: {error}") from error
        if stored is None or (dtype_name(found.dtype), tuple(found.shape)) != (
            stored.dtype, stored.shape,
        ):  # fmt: skip
            shown = f"{dtype_name(found.dtype)} {tuple(found.shape)}"
            raise self._wrong(f"{name} is {shown} in the file, and not as the manifest says")
        if _checksum(found) != stored.crc32:
            raise self._wrong(f"{name} is damaged: its checksum does not fit")
        return found.clone()

    def close(self) -> None:
        self._open = None

    def _wrong(self, message: str) -> CheckpointError:
        return CheckpointError(message, where=str(self.path), remedy=_ANOTHER)


def _checksum(tensor: Tensor) -> int:
    flat = flat_bytes(tensor)
    return zlib.crc32(flat.numpy().data) if flat.numel() else 0


def _header(length: bytes, read: Any, path: Path) -> bytes:
    """The length and the JSON before the tensors."""
    size = int.from_bytes(length, "little")
    if len(length) < _LENGTH or size > _MAX_HEADER:
        raise CheckpointError(
            "the header of this file is damaged: it is no safetensors file",
            where=str(path),
            remedy=_ANOTHER,
        )
    return length + bytes(read(size))


def _identity(header: bytes) -> str | None:
    """The checkpoint that the header names, where it can be read."""
    try:
        found = json.loads(header[_LENGTH:].decode("utf-8"))["__metadata__"]["pdcompile"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


LATEST = "LATEST"
_WRITING, _GONE = ".writing-", ".removed-"
_NAME = re.compile(r"save-(\d+)-minibatch-(\d+)")
_POINTER = re.compile(rf"({_NAME.pattern}) ([0-9a-f]{{8}})\n")


def complete(folder: Path) -> list[Path]:
    """The checkpoints of a folder, in the order in which they were saved."""
    found = []
    for place in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(place.name)
        if match and (place / MANIFEST).is_file():
            found.append((int(match[1]), place))
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
        CheckpointError: its pointer file is damaged, or points to what is not there; or the folder
            cannot be read.
    """
    with os_errors_as(
        CheckpointError,
        "the folder cannot be read",
        folder,
        "give the path of a folder that pipe.save wrote, and that this user can read",
    ):
        return _newest(folder)


def _newest(folder: Path) -> Path | None:
    if (folder / MANIFEST).is_file():
        return folder
    there = complete(folder)
    pointer = folder / LATEST
    if not pointer.is_file():
        return there[-1] if there else None  # killed before the first pointer was written
    names = ", ".join(place.name for place in reversed(there[-3:])) or "none"
    damaged = CheckpointError(
        "the pointer to the last checkpoint is damaged",
        where=str(pointer),
        remedy=f"give one by its folder ({names}), or delete this file: the last one is then taken",
    )
    with pointer.open("rb") as file:
        match = _POINTER.fullmatch(file.read(200).decode("ascii", "replace"))
    if match is None:
        raise damaged
    found = folder / match[1]
    if found not in there:
        raise damaged
    if zlib.crc32((found / MANIFEST).read_bytes()) != int(match[4], 16):
        read_manifest(found)  # says so where it is the damaged one
        raise damaged
    return found


class OwnCheckpoints:
    """Checkpoints of this training: those that it saved, and those in a folder that it took one
    from."""

    def __init__(self) -> None:
        self._own: dict[Path, set[str]] = {}
        self._others: dict[Path, set[str]] = {}

    def took(self, place: Path) -> None:
        """Training goes on from this checkpoint."""
        folder = place.parent.resolve()
        self._own[folder] = {one.name for one in complete(folder)}
        self._others.pop(folder, None)

    def made(self, place: Path) -> None:
        self._own.setdefault(place.parent.resolve(), set()).add(place.name)

    def others(self, folder: Path) -> set[str]:
        """Names of checkpoints of other trainings; warns of those that were not known."""
        folder = folder.resolve()
        known = self._others.setdefault(folder, set())
        new = [n for p in complete(folder) if (n := p.name) not in self._own.get(folder, ())]
        if not known.issuperset(new):
            warn(
                f"{folder} has checkpoints of another training, the last one {new[-1]}: this one "
                "did not go on from it (compile(..., resume=folder) would), and keep= leaves them; "
                "give every training a folder of its own"
            )
            known.update(new)
        return known


def begin(folder: Path) -> Path:
    """A new folder to write a checkpoint into; what killed processes left is removed.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for place in folder.iterdir():
        if place.name.startswith((_WRITING, _GONE)):
            shutil.rmtree(place, ignore_errors=True)
        elif place.name.startswith(f".{LATEST}."):
            place.unlink(missing_ok=True)
    made = folder / f"{_WRITING}{secrets.token_hex(8)}"
    made.mkdir()
    return made


def finish(written: Path, manifest: Manifest, plan: str) -> Path:
    """Make a checkpoint of what all ranks have written: its new place.  Raises OSError."""
    folder = written.parent
    write_whole(written / PLAN, plan.encode())
    text = manifest.to_text().encode()
    write_whole(written / MANIFEST, text)
    synced(written)
    there = complete(folder)
    last = _NAME.fullmatch(there[-1].name) if there else None
    number = 1 + (int(last[1]) if last else 0)
    made = folder / f"save-{number:04d}-minibatch-{manifest.minibatches}"
    written.rename(made)
    try:
        synced(folder)
        write_whole(folder / LATEST, f"{made.name} {zlib.crc32(text):08x}\n".encode())
    except OSError:  # what is said not to be saved is not there
        _remove(made)
        raise
    synced(folder)
    return made


def discard(written: Path) -> None:
    """Remove what was written of a checkpoint that will not be."""
    shutil.rmtree(written, ignore_errors=True)


def keep_last(folder: Path, count: int, spared: Collection[str] = ()) -> None:
    """Remove all but the last checkpoints; one half removed cannot be found.  Raises OSError.

    `spared`: the names of those that neither count nor go.
    """
    for place in [one for one in complete(folder) if one.name not in spared][:-count]:
        _remove(place)


def _remove(place: Path) -> None:
    gone = place.with_name(f"{_GONE}{place.name}")
    os.replace(place, gone)
    shutil.rmtree(gone, ignore_errors=True)
