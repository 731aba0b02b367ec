"""The cache of captures, which the command line's verbs share: a large model takes minutes.

A file is found by the digest of all that a capture depends on (`description.py`: code, globals and
configuration as they are in this process; the call's structure, shapes and constants; versions),
and says inside which source files, numbers and values it holds for.  Where anything differs, or
cannot be told, the model is captured again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pdcompile
from pdcompile.errors import PdcompileError
from pdcompile.files import CAPTURE, VARIABLE, cache_folder, drop_oldest, read_limited, write_whole
from pdcompile.ir.graph import Capture
from pdcompile.passes.trace import attached, capture
from pdcompile.passes.trace.interceptors.process_state import attention_kernels
from pdcompile.passes.trace.kept.capture_record import (
    SCHEMA,
    Header,
    changed_since_start,
    example_digest,
    from_bytes,
    loaded_files,
    number_digests,
    to_bytes,
)
from pdcompile.passes.trace.kept.description import Undescribed, described
from pdcompile.passes.trace.kept.structure_record import NotWritten
from pdcompile.passes.trace.subject import CaptureCall
from pdcompile.passes.trace.tape.interceptor import patched
from pdcompile.warn import warn

LEAST_SECONDS = 5.0  # of a capture that is kept: of others, looking costs what it saves
_LOG = logging.getLogger(__name__)
Paths = Sequence[Path]


def kept_or_captured(
    call: CaptureCall, say: Callable[[str], None], beside: Path | None = None
) -> Capture:
    """The capture of an earlier process where it is one of this model, else a new one.

    Args:
        say: told where the capture is from, and why one that took long is not kept.
        beside: another file to look into, and to write (`files.capture_beside`).
    """
    if beside is None and cache_folder() is None:
        return new_capture(call)
    try:
        key = _key(call)
    except Undescribed as unknown:
        return _captured_anew(call, say, f"what forward depends on cannot be told: {unknown}")
    paths = _paths(key, beside)
    found = _first(call, key, paths)
    if found is None:
        return _captured_anew(call, say, "", key, paths)
    header, kept = found
    for message in header.warnings:
        warn(message)
    say(
        f"the capture is that of {header.captured}, which took {header.seconds:.0f} s "
        f"({kept.kept}; --no-cache or {VARIABLE}=off captures again)"
    )
    return attached(kept, call)


def kept_capture(call: CaptureCall, beside: Path | None = None) -> Capture | None:
    """The capture that `kept_or_captured` would take; None where it would make one."""
    with suppress(Undescribed):
        key = _key(call)
        if found := _first(call, key, _paths(key, beside)):
            return found[1]
    return None


def _paths(key: str, beside: Path | None) -> Paths:
    """The files in which a capture may be kept."""
    folder = cache_folder()
    usual = [] if folder is None else [folder / f"{key[:32]}{CAPTURE}"]
    return usual if beside is None else [beside, *usual]


def _first(call: CaptureCall, key: str, paths: Paths) -> tuple[Header, Capture] | None:
    return next((found for path in paths if (found := _read(call, key, path))), None)


def _captured_anew(
    call: CaptureCall, say: Callable[[str], None], reason: str, key: str = "", paths: Paths = ()
) -> Capture:
    """A new capture, which is written to these files unless there is a reason against it."""
    began = time.monotonic()
    with noted_warnings() as messages:
        found = new_capture(call)
    seconds = time.monotonic() - began
    if seconds < LEAST_SECONDS:
        return found
    header = Header(
        key=key,
        captured=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        seconds=seconds,
        files=loaded_files(),
        numbers=(),
        example=example_digest(call.flat) if found.by_values else "",
        warnings=tuple(messages),
    )
    reason = reason or found.unkept or _written(call, found, header, paths)
    if reason:
        say(f"the capture is not kept for the next command: {reason}")
    return found


def forget(found: Capture) -> None:
    """Removes the file of a capture that turned out to be of another model."""
    if found.kept:
        Path(found.kept).unlink(missing_ok=True)


def _read(call: CaptureCall, key: str, path: Path) -> tuple[Header, Capture] | None:
    """A kept capture that holds here; None where there is none."""
    if not path.is_file():
        return None
    try:
        header, found = from_bytes(read_limited(path), str(path))
    except (PdcompileError, OSError) as error:
        _LOG.warning("a kept capture is unreadable; capturing again: %s", error)
        return None
    changed = next((one.path for one in header.files if not one.is_same), None)
    differs = (
        "it is of another model"
        if header.key != key
        else f"{changed} was changed"
        if changed is not None
        else "buffers have other values"
        if header.numbers != number_digests(call.model, found.numbers)
        else "the example has other values"
        if header.example and header.example != example_digest(call.flat)
        else ""
    )
    if differs:
        _LOG.info("the kept capture %s is not used: %s", path, differs)
        return None
    with suppress(OSError):  # used last now, where it may be written
        os.utime(path)
    return header, replace(found, kept=str(path))


def _written(call: CaptureCall, found: Capture, header: Header, paths: Paths) -> str:
    """Writes a capture; the reason why not, or ""."""
    if changed := changed_since_start(header.files):
        return f"{changed} was changed while this process ran"
    numbers = number_digests(call.model, found.numbers)
    if numbers is None:
        return "forward makes numbers of a tensor that is no buffer"
    try:
        data = to_bytes(replace(header, numbers=numbers), found)
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
            if path.parent == cache_folder():
                drop_oldest(path.parent, f"*{CAPTURE}")
    except (NotWritten, PdcompileError, OSError) as error:
        return str(error)
    return ""


@contextmanager
def noted_warnings() -> Iterator[list[str]]:
    """The texts of the warnings that are shown inside."""
    texts: list[str] = []
    show: Any = warnings.showwarning

    def noted(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, UserWarning):
            texts.append(str(message))
        show(message, category, *rest, **named)

    with patched((warnings, "showwarning", noted)):
        yield texts


def _key(call: CaptureCall) -> str:
    """Digest of what the capture depends on, but for files and values.

    Raises:
        Undescribed: some of it cannot be told.
    """
    leaves = call.flat.leaves
    shapes = [
        (path, tuple(x.shape), x.stride(), x.dtype, x.device.type, x.requires_grad)
        for path, x in leaves.items()
        if isinstance(x, Tensor)
    ]
    constants = {path: x for path, x in leaves.items() if not isinstance(x, Tensor)}
    spec = call.flat.spec
    parts = (
        SCHEMA, pdcompile.__version__, sys.version,
        torch.__version__, torch.version.git_version,
        described(call.model, call.loss_fn, constants, str(spec.signature)),
        shapes, spec.arguments, spec.target, sorted(spec.by_keyword),
        call.layout.size, call.layout.dims, call.layout.orders, call.microbatch_size,
        call.autocast, attention_kernels(),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()


def new_capture(call: CaptureCall) -> Capture:
    """A capture that is not read from a file."""
    return capture(
        call.model, call.flat, call.layout, call.loss_fn,
        microbatch_size=call.microbatch_size, autocast=call.autocast,
    )  # fmt: skip
