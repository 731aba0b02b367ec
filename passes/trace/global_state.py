"""State of the user's code outside of the model: globals of its files, and attributes of classes.

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
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pdcompile.eager.snapshot import tensors_at
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.observer import is_user, source_of_class
from pdcompile.releases.torch_internals import FakeTensor

_LARGE = 1_000  # containers with more items are data, not tables of forward
_DEPTH = 3  # of containers in a value
_NOT_USERS = ("torch", "pdcompile", "functools", "inspect", "re", "typing")
_CACHE: Any = type(functools.lru_cache(maxsize=1)(len))


class GlobalState:
    """Classes of a model, the files that they are written in, and the containers in both."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[int, tuple[Any, str, str | None]] = {}  # by id: place, name, line
        self._before: list[tuple[Any, str, str | None, Any]] = []
        classes = {base for module in model.modules() for base in type(module).__mro__}
        for cls in filter(_of_user, classes):
            where = source_of_class(cls)
            for owner, prefix in ((cls, f"{cls.__qualname__}."), (sys.modules[cls.__module__], "")):
                self._places.setdefault(id(owner), (owner, prefix, where))
                for name, value in vars(owner).items():
                    if not name.startswith("__"):
                        self._enter(value, f"{prefix}{name}", where, 2)

    def _enter(self, value: Any, name: str, where: str | None, depth: int) -> None:
        container = isinstance(value, dict | list | deque | set) and len(value) <= _LARGE
        if container and depth and id(value) not in self._places:
            self._places[id(value)] = (value, name, where)
            for item in value.values() if isinstance(value, dict) else value:
                self._enter(item, name, where, depth - 1)

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

    def check(self, alike: Callable[[torch.Tensor], bool]) -> None:
        """Refuses changes of a recording that later calls may find; called inside `as_before`.

        Args:
            alike: whether every call would compute this fake tensor alike.

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
                if counted or any(not alike(t) for t in _fakes_in(value)):
                    shown = f"{prefix}[{name!r}]" if isinstance(place, dict) else f"{prefix}{name}"
                    raise refusals.error(refusals.CHANGED_OUTSIDE, shown, where)


def _of_user(cls: type) -> bool:
    """True if a class is in a file of the user, outside of installed packages."""
    file = str(getattr(sys.modules.get(cls.__module__), "__file__", None) or "<")
    return is_user(file) and "-packages" not in file


def _content(place: Any) -> Any:
    if isinstance(place, list | deque | set):
        return list(place)
    return dict(place if isinstance(place, dict) else vars(place))


def _clean(place: Any, before: Any) -> None:
    now = _content(place)
    if isinstance(now, list):
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
    found = (tensor for _, tensor in tensors_at(value, depth=_DEPTH))
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
            home = str(getattr(cache, "__module__", "")).split(".")
            # A logging module caches which messages the user has seen (warning_once).
            of_user = home[-1] != "logging" and home[0] not in _NOT_USERS
            if of_user and cache.cache_info().misses != misses:
                cache.cache_clear()
