"""State of the user's code outside of the model: globals, class attributes, closures, objects.

A recording must leave none of its fake tensors there, or the user's own next call would find one in
a table or a functools cache.  A number there that calls change is state of the model, and refused.
"""

from __future__ import annotations

import functools
import gc
import inspect
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

import torch
from torch import nn

from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.cached_tensors import tensors_within
from pdcompile.passes.trace.tape.observer import is_user, source_of_class, source_of_code
from pdcompile.releases.torch_internals import FakeTensor

_MOST = 20_000  # places
_LARGE = 10_000  # containers with more items are data, not tables of forward
_DEPTH = 3  # of containers in a value
_NOT_USERS = ("torch", "pdcompile", "functools", "inspect", "re", "typing")
_CACHE: Any = type(functools.lru_cache(maxsize=1)(len))


class GlobalState:
    """Namespaces, containers and closures that the code of a model's classes can reach."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[int, tuple[Any, str, str | None]] = {}  # by id: place, name, line
        self._before: list[tuple[Any, str, str | None, Any]] = []
        for module in model.modules():
            self._enter_class(type(module))
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if not (name.startswith("_") or isinstance(value, dict | list | set)):
                    where = source_of_class(type(module))
                    self._enter(value, f"{path}.{name}" if path else name, where)

    def _add(self, place: Any, name: str, where: str | None) -> bool:
        if id(place) in self._places or len(self._places) >= _MOST:
            return False
        self._places[id(place)] = (place, name, where)
        return True

    def _enter_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if _of_user(base) and self._add(base, f"{base.__qualname__}.", source_of_class(base)):
                self._enter_all(vars(base), f"{base.__qualname__}.", source_of_class(base))

    def _enter_all(self, namespace: Mapping[Any, Any], prefix: str, where: str | None) -> None:
        for name, value in list(namespace.items()):
            if not str(name).startswith("__"):
                self._enter(value, f"{prefix}{name}", where)

    def _enter(self, value: Any, name: str, where: str | None) -> None:
        if isinstance(value, torch.Tensor | nn.Module):
            return
        if isinstance(value, MethodType | property | staticmethod | classmethod):
            value = getattr(value, "__func__", None) or getattr(value, "fget", None)
        if isinstance(value, type):
            if _of_user(value) and not issubclass(value, nn.Module):
                self._enter_class(value)
        elif isinstance(value, FunctionType):
            self._enter_function(inspect.unwrap(value), name)
        elif isinstance(value, dict | list | deque | set):
            if len(value) <= _LARGE and self._add(value, name, where):
                for item in list(value.values() if isinstance(value, dict) else value):
                    self._enter(item, name, where)
        elif isinstance(value, tuple):
            for item in value:
                self._enter(item, name, where)
        elif _of_user(type(value)) and self._add(value, f"{name}.", where):
            self._enter_class(type(value))
            self._enter_all(_attributes(value), f"{name}.", where)

    def _enter_function(self, function: FunctionType, name: str) -> None:
        code = function.__code__
        where = source_of_code(code)
        if not _is_file_of_user(code.co_filename) or not self._add(function, f"{name}.", where):
            return
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._enter(value, name, where)
        self._enter_all(vars(function), f"{name}.", where)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if self._add(cell, f"{variable} of {name}, ", where):
                for value in _content(cell).values():
                    self._enter(value, variable, where)
        home = sys.modules.get(function.__module__ or "")
        if home is not None and vars(home) is function.__globals__ and self._add(home, "", where):
            self._enter_all(vars(home), "", where)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Removes the fake tensors that were put into any place inside."""
        self._before = [(*entry, _content(entry[0])) for entry in self._places.values()]
        try:
            yield
        finally:
            for place, _, _, content in self._before:
                _clean(place, content)
            self._before = []

    def check(self, memo: Callable[[torch.Tensor], bool]) -> None:
        """Refuses changes of a recording that later calls may find; called inside `as_before`.

        Args:
            memo: whether every call would compute this fake tensor alike.

        Raises:
            TraceError: a number was changed, or a tensor kept that differs between calls.
        """
        for place, prefix, where, before in self._before:
            now = _content(place)
            if isinstance(now, list):
                now, before = {"": now}, {"": now if len(now) == len(before) else None}
            for name, value in now.items():
                if before.get(name, self) is value or str(name).startswith("__"):
                    continue
                counted = _is_number(value) and _is_number(before.get(name))
                if counted or any(not memo(t) for t in _fakes_in(value)):
                    shown = f"{prefix}[{name!r}]" if isinstance(place, dict) else f"{prefix}{name}"
                    raise refusals.error(refusals.CHANGED_OUTSIDE, shown, where)


def _of_user(cls: type) -> bool:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return bool(file) and _is_file_of_user(str(file)) and not issubclass(cls, torch.Tensor)


def _is_file_of_user(file: str) -> bool:
    """Whether it is user code outside installed packages, which would take long to search."""
    return is_user(file) and "-packages" not in file


def _attributes(value: Any) -> dict[str, Any]:
    return {**slots_of(value), **getattr(value, "__dict__", {})}


def slots_of(value: Any) -> dict[str, Any]:
    """What the slots of an object hold, by name."""
    found = {}
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType) and cls.__module__ != "builtins":
                with suppress(AttributeError):  # it was never filled
                    found[name] = object.__getattribute__(value, name)
    return found


def _content(place: Any) -> Any:
    if isinstance(place, dict):
        return dict(place)
    if isinstance(place, list | deque | set):
        return list(place)
    if isinstance(place, CellType):
        try:
            return {"cell_contents": place.cell_contents}
        except ValueError:  # not filled yet
            return {}
    if isinstance(place, type) or hasattr(place, "__file__"):
        return dict(vars(place))
    return _attributes(place)


def _clean(place: Any, before: Any) -> None:
    now = _content(place)
    if isinstance(place, list | deque | set):
        if any(map(_fakes_in, now)):
            place.clear()
            (place.update if isinstance(place, set) else place.extend)(before)
        return
    table = isinstance(place, dict)
    put, remove = (operator.setitem, operator.delitem) if table else (setattr, delattr)
    for name, value in now.items():
        if not _fakes_in(value):
            continue
        if name in before:
            put(place, name, before[name])
        else:
            remove(place, name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fakes_in(value: Any) -> list[torch.Tensor]:
    found = (tensor for _, tensor in tensors_within(value, _DEPTH))
    return [tensor for tensor in found if isinstance(tensor, FakeTensor)]


def caches() -> list[Any]:
    """All functions of this process that functools.lru_cache or cache wraps."""
    # Twice as fast as looking at the types of all objects: an object refers to its type.
    return [found for found in gc.get_referrers(_CACHE) if type(found) is _CACHE]


@contextmanager
def emptied(known: list[Any]) -> Iterator[None]:
    """Clears the caches among `known` that were filled inside.

    Otherwise a helper that caches a tensor (an index of relative positions) would return the fake
    of one recording to the next one, and to the user's own calls.
    """
    before = [cache.cache_info().misses for cache in known]
    try:
        yield
    finally:
        for cache, misses in zip(known, before, strict=True):
            if cache.cache_info().misses != misses and _is_cache_of_user(cache):
                cache.cache_clear()


def _is_cache_of_user(cache: Any) -> bool:
    home = str(getattr(cache, "__module__", "")).split(".")
    # A logging module caches which messages the user has seen (warning_once).
    return home[-1] != "logging" and home[0] not in _NOT_USERS
