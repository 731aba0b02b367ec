"""Observer: lines of source that run, and the storages that an op writes."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from pdcompile.errors import TraceError
from pdcompile.ir.opaque import tensors_among
from pdcompile.releases.known_results import known_result
from pdcompile.releases.torch_internals import TorchDispatchMode
from pdcompile.warn import FOLDERS

STANDARD = os.path.dirname(os.__file__) + os.sep
_NN_MODULES = os.path.dirname(torch.nn.modules.__file__) + os.sep
_PLUMBING = ("module.py", "container.py")
_RUNS_MODEL = os.path.join(os.path.dirname(__file__), "run.py")
NO_SOURCE = "<no source>"
_CACHE, _PRECALL = (dis.opmap.get(name, -1) for name in ("CACHE", "PRECALL"))
_TO_CALL = 4  # bytes: the instruction and its cache entry
_STAGE_FILE = re.compile(r"<pdcompile_stages_\d+_(stage_\d+\.py)>")


def frames_of_model(frame: FrameType | None) -> Iterator[FrameType]:
    """The running frames from this one outwards, up to what runs the model."""
    while frame is not None and frame.f_code.co_filename != _RUNS_MODEL:
        yield frame
        frame = frame.f_back


def locate() -> tuple[str, str]:
    """(``file.py:12``, variable) of the innermost frame of user code in the model's run.

    The variable is the name that the running expression is assigned to, or "".  Where only
    torch's own modules run (a Sequential at the root) the place is in them.
    """
    fallback = NO_SOURCE
    for frame in frames_of_model(sys._getframe(1)):
        code = frame.f_code
        file = code.co_filename
        if is_user(file):
            stores = _stores(code).get(instruction_of(frame), "")
            return f"{_shorten(file)}:{frame.f_lineno}", stores
        if fallback == NO_SOURCE and file.startswith(_NN_MODULES) and not file.endswith(_PLUMBING):
            fallback = f"{_shorten(file)}:{frame.f_lineno}"
    return fallback, ""


def instruction_of(frame: FrameType) -> int:
    """The place of a frame in its code, the same each time that it comes to an operation.

    Python makes what it has made a few times in a quicker way: then it may stand in the cache
    behind an instruction while that runs, or, in 3.11, make a call in the PRECALL before it.
    """
    at, code = frame.f_lasti, frame.f_code.co_code
    while at > 0 and code[at] == _CACHE:
        at -= 2
    return at + _TO_CALL if code[at] == _PRECALL else at


def source_of_traceback(error: BaseException) -> str | None:
    """The innermost line of user code that an exception passed through."""
    found = [
        source_of_line(frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_user(frame.f_code.co_filename)
    ]
    return found[-1] if found else None


def stage_line() -> str:
    """The line of generated source that is running, as "stage_1.py:34"; "" for none."""
    return next(_stage_lines(traceback.walk_stack(sys._getframe(1))), "")


def stage_line_of(error: BaseException) -> str | None:
    """The innermost line of generated source that an exception passed through."""
    return [None, *_stage_lines(traceback.walk_tb(error.__traceback__))][-1]


def _stage_lines(frames: Iterable[tuple[FrameType, int]]) -> Iterator[str]:
    for frame, line in frames:
        if found := _STAGE_FILE.fullmatch(frame.f_code.co_filename):
            yield f"{found[1]}:{line}"


def source_of_line(file: str, line: int) -> str:
    """``file.py:12``."""
    return f"{_shorten(file)}:{line}"


def source_of_class(cls: type) -> str:
    """``file.py:12`` of a class's own forward, below its decorators, or `NO_SOURCE`."""
    forward = getattr(cls, "forward", None)
    try:
        forward = inspect.unwrap(forward) if callable(forward) else None
    except ValueError:  # it wraps itself
        return NO_SOURCE
    code = getattr(forward, "__code__", None)
    if code is None or code.co_filename.startswith("<"):
        return NO_SOURCE
    return f"{_shorten(code.co_filename)}:{code.co_firstlineno}"


@functools.lru_cache(maxsize=1024)
def is_user(file: str) -> bool:
    """True if a file is not torch's, pdcompile's, the standard library's or generated code."""
    if file.startswith((*FOLDERS, "<")):
        return False
    return not file.startswith(STANDARD) or "-packages" in file


@functools.lru_cache(maxsize=1024)
def _shorten(file: str) -> str:
    """The path relative to installed packages or the working directory, else to sys.path."""
    paths = sorted((p for p in sys.path if p), key=len, reverse=True)
    installed = [path for path in paths if path.rstrip(os.sep).endswith("-packages")]
    for root in (*installed, os.getcwd(), *paths):
        prefix = root.rstrip(os.sep) + os.sep
        if file.startswith(prefix):
            return file[len(prefix) :]
    return file


@functools.lru_cache(maxsize=4096)
def _stores(code: CodeType) -> dict[int, str]:
    """Offset of each instruction whose result the next one stores -> name of the variable.

    For a result that is unpacked, all names as they are written: ``q, (k, v)``.
    """
    found: dict[int, str] = {}
    instructions = list(dis.get_instructions(code))
    for position, each in enumerate(instructions):
        unpacks = each.opname.startswith("UNPACK")  # of a tensor perhaps
        names = _target(_stored(instructions[position if unpacks else position + 1 :]))
        if names:
            found[each.offset] = names
    return found


def _stored(instructions: Iterable[dis.Instruction]) -> Iterator[str | int]:
    """Names that are stored and lengths that are unpacked, from the first instruction on."""
    for each in instructions:
        match each.opname:
            case "STORE_FAST" | "STORE_DEREF":
                yield str(each.argval)
            case "STORE_FAST_STORE_FAST":
                yield from map(str, each.argval)
            case "STORE_FAST_LOAD_FAST":
                yield str(each.argval[0])
                return
            case "UNPACK_SEQUENCE":
                yield int(each.arg or 0)
            case _:
                return


def _target(stored: Iterator[str | int]) -> str:
    """The target of an assignment; "" where a part of it is not a plain variable."""
    first = next(stored, "")
    if isinstance(first, str):
        return first
    parts = [
        f"({part})" if ", " in part else part for part in (_target(stored) for _ in range(first))
    ]
    comma = "," if len(parts) == 1 else ""
    return ", ".join(parts) + comma if all(parts) else ""


def part_of(variables: str, key: Any) -> str:
    """The variable for item `key` of a result that is stored as ``q, (k, v)``, or ""."""
    if "," not in variables or type(key) is not int:
        return ""
    parts = ast.parse(variables, mode="eval").body
    if not isinstance(parts, ast.Tuple) or not 0 <= key < len(parts.elts):
        return ""
    name = ast.unparse(parts.elts[key])
    return name.removeprefix("(").removesuffix(")") if name != "_" else ""


# Ops that write tensors their schema does not mark: arguments 3 and 4, where 5 says training.
_NORMS = frozenset(f"aten::{kind}_batch_norm" for kind in ("native", "cudnn", "miopen"))


@functools.lru_cache(maxsize=4096)
def effects(func: Any) -> tuple[bool, tuple[tuple[int, str], ...]]:
    """(whether an ATen op may draw, which arguments it writes) according to its schema."""
    writes = tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return torch.Tag.nondeterministic_seeded in func.tags, writes


@functools.lru_cache(maxsize=4096)
def _acts(func: Any) -> bool:
    """True if an ATen op may draw, write or give a tensor another storage."""
    moves = func._overloadpacket is torch.ops.aten.set_
    return moves or func._schema.name in _NORMS or effects(func) != (False, ())


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices which storages the ATen ops below one public call write, and random draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        self.seeded = False
        self.moved = False  # set_, which passes no torch function, gave a tensor another storage
        self.selections: Any = None  # runs ops whose result sizes depend on values

    def clear(self) -> None:
        """Resets the observations; called before each public call."""
        self.written = set()
        self.seeded = self.moved = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _acts(func):
            self.seeded = self.seeded or effects(func)[0]
            self.moved = self.moved or func._overloadpacket is torch.ops.aten.set_
            self.written.update(map(storage_key, written_by(func, args, kwargs)))
        chosen = None if self.selections is None else self.selections.run(func, args, kwargs)
        return known_result(func, args, kwargs) if chosen is None else chosen


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments that an ATen op writes."""
    for index, name in effects(func)[1]:
        yield from tensors_among(args[index] if index < len(args) else kwargs.get(name))
    if func._schema.name in _NORMS and args[5]:
        yield from tensors_among(args[3:5])


def is_dense(tensor: torch.Tensor) -> bool:
    """True if it has a storage and strides."""
    return tensor.layout is torch.strided and not tensor.is_nested


def storage_key(tensor: torch.Tensor) -> int:
    """A number that is equal for tensors that share memory, while one of them lives.

    Raises:
        TraceError: the tensor is sparse or nested.
    """
    if not is_dense(tensor):
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise TraceError(
            f"forward computes with a tensor that is not dense ({kind})",
            where=locate()[0],
            remedy="use index_add, scatter or dense matrices, or do it in a submodule that takes "
            "and returns dense tensors, which is then captured as opaque",
        )
    return int(tensor.untyped_storage()._cdata)
