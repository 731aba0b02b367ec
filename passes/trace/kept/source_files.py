"""Source files of the loaded modules, by which a kept capture notices that a program was edited."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pdcompile.passes.trace.tape.observer import STANDARD, TORCH

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was when a model was captured."""

    path: str
    bytes: int
    changed_ns: int

    @property
    def is_same(self) -> bool:
        """Whether it is still so."""
        try:
            state = os.stat(self.path)
        except OSError:
            return False
        return (state.st_size, state.st_mtime_ns) == (self.bytes, self.changed_ns)


def loaded_files() -> tuple[SourceFile, ...]:
    """The files of all modules of this process, without those of Python and torch, which their
    versions stand for."""
    found: dict[str, SourceFile] = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or path in found or path.startswith(TORCH):
            continue
        if path.startswith(STANDARD) and "-packages" not in path:
            continue
        try:
            state = os.stat(path)
        except OSError:  # in an archive
            continue
        found[path] = SourceFile(os.path.abspath(path), state.st_size, state.st_mtime_ns)
    return tuple(found[path] for path in sorted(found))


def changed_since_start(files: tuple[SourceFile, ...]) -> str | None:
    """The path of a file that is younger than this process, whose modules may be older then."""
    start = started_ns()
    return next((one.path for one in files if one.changed_ns >= start), None)


def started_ns() -> int:
    """When this process started, in nanoseconds since 1970."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    up = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    return time.time_ns() - int((up - int(fields[19]) / _TICKS) * 1e9)
