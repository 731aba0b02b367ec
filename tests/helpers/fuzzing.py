"""Coverage-guided fuzzing of a reader: files that reach new lines are kept, and changed further.

A reader gives a value, or raises one of pdcompile's errors.  Everything else is a finding: another
exception, more CPU time than a file of its size may take, and, by Python's audit events, any code
that is compiled or executed, module that is imported, process that is started, and file that is
opened outside the folder that was given, or written.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import pdcompile
from pdcompile.errors import PdcompileError
from tests.helpers.mutants import Mutation

SECONDS = 4.0  # of CPU time: files here are a few kB
_PACKAGE = Path(pdcompile.__file__).parent
_OURS = (str(_PACKAGE), str(_PACKAGE.parent / "benchmarks" / "published"))
_FORBIDDEN = (
    "compile", "exec", "subprocess.Popen", "os.system", "os.exec", "os.fork",
    "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.putenv", "os.kill", "os.chmod",
    "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate",
    "os.chdir", "socket.connect", "socket.bind", "ctypes.dlopen", "shutil.rmtree", "shutil.move",
    "shutil.copyfile", "urllib.Request", "webbrowser.open", "sys.addaudithook",
    "builtins.input", "builtins.breakpoint",
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LIBRARIES = tuple(
    {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
)


@dataclass(frozen=True)
class Format:
    """A kind of file that pdcompile reads.

    Args:
        seeds: files that are whole.
        mutate: makes another of one.
        read: reads the bytes of a file (it may write them to `folder` first: `reading` says when
            the reader itself begins) and gives a value.
        again: of what was read, the value that is read from what is written of it, or of it
            itself where nothing can be written; they have to be equal.
        folder: what may be opened, and nothing else may be written.
    """

    name: str
    seeds: tuple[bytes, ...]
    mutate: Mutation
    read: Callable[[bytes], Any]
    folder: Path
    again: Callable[[Any], tuple[Any, Any]] | None = None


@dataclass(frozen=True)
class Finding:
    """A file, and what its reader did that none may do."""

    data: bytes
    what: str


@dataclass
class Outcome:
    """Results for the files of one format."""

    name: str
    files: int = 0
    kept: int = 0  # reached new lines
    read: int = 0
    refused: int = 0
    lines: int = 0  # of pdcompile that were reached
    findings: list[Finding] = field(default_factory=list)


class TooSlow(BaseException):
    """Raised inside a reader that takes too long; no `except Exception` catches it."""


class _Audit:
    """Acts of a reader, by Python's audit events, while `on`.  A hook cannot be taken away."""

    def __init__(self) -> None:
        self.on = False
        self.folder = ""
        self.seen: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, mode, flags = arguments
            self._opened(path, mode, flags)
        elif event == "import":
            if arguments[0].partition(".")[0] not in sys.stdlib_module_names:
                self.seen.append(f"imports {arguments[0]}")
        elif event in _FORBIDDEN and not self._of_library(event, arguments):
            self.seen.append(f"{event} {str(arguments)[:200]}")

    def _opened(self, path: Any, mode: Any, flags: Any) -> None:
        if isinstance(path, int):
            return
        place = os.path.realpath(os.fsdecode(path))
        if isinstance(flags, int) and flags & _WRITES:
            self.seen.append(f"writes {place}")
        elif not place.startswith((self.folder, *_LIBRARIES, "/proc/")):
            self.seen.append(f"opens {place}")

    @staticmethod
    def _of_library(event: str, arguments: tuple[Any, ...]) -> bool:
        """Whether it is the code of an installed module that is imported just now."""
        if event == "compile":  # a traceback reads its lines as a tree, which runs nothing
            return arguments[1] == "<unknown>"
        name = getattr(arguments[0], "co_filename", "") if event == "exec" else ""
        return bool(name.startswith((*_LIBRARIES, "<frozen")))


_AUDIT = _Audit()


@contextmanager
def audited(folder: Path) -> Iterator[list[str]]:
    """Acts inside that no reader may do; libraries may be imported by then, or not."""
    if not getattr(_AUDIT, "hooked", False):
        sys.addaudithook(_AUDIT)
        _AUDIT.hooked = True  # type: ignore[attr-defined]
    _AUDIT.seen, _AUDIT.folder, _AUDIT.on = [], os.path.realpath(folder), True
    try:
        yield _AUDIT.seen
    finally:
        _AUDIT.on = False


@contextmanager
def unaudited() -> Iterator[None]:
    """Context in which a harness does what the reader may not: puts the file into its place."""
    before, _AUDIT.on = _AUDIT.on, False
    try:
        yield
    finally:
        _AUDIT.on = before


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TooSlow inside after so much CPU time."""

    def stop(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class Lines:
    """The lines of pdcompile that have run; functions all of whose lines have are not traced."""

    def __init__(self) -> None:
        self.count = 0
        self._left: dict[CodeType, set[int]] = {}

    @contextmanager
    def traced(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: Any, _event: str, _: Any) -> Any:
        code = frame.f_code
        left = self._left.get(code)
        if left is None:
            ours = code.co_filename.startswith(_OURS)
            left = {number for *_, number in code.co_lines() if number} if ours else set()
            left.discard(code.co_firstlineno)
            self._left[code] = left
        if not left:
            return None

        def line(frame: Any, event: str, _: Any) -> Any:
            if event == "line" and frame.f_lineno in left:
                left.remove(frame.f_lineno)
                self.count += 1
            return line

        return line


def judged(kind: Format, data: bytes, lines: Lines) -> tuple[str, str]:
    """("read" | "refused" | "finding", what)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with audited(kind.folder) as seen, limited(SECONDS), lines.traced():
                value = kind.read(data)
                same = kind.again is None or _equal(*kind.again(value))
            if not seen:
                return ("read", "") if same else ("finding", "reads back as another value")
        except PdcompileError as error:
            str(error).encode()  # can be printed
            if not seen:
                return "refused", error.message
        except TooSlow:
            return "finding", f"takes more than {SECONDS} s"
        except Exception as error:
            return "finding", _described(error)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return "finding", _described(error)
    return "finding", seen[0]


def _described(error: BaseException) -> str:
    """Its kind, the place in pdcompile, and its text."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_OURS)]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "outside"
    return f"{type(error).__name__} in {place}: {str(error)[:200]}"


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other)


def fuzz(kind: Format, files: int, seed: int, tick: Callable[[], object] = lambda: None) -> Outcome:
    """Read so many files, each made of one that reached lines which none had reached before."""
    draw = random.Random(f"{kind.name} {seed}")
    found = Outcome(kind.name)
    lines = Lines()
    for data in kind.seeds:  # twice: the first one imports
        judged(kind, data, lines)
        result, what = judged(kind, data, lines)
        assert result == "read", f"a whole {kind.name} file: {what}"
    corpus = list(kind.seeds)
    known: set[str] = set()
    for _ in range(files):
        # half of them of a whole file: what is kept is often refused early
        data = kind.mutate(draw.choice(kind.seeds if draw.random() < 0.5 else corpus), draw)
        before = lines.count
        result, what = judged(kind, data, lines)
        found.files += 1
        found.read += result == "read"
        found.refused += result == "refused"
        if result == "finding" and what[:60] not in known:
            known.add(what[:60])
            found.findings.append(Finding(data, what))
        if lines.count > before and len(data) < 50_000:
            corpus.append(data)
            found.kept += 1
        tick()
    found.lines = lines.count
    return found
