"""Snapshots of Python state: the contents of attributes and containers at one moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

import torch

_ATOMS = frozenset((bool, int, float, str, type(None), torch.Tensor, torch.nn.Parameter))
_CONTAINERS = (dict, SimpleNamespace, list, tuple)
_VALUES = (bool, int, float, complex, str, bytes, range, torch.device, torch.dtype, torch.Size)

Alike = Callable[[torch.Tensor, torch.Tensor], bool]

MISSING = object()  # the value of an attribute that is not there


def of_class(kind: type, name: str) -> Any:
    """The object under the name in a class or its bases."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), MISSING)


def attribute(owner: Any, name: str, of_class: Callable[[type, str], Any] = of_class) -> Any:
    """The value under the name in the object or its class, without running a property."""
    own: dict[str, Any] = getattr(owner, "__dict__", {})
    if name in own:
        return own[name]
    found = of_class(type(owner), name)
    if not isinstance(found, MemberDescriptorType):
        return found
    try:
        return found.__get__(owner)
    except AttributeError:  # a slot that nothing was put into
        return MISSING


def roots(model: torch.nn.Module, loss_fn: Any) -> dict[str, Any]:
    """Modules of a model and of loss_fn, or the object that loss_fn is a method of, by path."""
    while isinstance(loss_fn, partial | MethodType):
        loss_fn = loss_fn.func if isinstance(loss_fn, partial) else loss_fn.__self__
    found = {"loss_fn": loss_fn}
    if isinstance(loss_fn, torch.nn.Module):
        found = {f"loss_fn.{path}" if path else "loss_fn": m for path, m in loss_fn.named_modules()}
    return found | dict(model.named_modules())


def tensors_at(
    value: Any, path: tuple[Any, ...] = (), depth: int = 32
) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """The tensors in nested containers, with the keys that lead there.

    `depth`: of containers, which may contain themselves.
    """
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth and isinstance(value, tuple | list | set | deque | dict):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_at(item, (*path, key), depth - 1)


def is_array(value: Any) -> bool:
    """True if a value is a numpy array; numpy need not be installed."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def snapshot(value: Any, depth: int = 4) -> Any:
    """A value in which containers and numpy arrays are replaced by `Contents`."""
    if type(value) in _ATOMS:
        return value
    if is_array(value):
        return Contents(value, value.copy())
    if (depth and (isinstance(value, _CONTAINERS) or type(value) is set)) or _ordered(value):
        if isinstance(value, dict | SimpleNamespace):
            items = dict.items(_table(value))  # a class of its own may mean other items
            return Contents(value, {key: snapshot(item, depth - 1) for key, item in items})
        if isinstance(value, list | tuple):
            return Contents(value, [snapshot(item, depth - 1) for item in value])
        return Contents(value, set(value))
    return value


def _table(value: Any) -> Any:
    return vars(value) if isinstance(value, SimpleNamespace) else value


def _ordered(value: Any) -> bool:
    return type(value).__name__ == "OrderedDict"


@dataclass(slots=True, eq=False, repr=False)
class Contents:
    """A container, and a copy of its contents."""

    container: Any
    content: Any

    def __repr__(self) -> str:
        return repr(self.content)


def difference(kept: Any, value: Any, path: str, alike: Alike) -> str | None:
    """Path of the first part of `value` that differs from the snapshot; None if none does."""
    if not isinstance(kept, Contents):
        return None if _same(kept, value, alike) else path
    if type(kept.container) is not type(value):
        return path
    old, value = kept.content, _table(value)
    if is_array(value):
        equal = (old.shape, old.dtype, old.tobytes()) == (value.shape, value.dtype, value.tobytes())
        return None if equal else path
    if _ordered(value) and path.endswith("_hooks"):
        # The keys count all hooks that were ever registered.
        old, value = list(old.values()), list(value.values())
    if isinstance(value, list | tuple):
        if len(value) != len(old):
            return path
        old, value = dict(enumerate(old)), dict(enumerate(value))
    if not isinstance(value, dict):
        return None if value == old else path
    for key in [*old, *(k for k in value if k not in old)]:
        if old.get(key, MISSING) is dict.get(value, key, old):  # as most are: no text for these
            continue
        place = f"{path}[{key!r}]"
        if key not in old or key not in value:
            return place
        if found := difference(old[key], value[key], place, alike):
            return found
    return None


def _same(kept: Any, value: Any, alike: Alike) -> bool:
    if kept is value:
        return True
    if isinstance(kept, torch.Tensor) or isinstance(value, torch.Tensor):
        return alike(kept, value)
    if kept.__class__ is not value.__class__:  # as a size of a recording calls itself
        return False
    if isinstance(kept, FunctionType):
        return kept.__code__ is value.__code__ and _same(_captured(kept), _captured(value), alike)
    if isinstance(kept, partial):
        mine = (kept.func, kept.args, tuple(kept.keywords.items()))
        return _same(mine, (value.func, value.args, tuple(value.keywords.items())), alike)
    if isinstance(kept, tuple):
        return len(kept) == len(value) and all(map(lambda a, b: _same(a, b, alike), kept, value))
    return isinstance(kept, _VALUES) and kept == value


def _captured(function: FunctionType) -> tuple[Any, ...]:
    """The closure and defaults of a function."""
    cells = function.__closure__ or ()
    named = tuple((function.__kwdefaults__ or {}).items())
    try:
        return (*(cell.cell_contents for cell in cells), function.__defaults__, *named)
    except ValueError:  # not filled yet: like nothing else
        return (object(),)


def restore(kept: Contents) -> None:
    """Restores the containers of a snapshot in place."""
    container, content = _table(kept.container), kept.content
    if is_array(container):
        if container.flags.writeable:
            container[...] = content
        return
    if isinstance(container, dict):
        own = {key: _bare(item) for key, item in content.items()}
        alike = len(container) == len(own)
        if not alike or any(container.get(key, own) is not one for key, one in own.items()):
            container.clear()
            container.update(own)
    elif isinstance(container, list):
        container[:] = map(_bare, content)
    elif isinstance(container, set):
        container.clear()
        container.update(content)
    for item in content.values() if isinstance(container, dict) else content:
        if isinstance(item, Contents):
            restore(item)


def _bare(kept: Any) -> Any:
    return kept.container if isinstance(kept, Contents) else kept
