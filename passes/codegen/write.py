"""Sources into a folder: whole, or not at all."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path

import torch
from torch import nn

from pdcompile.errors import SourceError
from pdcompile.ir.stage_interface import Sources


def write(
    sources: Sources,
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
) -> None:
    """Write every file of the sources, and with a model ``stage_k.pt``: buffers and constants.

    Each file is complete or not there: it is written beside its place and renamed into it, the
    plan last.  Other files in the folder are left alone.

    Raises:
        SourceError: the folder is a symbolic link or no folder, or cannot be written.
    """
    root = Path(folder)
    contents = {name: text.encode() for name, text in sources.files.items()}
    if model is not None:
        contents.update(_tensors(sources, model))
    try:
        _prepare(root)
        for name in sorted(contents, key=lambda name: (name.endswith(".json"), name)):
            _replace(root, name, contents[name])
    except OSError as error:
        raise SourceError(
            f"the stages cannot be written: {error.strerror or error}",
            where=str(root),
            remedy="name a folder that you may write to",
        ) from error


def _prepare(root: Path) -> None:
    if root.is_symlink():
        raise SourceError(
            "the target is a symbolic link", where=str(root), remedy="name the folder itself"
        )
    if root.exists() and not root.is_dir():
        raise SourceError(
            "the target is a file", where=str(root), remedy="name a folder, new or existing"
        )
    root.mkdir(parents=True, exist_ok=True)


def _replace(root: Path, name: str, data: bytes) -> None:
    target = root / name
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise SourceError(
            f"{name} is there already, and no plain file", where=str(target), remedy="remove it"
        )
    handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=root)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _tensors(sources: Sources, model: nn.Module) -> dict[str, bytes]:
    """``stage_k.pt`` for every stage that has buffers or constants, by name on the stage."""
    values = dict(model.named_buffers(remove_duplicate=False)) | sources.constants
    found = {}
    for interface in sources.interfaces:
        names = {fqn: fqn for fqn in (*interface.buffers, *interface.constants)}
        names |= {name: fqn for name, fqn in interface.aliases.items() if fqn in names}
        plain = {
            name: values[fqn].detach().cpu().clone()
            for name, fqn in names.items()
            if fqn in values and not values[fqn].is_meta
        }
        if plain:
            data = io.BytesIO()
            torch.save(plain, data)
            found[f"stage_{interface.index}.pt"] = data.getvalue()
    return found
