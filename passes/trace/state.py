"""The model's state around a capture: nothing may change, and what changes is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from pdcompile.errors import TraceError
from pdcompile.passes.trace import refuse
from pdcompile.passes.trace.arrays import is_array
from pdcompile.passes.trace.facts import source_of_class
from pdcompile.passes.trace.leftovers import Leftovers
from pdcompile.passes.trace.modules import ModuleTable
from pdcompile.passes.trace.tensors import FakeTensors

Alike = Callable[[Any, Any], bool]


class State:
    """Everything in the modules of a model as it was when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._before = {path: _copy(vars(module)) for path, module in self._modules}

    def change(
        self,
        assigned: Mapping[tuple[int, str], str],
        alike: Alike = lambda one, other: False,
        within: Collection[str] | None = None,
    ) -> TraceError | None:
        """What has changed since, as the refusal of it; None if nothing has.

        Args:
            assigned: (id of module, attribute) to the line that assigned it.
            alike: whether it is no change that one tensor took the place of another.
            within: paths of modules; None: all of the model.
        """
        for path, module in self._modules:
            if within is not None and not any(_below(path, owner) for owner in within):
                continue
            found = _change(path, module, self._before[path], assigned, alike)
            if found is not None:
                return found
        return None

    def restore(self) -> None:
        for path, module in self._modules:
            _restore(vars(module), self._before[path])


@contextmanager
def in_mode(model: nn.Module, training: bool, *, back: bool = True) -> Iterator[None]:
    """The model in one mode, switched as a user does; afterwards each module as before."""
    modes = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in modes if back else ():
            module.training = mode


Found = TypeVar("Found")


def settled(
    model: nn.Module,
    training: bool,
    call: Callable[[dict[tuple[int, str], str]], Found],
    same: Callable[[Found, Found], bool],
    *,
    leftovers: Leftovers | None = None,
    within: Collection[str] | None = None,
) -> Found:
    """What a call of the model gives; afterwards everything in the modules is as before.

    Models set things up in their first call: hooks that collect outputs, the length of the
    sequence for a helper.  So where a call changes the model's Python state it is made again,
    from there; what it does then must be the same, and change nothing any more but tensors that
    no later call can tell apart.  What holds between these two calls may not hold between others:
    `leftovers.accepted` says that something changed, for those who look further.

    Args:
        call: makes the call; fills in which line assigned (id of module, attribute).
        same: whether two calls were the same computation.
        leftovers: what is known of tensors that calls leave; None: none may be left.
        within: paths of the modules in which alone changes count; None: all.

    Raises:
        TraceError: every call changes an attribute, a buffer's binding or a hook.
    """
    alike: Alike = (lambda one, other: False) if leftovers is None else leftovers.alike
    with in_mode(model, training):
        before = State(model)
        try:
            assigned: dict[tuple[int, str], str] = {}
            first = call(assigned)
            change = before.change(assigned, within=within)
            if change is None:
                return first
            if leftovers is not None and training:
                leftovers.expire(model)
            after = State(model)
            try:
                second = call({})
            except TraceError:
                raise change from None
            if leftovers is not None and training:
                leftovers.expire(model)
            if after.change({}, alike, within) is not None or not same(first, second):
                raise change
            if leftovers is not None:
                leftovers.accepted = leftovers.accepted or change
            return first if getattr(second, "memos", ()) else second
        finally:
            before.restore()


def write_rebound(model: nn.Module, fakes: FakeTensors, table: ModuleTable) -> None:
    """After forward: where ``self.buffer = new`` gave a buffer another tensor, that is written
    into the buffer, as an op of the graph.

    Left alone, and refused afterwards, is what would not be the same: another shape or dtype, or
    a value that brings gradients into the next call.
    """
    for path, module in list(model.named_modules()):
        for name, new in module._buffers.items():
            old = table.objects.get(f"{path}.{name}" if path else name)
            if old is None or new is None or new is old or new.requires_grad:
                continue
            if fakes.known(new) and (old.shape, old.dtype) == (new.shape, new.dtype):
                with torch.no_grad():
                    old.copy_(new)
                module._buffers[name] = old


def _copy(value: Any, depth: int = 4) -> Any:
    """Containers and numpy's arrays copied, everything else by reference."""
    if is_array(value):
        return _Kept(value, value.copy())
    if (depth and type(value) in (dict, list, set)) or _ordered(value):
        if isinstance(value, dict):
            return _Kept(value, {key: _copy(item, depth - 1) for key, item in value.items()})
        if isinstance(value, list):
            return _Kept(value, [_copy(item, depth - 1) for item in value])
        return _Kept(value, set(value))
    return value


def _ordered(value: Any) -> bool:
    return type(value).__name__ == "OrderedDict"


class _Kept:
    """A container and what was in it."""

    __slots__ = ("container", "content")

    def __init__(self, container: Any, content: Any) -> None:
        self.container = container
        self.content = content


def _difference(kept: Any, value: Any, path: str, alike: Alike) -> str | None:
    """Path of the first thing in `value` that is not what was kept."""
    if not isinstance(kept, _Kept):
        return None if _same(kept, value, alike) else path
    if type(kept.container) is not type(value):
        return path
    if is_array(value):
        old = kept.content
        equal = (old.shape, old.dtype, old.tobytes()) == (value.shape, value.dtype, value.tobytes())
        return None if equal else path
    if _ordered(value) and path.endswith("_hooks"):
        # The keys count all hooks that were ever registered.
        old, new = list(kept.content.values()), list(value.values())
        same = len(old) == len(new) and all(
            _difference(a, b, path, alike) is None for a, b in zip(old, new, strict=True)
        )
        return None if same else path
    if isinstance(value, dict):
        for key in [*kept.content, *(k for k in value if k not in kept.content)]:
            if key not in kept.content or key not in value:
                return f"{path}[{key!r}]"
            found = _difference(kept.content[key], value[key], f"{path}[{key!r}]", alike)
            if found:
                return found
        return None
    if isinstance(value, list):
        if len(value) != len(kept.content):
            return path
        for i, (old, new) in enumerate(zip(kept.content, value, strict=True)):
            found = _difference(old, new, f"{path}[{i}]", alike)
            if found:
                return found
        return None
    return None if value == kept.content else path


def _same(kept: Any, value: Any, alike: Alike) -> bool:
    if kept is value:
        return True
    if isinstance(kept, torch.Tensor) or isinstance(value, torch.Tensor):
        return alike(kept, value)
    if type(kept) is not type(value):
        return False
    if isinstance(kept, FunctionType):
        return kept.__code__ is value.__code__ and _same(_captured(kept), _captured(value), alike)
    if isinstance(kept, partial):
        mine = (kept.func, kept.args, tuple(kept.keywords.items()))
        return _same(mine, (value.func, value.args, tuple(value.keywords.items())), alike)
    if isinstance(kept, tuple):
        return len(kept) == len(value) and all(map(lambda a, b: _same(a, b, alike), kept, value))
    return isinstance(kept, bool | int | float | str) and kept == value


def _captured(function: FunctionType) -> tuple[Any, ...]:
    """What a function that is defined inside of another one took along."""
    cells = function.__closure__ or ()
    named = tuple((function.__kwdefaults__ or {}).items())
    try:
        return (*(cell.cell_contents for cell in cells), function.__defaults__, *named)
    except ValueError:  # not filled yet: like nothing else
        return (object(),)


def _below(path: str, owner: str) -> bool:
    return not owner or path == owner or path.startswith(f"{owner}.")


def _change(
    path: str,
    module: nn.Module,
    kept: Any,
    assigned: Mapping[tuple[int, str], str],
    alike: Alike,
) -> TraceError | None:
    attributes = vars(module)
    for name in [*kept.content, *(n for n in attributes if n not in kept.content)]:
        place = f"{path}.{name}" if path else name
        if name in kept.content and name in attributes:
            found = _difference(kept.content[name], attributes[name], place, alike)
        else:
            found = place
        if found is None:
            continue
        refusal = refuse.CHANGED_STATE
        if name in ("_buffers", "_parameters"):
            name = found[len(place) :].strip("[]'\"")
            found, refusal = (f"{path}.{name}" if path else name), refuse.REBOUND
        where = assigned.get((id(module), name)) or source_of_class(type(module))
        return refuse.error(refusal, found, where)
    return None


def _restore(value: Any, kept: Any) -> None:
    """Put the old content back into the same containers, in place."""
    if not isinstance(kept, _Kept):
        return
    container = kept.container
    if isinstance(container, dict):
        if any(container.get(k, container) is not _bare(v) for k, v in kept.content.items()) or (
            len(container) != len(kept.content)
        ):
            container.clear()
            container.update({k: _bare(v) for k, v in kept.content.items()})
        for item in kept.content.values():
            _restore(None, item)
    elif isinstance(container, list):
        container[:] = [_bare(item) for item in kept.content]
        for item in kept.content:
            _restore(None, item)
    elif is_array(container):
        if container.flags.writeable:
            container[...] = kept.content
    else:
        container.clear()
        container.update(kept.content)


def _bare(kept: Any) -> Any:
    return kept.container if isinstance(kept, _Kept) else kept
