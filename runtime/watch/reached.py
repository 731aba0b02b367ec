"""Values that the user's functions can read: globals, closures, defaults, attributes of objects.

Stages have the values of when they were made.  That a function names a variable does not say that
a call reads it: a change of one is told, once, and not refused.
"""

from __future__ import annotations

import dis
import os
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, device, dtype

from pdcompile.eager.snapshot import MISSING, attribute, is_array
from pdcompile.warn import FOLDERS

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, Tensor, dtype, device)
_CONTAINERS = (dict, list, tuple, set, SimpleNamespace)
_MOST = 64  # items of a container: a longer one is data
_LIBRARIES = (*FOLDERS, os.path.dirname(os.__file__) + os.sep)
_NONE: frozenset[str] = frozenset()
Holder = CellType | Mapping[str, Any]  # of a variable


class Reached(NamedTuple):
    """A variable, by its name in the function that was found to name it."""

    name: str
    function: str
    holder: Holder

    def value(self) -> Any:
        if isinstance(self.holder, CellType):
            try:
                return self.holder.cell_contents
            except ValueError:  # deleted, or not yet there
                return MISSING
        return self.holder.get(self.name.rpartition(".")[2], MISSING)


class Reach:
    """The variables that hold plain values and that functions can read.

    Args:
        functions: callables by name; code of installed packages is not looked into.
        noted: objects whose attributes are compared already.
    """

    def __init__(self, functions: Iterable[tuple[str, Any]], noted: Iterable[Any]) -> None:
        self._noted = {id(one) for one in noted}
        self._seen: dict[Any, Any] = {}  # with what was seen, so that an id means one thing
        self.found: list[Reached] = []
        for name, one in functions:
            self._follow(one, name, name, _NONE)

    def _variable(self, name: str, of: str, holder: Holder, names: frozenset[str]) -> None:
        one, key = Reached(name, of, holder), (id(holder), name.rpartition(".")[2])
        value = one.value()
        size = len(getattr(value, "__dict__", value)) if isinstance(value, _CONTAINERS) else 0
        size = value.size if is_array(value) else size
        if size > _MOST or not (size or isinstance(value, (*_PLAIN, *_CONTAINERS))):
            self._follow(value, name, of, names)
        elif key not in self._seen:
            self._seen[key] = holder
            self.found.append(one)

    def _follow(self, value: Any, name: str, of: str, names: frozenset[str]) -> None:
        """Finds what a value leads to, for code that asks for attributes of these names."""
        key = id(value), names
        if key in self._seen:
            return
        self._seen[key] = value
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType):
            self._follow(value.__func__, name, of, _NONE)
            self._follow(value.__self__, "self", of, _asked(value.__func__))
        elif isinstance(value, partial):
            self._follow(value.func, name, of, _NONE)
            given = {f"argument {i}": one for i, one in enumerate(value.args)}
            for holder in (given, value.keywords):
                for each in holder:
                    self._variable(each, f"a partial function in {name}", holder, names)
        elif isinstance(value, ModuleType):
            if not _is_installed(getattr(value, "__file__", None) or _LIBRARIES[0]):
                self._attributes(value, name, of, names)
        elif not isinstance(value, type):
            self._attributes(value, name, of, names)
            for each in sorted({*names, "forward", "__call__"}):
                method = attribute(value, each)
                if isinstance(method, FunctionType):
                    own = not _is_installed(method.__code__.co_filename)
                    self._follow(method, name, of, _NONE)
                    if own or each in ("forward", "__call__"):
                        self._follow(value, name, of, _asked(method))

    def _attributes(self, owner: Any, name: str, of: str, names: frozenset[str]) -> None:
        own = getattr(owner, "__dict__", {})
        for each in sorted(names & own.keys()) if id(owner) not in self._noted else ():
            self._variable(f"{name}.{each}", of, own, names)

    def _function(self, function: FunctionType) -> None:
        code, home, asked = function.__code__, function.__globals__, _asked(function)
        if _is_installed(code.co_filename):
            return
        of = f"{function.__qualname__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._variable(name, of, cell, asked)
        defaults = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        given = dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})
        for holder in (given, vars(function)):
            for name in holder:
                self._variable(name, of, holder, asked)
        for name in sorted(_names(code, True) & home.keys()):
            self._variable(name, of, home, asked)


def _is_installed(file: str) -> bool:
    return file.startswith(_LIBRARIES) or "-packages" + os.sep in file


def _asked(function: Any) -> frozenset[str]:
    """The names of attributes in a function, among others."""
    return _names(function.__code__) if hasattr(function, "__code__") else _NONE


@cache
def _names(code: CodeType, only_globals: bool = False) -> frozenset[str]:
    """Names in code, and in what is defined in it; a global may be called as an attribute is."""
    loads = (one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL")
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    own = frozenset(loads if only_globals else code.co_names)
    return own.union(*(_names(one, only_globals) for one in inner))
