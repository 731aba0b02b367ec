"""Attributes that forward reads: a capture holds while their values stay the same.

``self.scale``, ``self.config.top_k`` and ``self.training`` are numbers, names and functions by the
time that operators see them, so a graph cannot tell where they came from.  So reads are noted as
they happen, by module and name, and the runtime compares the values at every call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import nn

from pdcompile.eager.snapshot import roots
from pdcompile.passes.trace.tape.interceptor import patched
from pdcompile.warn import FOLDERS

_INTERNAL = frozenset({*vars(nn.Module()), *dir(nn.Module)}) - {"training", "forward"}
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # flags of CPython's type objects

_NUMBERS = frozenset((bool, int, float, str))  # of which the first read says all
_COMPARED_WHOLE = (  # types whose values are compared themselves, not by their attributes
    type, nn.Module, torch.Tensor, FunctionType,
    int, float, complex, str, bytes, tuple, list, dict, set, frozenset,
)  # fmt: skip

Place = tuple[str, ...]


class AttributeReads:
    """The places that were read: (module path, attribute, attribute of that object, …).

    Modules of `loss_fn` have paths that begin with ``loss_fn``, as what its object has.
    """

    def __init__(self, model: nn.Module, loss_fn: Any = None) -> None:
        self._read: set[Place] = set()
        self._own: set[Place] = set()  # assigned by forward before anything reads them
        found = roots(model, loss_fn)
        self._owners: dict[int, Place] = {id(one): (path,) for path, one in found.items()}
        self._loss = found.get("loss_fn")
        self.classes = {type(self._loss)} if is_plain_object(self._loss) else set()
        self._stack = ExitStack()
        self._kept: list[Any] = []  # objects, so that an id means one of them

    @property
    def places(self) -> tuple[Place, ...]:
        """The places that a call depends on, without those that it assigns itself."""
        return tuple(sorted(self._read - self._own))

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes the attributes that are read inside, of the classes of earlier recordings too."""
        with self._stack:
            for kind in {nn.Module, *self.classes}:
                self._watch(kind)
            yield

    def _watch(self, kind: type) -> None:
        """Notes reads and writes of attributes of this class."""
        self.classes.add(kind)
        get: Any = kind.__getattribute__
        put: Any = kind.__setattr__

        def read(owner: Any, name: str) -> Any:
            if name in _INTERNAL or name.startswith("__"):
                return get(owner, name)
            try:
                value = get(owner, name)
            except AttributeError:
                self._note(owner, name, None)
                raise
            self._note(owner, name, value)
            return value

        def write(owner: Any, name: str, value: Any) -> None:
            if id(owner) in self._owners and name != "training":
                # An object that is no module may count its calls, as nothing undoes.
                counts = owner is self._loss and not isinstance(owner, nn.Module)
                before = None if counts else getattr(owner, "__dict__", {}).get(name)
                place = (*self._owners[id(owner)], name)
                if place not in self._read or before is None:  # else the earlier read counts
                    self._own.add(place)
            put(owner, name, value)

        watching = patched((kind, "__getattribute__", read), (kind, "__setattr__", write))
        self._stack.enter_context(watching)

    def _note(self, owner: Any, name: str, value: Any) -> None:
        place = self._owners.get(id(owner))
        if place is None or (type(value) in _NUMBERS and (*place, name) in self._read):
            return
        if isinstance(getattr(type(owner), name, None), cached_property):
            return
        if name == "training" and sys._getframe(2).f_code.co_filename.startswith(FOLDERS[0]):
            return
        self._read.add((*place, name))
        if id(value) not in self._owners and is_plain_object(value):
            self._owners[id(value)] = (*place, name)
            self._kept.append(value)
            if type(value) not in self.classes:
                self._watch(type(value))


def is_plain_object(value: Any) -> bool:
    """True if a value has attributes and a class that is written in Python."""
    kind = type(value)
    if isinstance(value, _COMPARED_WHOLE):
        return False
    writable = kind.__flags__ & _HEAP_TYPE and not kind.__flags__ & _IMMUTABLE_TYPE
    home = kind.__module__.partition(".")[0]
    standard = home in sys.stdlib_module_names - {"argparse"}  # loggers, locks
    has_attributes = hasattr(value, "__dict__") or "__slots__" in vars(kind)
    return bool(writable) and has_attributes and not standard
