"""State of the user's code outside of the model: globals of its files, attributes of classes and of
objects whose methods are called, closures.

A recording must leave none of its fake tensors there, or the user's own next call would find one in
a table or a functools cache.  A number there that calls change is state of the model, and refused.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from pdcompile.eager.snapshot import tensors_at
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.attribute_reads import is_plain_object
from pdcompile.passes.trace.tape.observer import is_user, source_of_line
from pdcompile.releases.torch_internals import FakeTensor

_LARGE = 1_000  # containers with more items are data, not tables of forward
_DEPTH = 3  # of containers in a value
_NOT_USERS = ("torch", "pdcompile", "functools", "importlib", "inspect", "re", "sympy", "typing")
_CACHE: Any = type(functools.lru_cache(maxsize=1)(len))
_frozen: list[Any] = []  # of such functions


class GlobalState:
    """Functions that calls of a model run (forwards, the loss, hooks) with their closures, classes
    and objects that these are of, their files, and the containers in all of them; and all
    functions of this process that functools.lru_cache or cache wraps."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self._places: dict[int, tuple[Any, str, str | None]] = {}  # by id: place, name, line
        self._before: list[tuple[Any, str, str | None, Any]] = []
        self._caches = _caches()
        modules = {id(module): module for module in model.modules()}
        tables = [
            t for one in modules.values() for t in (one._forward_hooks, one._forward_pre_hooks)
        ]
        hooks = [hook for table in tables for hook in table.values()]
        for called in (*modules.values(), loss_fn, *hooks):
            function, owner = _unwrapped(called)
            code = getattr(function, "__code__", None)
            where = code and source_of_line(code.co_filename, code.co_firstlineno)
            for one in filter(_of_user, (function, *type(owner).__mro__)):
                self._enter_owner(sys.modules[one.__module__], "", where)
                self._enter_owner(one, f"{one.__qualname__}.", where)
                if one is type(owner) and id(owner) not in modules:  # those are the model's state
                    self._enter_owner(owner, f"{one.__qualname__}.", where)
            cells = getattr(function, "__closure__", None) or ()
            for name, cell in zip(code.co_freevars if code else (), cells, strict=True):
                with suppress(ValueError):  # it is empty
                    self._enter(cell.cell_contents, name, where, 2)

    def _enter_owner(self, owner: Any, prefix: str, where: str | None, depth: int = 2) -> None:
        if id(owner) not in self._places and hasattr(owner, "__dict__"):
            self._places[id(owner)] = (owner, prefix, where)
            for name, value in vars(owner).items():
                if not name.startswith("__"):
                    self._enter(value, f"{prefix}{name}", where, depth)

    def _enter(self, value: Any, name: str, where: str | None, depth: int) -> None:
        container = isinstance(value, dict | list | deque | set) and len(value) <= _LARGE
        if container and depth and id(value) not in self._places:
            self._places[id(value)] = (value, name, where)
            for item in value.values() if isinstance(value, dict) else value:
                self._enter(item, name, where, depth - 1)
        elif depth and is_plain_object(value) and _of_user(type(value)):
            self._enter_owner(value, f"{name}.", where, depth - 1)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Removes the fake tensors that were put into any place inside, and all that caches of
        functions hold where one was filled: a helper that keeps an index of relative positions
        would give the fake of one run to the next one."""
        self._before = [(*entry, _content(entry[0])) for entry in self._places.values()]
        misses = [cache.cache_info().misses for cache in self._caches]
        try:
            yield
        finally:
            for place, _, _, content in self._before:
                _clean(place, content)
            self._before = []
            for cache, before in zip(self._caches, misses, strict=True):
                if cache.cache_info().misses != before:
                    cache.cache_clear()

    def check(self, alike: Callable[[torch.Tensor], bool]) -> None:
        """Refuses changes of a recording that later calls may find; called inside `as_before`.

        Args:
            alike: whether every call would compute this fake tensor alike.

        Raises:
            TraceError: a number was changed, or a tensor kept that differs between calls.
        """
        for place, prefix, where, before in self._before:
            # An object may count its calls: whether what it computes changes too, others watch.
            counts = not hasattr(place, "__dict__") or isinstance(place, type | ModuleType)
            for name, value in _content(place).items():
                old = before.get(name, self)
                if old is value or str(name).startswith("__"):
                    continue
                numbers = (isinstance(n, int | float) and type(n) is not bool for n in (old, value))
                if (counts and all(numbers)) or any(not alike(t) for t in _fakes_in(value)):
                    shown = f"{prefix}[{name!r}]" if isinstance(place, dict) else f"{prefix}{name}"
                    raise refusals.error(refusals.CHANGED_OUTSIDE, shown, where)


def _unwrapped(called: Any) -> tuple[Any, Any]:
    """The function that a call runs, and the object whose method it is."""
    while isinstance(called, functools.partial):
        called = called.func
    if not isinstance(called, FunctionType | MethodType):
        called = getattr(called, "forward" if isinstance(called, nn.Module) else "__call__", None)
    return getattr(called, "__func__", called), getattr(called, "__self__", called)


def _of_user(one: Any) -> bool:
    """True if a class or function is in a file of the user, outside of installed packages."""
    home = sys.modules.get(getattr(one, "__module__", ""))
    file = str(getattr(home, "__file__", None) or "<")
    return is_user(file) and "-packages" not in file


def _content(place: Any) -> dict[Any, Any]:
    if isinstance(place, list | deque | set):
        return {"": list(place)}
    return dict(place if isinstance(place, dict) else vars(place))


def _clean(place: Any, before: dict[Any, Any]) -> None:
    table = isinstance(place, dict)
    put, remove = (operator.setitem, operator.delitem) if table else (setattr, delattr)
    for name, value in _content(place).items():
        if not _fakes_in(value):
            continue
        if isinstance(place, list | deque | set):
            place.clear()
            (place.update if isinstance(place, set) else place.extend)(before[name])
        elif name in before:
            put(place, name, before[name])
        else:
            remove(place, name)


def _fakes_in(value: Any) -> list[torch.Tensor]:
    found = (tensor for _, tensor in tensors_at(value, depth=_DEPTH))
    return [tensor for tensor in found if isinstance(tensor, FakeTensor)]


def freeze() -> None:
    """Spare collections what there is now; nobody sees references of it any more."""
    _frozen[:] = _caches()
    gc.freeze()


def _caches() -> list[Any]:
    """Functions that functools.lru_cache or cache wraps and that may keep tensors of the user's."""
    # Twice as fast as looking at the types of all objects: an object refers to its type.
    found = [*_frozen, *(one for one in gc.get_referrers(_CACHE) if type(one) is _CACHE)]
    homes = ((one, str(getattr(one, "__module__", "")).split(".")) for one in found)
    # A logging module caches which messages the user has seen (warning_once).
    return [one for one, home in homes if home[-1] != "logging" and home[0] not in _NOT_USERS]
