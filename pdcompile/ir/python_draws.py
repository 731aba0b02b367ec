"""PythonDraw: one op that draws random numbers from numpy's or Python's own generator.

SpecAugment of transformers masks with ``np.random``.  Such calls pass no torch function.  One op is
the innermost function at the top level of a file that draws, such as ``_compute_mask_indices``, if
it takes no module and no tensor of floats; else it is the single call of ``np.random``.  The result
is an array, which becomes a tensor.

As other random ops it has a stream of its own (`pdcompile.eager.randomness`): both generators are
seeded when it begins.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy as np
import torch

from pdcompile.eager.snapshot import is_array
from pdcompile.errors import SourceError

# Modules whose functions draw from one generator of the process.
HOMES = ("numpy.random", "random")
_STATES = frozenset(("seed", "get_state", "set_state", "getstate", "setstate"))

Call = Callable[..., Any]  # (its dotted name, the function, args, kwargs) -> its result


class PythonDraw(torch.autograd.Function):
    """``PythonDraw.apply(name, args, kwargs)``: what the function of this name draws, as a tensor.

    An autograd.Function only because graphs and generated source may call these: there are no
    gradients.
    """

    @staticmethod
    def forward(ctx: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls the function, on the stream that was announced or else as in plain Python.

        Raises:
            SourceError: the name is not one of a function that draws.
        """
        function = _function(name)
        begin()
        return as_tensor(function(*args, **kwargs))


def as_tensor(drawn: Any) -> torch.Tensor | None:
    """An array as a tensor that shares memory with it; None for other results."""
    if isinstance(drawn, torch.Tensor):
        return drawn
    return torch.as_tensor(drawn) if is_array(drawn) and drawn.dtype.kind in "biuf" else None


# Streams.

_PYTHON: Any = random.getstate.__self__  # type: ignore[attr-defined]
_announced: int | None = None  # seed of the op that runs next, as far as it draws in Python
#: by region of `preserved`: the states that it ends with; None: no op has seeded them yet
_before: list[tuple[Any, Any] | None] = []


def announce(seed: int | None) -> None:
    """Says with which seed the next op begins; None: it goes on where the generators are."""
    global _announced
    _announced = seed


def begin() -> None:
    """Seeds both generators as announced.  Seeding takes 10 µs, so other ops do not."""
    if _announced is not None:
        if _before and _before[-1] is None:
            _before[-1] = states()
        random.seed(_announced)
        np.random.seed(_announced & 0xFFFFFFFF)


def states() -> tuple[Any, Any]:
    """The states of both generators, to be compared or restored."""
    found: Any = np.random.get_state(legacy=False)
    if found["bit_generator"] != "MT19937":  # the user's, by set_bit_generator
        return random.getstate(), None
    key, position = found["state"]["key"].tobytes(), int(found["state"]["pos"])
    return random.getstate(), (key, position, found["has_gauss"], found["gauss"])


def marks() -> tuple[Any, ...]:
    """Marks of both generators, which draws change, but for the second of two normal numbers of
    numpy's.  Their memory (624 words and a position) is read in a hundredth of their states' time.
    """
    python = ctypes.string_at(id(_PYTHON), random.Random.__mro__[1].__basicsize__)
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    numpys = type(bits) is np.random.MT19937 and ctypes.string_at(bits.ctypes.state_address, 2500)
    return python[object.__basicsize__ :], _PYTHON.gauss_next, numpys


def restore(found: tuple[Any, Any]) -> None:
    """Puts both generators into these states; nothing is announced any more."""
    announce(None)
    random.setstate(found[0])
    if found[1] is not None:
        key = np.frombuffer(found[1][0], dtype=np.uint32)
        np.random.set_state(("MT19937", key, *found[1][1:]))


@contextmanager
def preserved(*, from_ops: bool = False) -> Iterator[None]:
    """Puts both generators back at the end; nothing is announced then.

    `from_ops`: whatever draws here is an op, so that the states, which take 50 µs to read, are read
    when the first one does.
    """
    _before.append(None if from_ops else states())
    try:
        yield
    finally:
        found = _before.pop()
        if found is None:
            announce(None)
        else:
            restore(found)


# Who draws.


@contextmanager
def watched(call: Call) -> Iterator[None]:
    """Calls ``call(name, function, args, kwargs)`` in place of each function that draws."""
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for home in HOMES:
        present, drawing = vars(sys.modules[home]), drawing_functions(home)
        held.append((present, {name: present[name] for name in drawing}))
        for name, function in drawing.items():
            present[name] = functools.partial(_instead, call, f"{home}.{name}", function)
    try:
        yield
    finally:
        for present, before in held:
            present.update(before)


def _instead(call: Call, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(name, function, args, kwargs)


@functools.cache
def drawing_functions(home: str) -> dict[str, Callable[..., Any]]:
    """The functions of one of HOMES, by name; they are methods of the module's own generator."""
    functions = vars(sys.modules[home])
    owner = getattr(functions["random"], "__self__", functions)  # unless somebody replaced it
    return {
        name: value
        for name, value in functions.items()
        if getattr(value, "__self__", None) is owner and name not in _STATES
    }


def drawing_frame(frame: FrameType | None) -> FrameType | None:
    """The running function that is one op, from `frame` outwards; None where a single call is."""
    while frame is not None:
        home = str(frame.f_globals.get("__name__"))
        if home.startswith(("pdcompile.", "torch.nn.modules.")):
            return None
        if function_of(frame) is not None:
            return None if any(map(_may_have_gradients, _arguments(frame))) else frame
        frame = frame.f_back
    return None


def _arguments(frame: FrameType) -> list[Any]:
    code = frame.f_code
    many = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + many]
    found = frame.f_locals
    return [found[name] for name in names if name in found]


def _may_have_gradients(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    if isinstance(value, tuple | list):
        return any(map(_may_have_gradients, value))
    return isinstance(value, torch.nn.Module)


def function_of(frame: FrameType) -> Callable[..., Any] | None:
    """The function that a module has under the name of the running code."""
    found = frame.f_globals.get(frame.f_code.co_name)
    plain = inspect.unwrap(found) if callable(found) else None
    return found if getattr(plain, "__code__", None) is frame.f_code else None


def _function(name: str) -> Callable[..., Any]:
    """The function of a dotted name, in a module that is imported already.

    A graph may come from a file, so it has to be a function that draws.
    """
    home, _, own = name.rpartition(".")
    module = sys.modules.get(home)
    found = vars(module).get(own) if module is not None else None
    if module is not None and home in HOMES and own in drawing_functions(home):
        return drawing_functions(home)[own]
    if inspect.isfunction(found) and _mentions_a_generator(found):
        return found
    raise SourceError(
        f"{name!r} is no function that draws random numbers",
        where=name,
        remedy=f"import {home or 'its module'} first: the model's own function is called by name",
    )


def _mentions_a_generator(function: Any) -> bool:
    plain = inspect.unwrap(function)
    names = _names(plain.__code__)
    held = [plain.__globals__[name] for name in names if name in plain.__globals__]
    homes = [*HOMES, *(["numpy"] if "random" in names else [])]
    return any(isinstance(each, ModuleType) and each.__name__ in homes for each in held)


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))
