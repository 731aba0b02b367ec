"""Writes sources to a folder, each file whole or not at all, reads and loads them as classes.

Loading a file of a folder runs it: it is the user's program then, like any module that they
import.  What `generate` wrote is recognised by its text; anything else counts as edited.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import linecache
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from pdcompile import jsonio
from pdcompile.errors import SourceError, errors_as
from pdcompile.files import is_path, read_limited, write_whole
from pdcompile.ir.records import PARTS
from pdcompile.ir.stage_interface import HOME, Sources, module_of

_LOADS = itertools.count()
DIGESTS = "digests.json"  # in the folder: of the source as it was written


def read(folder: str | os.PathLike[str], expected: Sources) -> Sources:
    """The sources in a folder, for the plan that `expected` was generated from.

    `Sources.edited` names the files whose text is not the expected one.

    Raises:
        SourceError: the folder or a stage's file is missing, too big, or not UTF-8.
    """
    root = Path(folder)
    if not root.is_dir():
        raise SourceError(
            f"the folder {str(root)!r} does not exist",
            where=str(root),
            remedy="write one with pipe.dump(folder)",
        )
    files = {name: _text(root / name) for name in expected.files if name.startswith("stage_")}
    for name in expected.files.keys() - files.keys():
        files[name] = _text(root / name) if (root / name).is_file() else expected.files[name]
    edited = tuple(name for name, text in files.items() if text != expected.files[name])
    if f"{PARTS}.py" in edited:
        raise SourceError(
            f"{PARTS}.py is not the one that stages of this version run with",
            where=str(root / f"{PARTS}.py"),
            remedy="dump the stages into another folder (pipe.dump); functions of your own go into "
            "the files of the stages that call them",
        )
    return Sources(files, expected.interfaces, edited, expected.constants)


def stage_classes(sources: Sources) -> tuple[type[nn.Module], ...]:
    """The classes Stage0, Stage1, …, each from a fresh module of its own.

    Tracebacks show the source lines.  `module_of(cls)` is the namespace whose ``draw`` a runtime
    may replace.

    Raises:
        SourceError: a file does not run, or has no ``class Stage{k}(nn.Module)``.
    """
    return tuple(
        _stage_class(f"stage_{interface.index}.py", f"Stage{interface.index}", sources)
        for interface in sources.interfaces
    )


def set_draw(cls: type[nn.Module], draw: Callable[[Any, int], None]) -> None:
    """Makes the stage's file call `draw` before each random op."""
    vars(module_of(cls))["draw"] = draw


def _stage_class(file: str, name: str, sources: Sources) -> type[nn.Module]:
    text = sources.files.get(file)
    if text is None:
        raise SourceError(f"{file} is missing", remedy="generate the folder again")
    module_name = f"pdcompile_stages_{next(_LOADS)}_{file.removesuffix('.py')}"
    filename = f"<{module_name}.py>"
    module = ModuleType(module_name, f"Loaded from {file}.")
    module.__spec__ = ModuleSpec(module_name, None, origin=filename)
    module.__file__ = filename
    lines = text.splitlines(keepends=True)
    linecache.cache[filename] = (len(text), None, lines, filename)
    # It stays among the modules: rank 0 sends the others what refers to its class by name.
    sys.modules[module_name] = module
    try:
        exec(compile(text, filename, "exec"), vars(module))
    except Exception as error:
        del sys.modules[module_name]
        line = error.lineno if isinstance(error, SyntaxError) else None
        said = str(error) if line is None else error.args[0]
        raise SourceError(
            f"{file} cannot be loaded: {type(error).__name__}: {said}",
            where=file if line is None else f"{file}:{line}",
            remedy=_remedy(file in sources.edited, error),
        ) from error
    cls = vars(module).get(name)
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise SourceError(
            f"{file} does not define class {name}(nn.Module)",
            where=file,
            remedy=f"keep the class name {name}",
        )
    setattr(cls, HOME, module)
    return cls


def _remedy(edited: bool, error: Exception) -> str:
    """The remedy where a file does not run."""
    if edited:
        return "undo the last edit, or dump the stages into another folder"
    if isinstance(error, ImportError):
        return "make importable what the file imports: it names the user's modules at # needs:"
    return "this is a mistake in pdcompile: please report it with the model"


def _text(path: Path) -> str:
    try:
        return read_limited(path).decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise SourceError(
            f"{path.name} {why}", where=str(path), remedy="dump into another folder"
        ) from error


def write(
    sources: Sources,
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
) -> None:
    """Writes every file of the sources, and with a model ``stage_k.pt``: buffers and constants.

    Each file is complete or not there: it is written beside its place and renamed into it, after
    the source the plan, and then digests of the source.  Other files in the folder are left alone.

    Raises:
        SourceError: the folder cannot be written; or source there was edited, or written by
            somebody else.
    """
    if not is_path(folder):
        raise SourceError(f"{folder!r} is no path", where="dump", remedy="name a folder")
    root = Path(folder)
    contents = {name: text.encode() for name, text in sources.files.items()}
    if model is not None:
        contents.update(_tensors(sources, model))
    with errors_as(
        SourceError, "the stages cannot be written", root, "name a folder that you may write to"
    ):
        root.mkdir(parents=True, exist_ok=True)
        digests = {name: _digest(contents[name]) for name in contents if name.endswith(".py")}
        _keep_edited(root, digests)
        for name in sorted(contents, key=lambda name: (name.endswith(".json"), name)):
            write_whole(root / name, contents[name])
        write_whole(root / DIGESTS, jsonio.dumps(digests).encode())


def _keep_edited(root: Path, digests: dict[str, str]) -> None:
    """Refuses to replace source that is neither what was written there nor what will be."""
    record = root / DIGESTS
    text = read_limited(record) if record.is_file() else b"{}"
    written = jsonio.loads(text, where=str(record), error=SourceError, remedy="remove the file")
    for name, digest in digests.items():
        path = root / name
        own = _digest(read_limited(path)) if path.is_file() else digest
        if own != digest and (not isinstance(written, dict) or own != written.get(name)):
            raise SourceError(
                f"{name} is there already, and was edited since or not written by dump",
                where=str(path),
                remedy="name another folder, or remove the file if it is no longer needed",
            )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _tensors(sources: Sources, model: nn.Module) -> dict[str, bytes]:
    """``stage_k.pt`` for every stage that has buffers or constants, by name on the stage."""
    values = dict(model.named_buffers(remove_duplicate=False)) | sources.constants
    found = {}
    for interface in sources.interfaces:
        names = {fqn: fqn for fqn in (*interface.buffers, *interface.constants)}
        names |= {name: fqn for name, fqn in interface.aliases.items() if fqn in names}
        plain = {
            name: sources.slices(fqn, values[fqn].detach().cpu().clone())
            for name, fqn in names.items()
            if fqn in values and not values[fqn].is_meta
        }
        if plain:
            data = io.BytesIO()
            torch.save(plain, data)
            found[f"stage_{interface.index}.pt"] = data.getvalue()
    return found
