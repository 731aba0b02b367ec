"""Reads files up to a size; writes files that are complete or absent, never half written.

The cache, a folder of the user's, has what outlives a process: measured costs.
Nothing in it is trusted: a file that does not agree with what it is for is made again.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

VARIABLE = "PDCOMPILE_CACHE"
CAPTURE = ".capture.json"  # the end of the name of a kept capture
OFF = ("off", "0", "")
MAX_BYTES = 64 * 2**20  # of a file that describes something: no tensors are in it


def read_limited(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> bytes:
    """The contents of a file.  Raises OSError: it cannot be read, or has more bytes."""
    if not is_path(path):
        raise OSError(errno.EINVAL, f"{path!r} is no path")
    with Path(path).open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"the file has more than {limit} bytes", str(path))
    return data


def is_path(given: object) -> bool:
    """True if a file or folder can be called so."""
    if not isinstance(given, str | os.PathLike):
        return False
    name = os.fsdecode(given)
    return name != "" and "\0" not in name


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file beside its place and renames it into it.  Raises OSError."""
    # Not the process's number: in a container the next one may get the same, and meet what a
    # killed one left.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def cache_folder() -> Path | None:
    """The cache's folder; None when it is switched off.

    ``PDCOMPILE_CACHE`` names a folder or is "off"; without it ``$XDG_CACHE_HOME/pdcompile``, by
    default ``~/.cache/pdcompile``.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return None if chosen.strip().lower() in OFF else Path(chosen).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        home = base if base.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # no home folder
        return None
    return home / "pdcompile"


def capture_beside(plan: Path) -> Path:
    """The file of a capture beside a plan's."""
    return plan.with_name(f"{plan.stem}{CAPTURE}")
