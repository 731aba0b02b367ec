"""The folder of a training's checkpoints: each is complete, or it is not there.

A checkpoint is written under a name that nobody reads, brought to the disk, and renamed; then the
pointer file is replaced.  A process may be killed anywhere in between: what can be found is whole.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import zlib
from collections.abc import Collection
from pathlib import Path

from pdcompile.checkpoint.manifest import MANIFEST, PLAN, Manifest, read_manifest
from pdcompile.checkpoint.tensor_file import synced
from pdcompile.errors import CheckpointError, os_errors_as
from pdcompile.files import write_whole
from pdcompile.warn import warn

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
