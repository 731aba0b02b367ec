"""One safetensors file of a checkpoint: written with checksums, read against them."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from pdcompile.checkpoint.manifest import StoredFile, StoredTensor
from pdcompile.eager.digest import flat_bytes
from pdcompile.errors import CheckpointError, PdcompileError, os_errors_as
from pdcompile.ir.targets import dtype_name

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
