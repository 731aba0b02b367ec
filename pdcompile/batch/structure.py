"""Flattens outputs of any class into leaves, and rebuilds them.

Pytrees handle tuples, lists, dicts and registered classes.  Any other object (an unregistered
dataclass, a cache of keys and values, a distribution) is flattened by its attributes and rebuilt
without its constructor: an instance of the class with the same attributes, in which lists and dicts
are new, and modules, functions and classes are the same objects.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pdcompile.batch.omitted_output import OmittedOutput
from pdcompile.releases.torch_internals import pytree

MAX_LEAVES = 100_000
_PLAIN = (bool, int, float, complex, str, type(None))
_TORCH = (Tensor, torch.dtype, torch.device)
_KEPT = (type, types.BuiltinFunctionType, types.ModuleType, nn.Module, Enum, torch.layout)


@dataclass(frozen=True, slots=True)
class Tree:
    """A pytree; `parts` has None for each leaf, or the object in place of one."""

    spec: pytree.TreeSpec
    parts: tuple[Part | None, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """An object of any class; its content: items, where it is a container, attributes, slots."""

    cls: type
    number: int
    base: Any  # the builtin class that it extends: object, dict, list or tuple
    content: Tree


@dataclass(frozen=True, slots=True)
class Again:
    """A further reference to the instance of this number."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """An object without leaves, kept as it is; `known` if it surely holds no tensors."""

    value: Any
    known: bool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and type(other.value) is type(self.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


Part: TypeAlias = Instance | Again | Constant


@dataclass(slots=True)
class _Taken:
    leaves: list[Any] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)


def flatten_output(value: Any) -> tuple[list[Any], Tree]:
    """(leaves, structure): tensors, numbers, strings, None, dtypes and devices are leaves.

    For outputs of containers that pytrees handle these are pytree's leaves, in its order.
    Structures are equal for outputs that differ in the leaves' values only.

    Raises:
        RecursionError: containers are nested too deep, or contain themselves.
        ValueError: there are more than `MAX_LEAVES` leaves.
    """
    taken = _Taken()
    structure = _tree(value, taken)
    return taken.leaves, structure


def output_leaves(value: Any) -> list[Any]:
    """The leaves alone."""
    return flatten_output(value)[0]


def unflatten_output(leaves: Sequence[Any], structure: Tree) -> Any:
    """The value with the given leaves in place."""
    return _put_together(iter(leaves), structure, {})


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same value with every tensor in it replaced."""
    leaves, structure = flatten_output(value)
    changed = [function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return unflatten_output(changed, structure)


def unknown_in(structure: Tree) -> Any:
    """The first object that may hide tensors; None if there is none."""
    for part in structure.parts:
        if isinstance(part, Constant) and not part.known:
            return part.value
        if isinstance(part, Instance):
            found = unknown_in(part.content)
            if found is not None:
                return found
    return None


def _tree(value: Any, taken: _Taken) -> Tree:
    # torch.Size is a leaf here, of which pytrees make a tuple
    found, spec = pytree.tree_flatten(value, is_leaf=lambda part: type(part) is torch.Size)
    return Tree(spec, tuple(_part(item, taken) for item in found))


def _part(item: Any, taken: _Taken) -> Part | None:
    if isinstance(item, (*_TORCH, OmittedOutput)) or (
        isinstance(item, _PLAIN) and not isinstance(item, Enum)
    ):
        taken.leaves.append(item)
        if len(taken.leaves) > MAX_LEAVES:
            raise ValueError(f"the output has more than {MAX_LEAVES:,} leaves")
        return None
    if isinstance(item, _KEPT):
        return Constant(item, known=True)
    if id(item) in taken.numbers:
        return Again(taken.numbers[id(item)])
    cls: Any = type(item)
    base = _base(cls)
    if base is None:
        return Constant(item, known=_atomic(item))
    number = taken.numbers[id(item)] = len(taken.numbers)
    items: Any = []
    if base is dict:
        items = dict(dict.items(item))
    elif base is not object:
        items = list(base.__iter__(item))
    return Instance(cls, number, base, _tree([items, *_state(item)], taken))


def _atomic(item: Any) -> bool:
    """True if an object that cannot be rebuilt surely refers to no tensor."""
    if isinstance(item, types.FunctionType):
        cells = (item.__closure__, item.__defaults__, item.__kwdefaults__)
        return not any(cells)
    if isinstance(item, set | frozenset):
        return all(isinstance(one, _PLAIN) for one in item)
    return not gc.is_tracked(item)


@functools.lru_cache(maxsize=1024)
def _base(cls: Any) -> Any:
    """The builtin class that a class extends; None if its instances cannot be rebuilt."""
    if cls is torch.Size:
        return tuple
    for base in (dict, list, tuple):
        if issubclass(cls, base):
            return base if cls is not base and _builds(cls, base) else None
    return object if _builds(cls, object) else None


def _builds(cls: Any, base: Any) -> bool:
    if any(entry.__module__ == "builtins" for entry in cls.__mro__ if entry not in (base, object)):
        return False  # functions, sets, iterators, exceptions
    if not any({"__dict__", "__slots__"} & vars(entry).keys() for entry in cls.__mro__):
        return base is not object
    try:
        base.__new__(cls)
    except TypeError:
        return False
    return True


def _state(item: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes, and slots that were filled, whatever the class itself gives to pickle."""
    state: Any = object.__getstate__(item)
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    return attributes or {}, slots or {}


def _put_together(leaves: Iterator[Any], structure: Tree, made: dict[int, Any]) -> Any:
    items = [
        next(leaves) if part is None else _make(leaves, part, made) for part in structure.parts
    ]
    return pytree.tree_unflatten(items, structure.spec)


def _make(leaves: Iterator[Any], part: Part, made: dict[int, Any]) -> Any:
    if isinstance(part, Constant):
        return part.value
    if isinstance(part, Again):
        return made[part.number]
    found: Any = None
    if part.base is not tuple:
        # Entered before its content, which may refer back to it.
        found = made[part.number] = part.base.__new__(part.cls)
    items, attributes, slots = _put_together(leaves, part.content, made)
    if part.base is tuple:
        new = torch.Size if part.cls is torch.Size else functools.partial(tuple.__new__, part.cls)
        found = made[part.number] = new(items)
    elif part.base is dict:
        dict.update(found, items)
    elif part.base is list:
        list.extend(found, items)
    if attributes:
        vars(found).update(attributes)
    for name, value in slots.items():
        object.__setattr__(found, name, value)
    return found
