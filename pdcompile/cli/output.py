"""Output of all verbs: results on stdout or in files, progress and errors on stderr, JSON alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import Console, RenderableType
from rich.text import Text

from pdcompile.errors import (
    ConfigError,
    InfeasibleError,
    NotFoundError,
    PdcompileError,
    RankError,
    errors_as,
)
from pdcompile.report.labels import Terminal

EXIT_DIFFERENT = 1
EXIT_BAD_INPUT = 2
EXIT_INFEASIBLE = 3
# Arguments of verbs that name the file of a result; or its folder, in which a file is tried.
RESULTS = {"output": "", "html": "", "trace": "", "save": ".tried", "place": ".tried"}
SAME = ("plan", "source")  # arguments that ``-o`` may name too
_TAKEN = "the result would take the place of the file that it is made from, or of another result"
_ELSEWHERE = "choose another place for it"

_results: ContextVar[TextIO | None] = ContextVar("results", default=None)


@contextmanager
def json_alone() -> Iterator[None]:
    """Sends what a target prints to stderr, so that stdout has the JSON of a verb and nothing
    else."""
    token = _results.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _results.reset(token)


def stdout() -> Console:
    return _console(sys.stdout)


def stderr() -> Console:
    return _console(sys.stderr)


def _console(file: TextIO) -> Console:
    # A pipe or a log has no width: 100 columns, so that tables are not cut to 80.
    return Terminal(file=file, width=None if file.isatty() else 100)


def is_first_rank() -> bool:
    """True in the process that prints: under torchrun only rank 0 does."""
    return os.environ.get("RANK", "0") == "0"


def under_torchrun() -> bool:
    """True where other processes train with this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def emit_json(document: Any) -> None:
    """Write exactly one JSON object to stdout."""
    results = _results.get() or sys.stdout
    # classes that it does not know: numpy's floats, and what is text
    text = msgspec.json.encode(
        document, enc_hook=lambda one: float(one) if isinstance(one, float) else str(one)
    )
    results.write(msgspec.json.format(text, indent=2).decode() + "\n")
    results.flush()


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a verb: its document for ``--json``, or what is `shown` to a person and which files
    were `written`; and the exit code.  Dataclasses in a document are written field by field, and
    numbers that are not finite as null.  A text is never broken: paths and commands in it can be
    pasted."""

    document: Any
    shown: Iterable[RenderableType] = ()
    written: Iterable[Path | None] = ()
    exit_code: int = 0

    def print(self, *, as_json: bool) -> None:
        if as_json:
            emit_json(self.document)
            return
        for one in self.shown:
            stdout().print(one, soft_wrap=isinstance(one, str))
        for path in self.written:
            if path is not None:
                stderr().print(f"written: {path}", soft_wrap=True)


def as_written(value: Any) -> msgspec.Raw | None:
    """The JSON that a value has in its own files, as a part of a document."""
    return None if value is None else msgspec.Raw(value.to_json().encode())


def check_places(given: Mapping[str, Any]) -> None:
    """Check, before the work, that a command's results can be written: `given` are its arguments.

    Raises:
        ConfigError: as `write_text`; or a place is that of another result, or of a file that is
            read, but for the plan or schedule that ``-o`` is made from.
    """
    for name in [one for one in RESULTS if given.get(one) not in (None, Path())]:
        path, own = given[name] / RESULTS[name], (name, *SAME) if name == "output" else (name,)
        place = path.resolve()
        there = next(one for one in (place, *place.parents) if one.exists())
        others = [other for other in given if other in RESULTS or there == place]
        words = [str(given[o]) for o in others if o not in own and isinstance(given[o], str | Path)]
        words += [word.rpartition(":")[0] for word in words]
        if place in [Path(word).resolve() for word in words]:
            raise ConfigError(_TAKEN, where=str(path), remedy=_ELSEWHERE)
        tried = place if there == place else there / ".tried"
        with errors_as(ConfigError, "cannot write the file", path, _ELSEWHERE):
            if not tried.is_fifo():  # whose reader would see the end
                tried.open("a").close()
        if there != place:
            tried.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a result, parents included.

    Raises:
        ConfigError: it cannot be written, with the system's reason.
    """
    with errors_as(ConfigError, "cannot write the file", path, _ELSEWHERE):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.write(text)


def error_document(error: PdcompileError) -> dict[str, Any]:
    """The JSON form of an error: its status, and what the text says.

    The status is "infeasible" where it is proved that there is no plan, "unknown" where none was
    found, else "error".
    """
    proved = "unknown" if isinstance(error, NotFoundError) else "infeasible"
    return {
        "status": proved if isinstance(error, InfeasibleError) else "error",
        "error": {
            "kind": type(error).__name__,
            "code": error.code,
            "message": error.message,
            "where": error.where,
            "remedy": error.remedy,
        },
    }


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning in the form of our errors (`warnings.showwarning`)."""
    text = Text()
    text.append("warning: ", style="bold yellow")
    text.append(str(message))
    if filename.endswith(".py"):  # a user's, not the command itself
        text.append("\n  where: ", style="bold")
        text.append(f"{filename}:{lineno}")
    Terminal(file=file or sys.stderr).print(text, soft_wrap=True)


def fail(error: PdcompileError, *, as_json: bool = False) -> int:
    """Print an error as a person wants to read it, of several ranks that end with it by one of
    them; the exit code that belongs to it."""
    status = error_document(error)["status"]
    several = under_torchrun()

    def show(first: bool) -> None:
        if as_json and first:
            emit_json(error_document(error))
        text = Text()
        text.append("infeasible" if status == "infeasible" else "error", style="bold red")
        text.append(f" on rank {os.environ.get('RANK')}: " if several else ": ", style="bold red")
        text.append(error.message)
        for label, line in error.details():
            text.append(f"\n  {label}: ", style="bold")
            text.append(line)
        # soft_wrap: a path or a command that can be pasted is never broken.
        stderr().print(text, soft_wrap=True)

    if several:
        from pdcompile.runtime.failure.deduplicated_errors import show_once

        others = show_once(str(error), show, derived=isinstance(error, RankError))
        if others:
            ranks = ", ".join(map(str, others))
            stderr().print(f"the same on rank{'s' * (len(others) > 1)} {ranks}", soft_wrap=True)
    else:
        show(True)
    return EXIT_BAD_INPUT if status == "error" else EXIT_INFEASIBLE
