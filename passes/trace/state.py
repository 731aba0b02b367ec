"""The model's state around a capture: nothing may change, and what changes is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from pdcompile.errors import TraceError
from pdcompile.passes.trace import refuse
from pdcompile.passes.trace.facts import source_of_class
from pdcompile.passes.trace.modules import ModuleTable
from pdcompile.passes.trace.tensors import FakeTensors


class State:
    """Everything in the modules of a model as it was when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._before = {path: _copy(vars(module)) for path, module in self._modules}

    def change(self, assigned: Mapping[tuple[int, str], str]) -> TraceError | None:
        """What has changed since, as the refusal of it; None if nothing has.

        Args:
            assigned: (id of module, attribute) to the line that assigned it.
        """
        for path, module in self._modules:
            found = _change(path, module, self._before[path], assigned)
            if found is not None:
                return found
        return None

    def restore(self) -> None:
        for path, module in self._modules:
            _restore(vars(module), self._before[path])


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


Found = TypeVar("Found")


def settled(
    model: nn.Module,
    training: bool,
    call: Callable[[dict[tuple[int, str], str]], Found],
    same: Callable[[Found, Found], bool],
) -> Found:
    """What a call of the model gives; afterwards everything in the modules is as before.

    Models set things up in their first call: hooks that collect outputs, the length of the
    sequence for a helper.  So where a call changes the model's Python state it is made again,
    from there; what it does then must be the same, and change nothing any more.

    Args:
        call: makes the call; fills in which line assigned (id of module, attribute).
        same: whether two calls were the same computation.

    Raises:
        TraceError: every call changes an attribute, a buffer's binding or a hook.
    """
    with _in_mode(model, training):
        before = State(model)
        try:
            assigned: dict[tuple[int, str], str] = {}
            first = call(assigned)
            change = before.change(assigned)
            if change is None:
                return first
            after = State(model)
            try:
                second = call({})
            except TraceError:
                raise change from None
            if after.change({}) is not None or not same(first, second):
                raise change
            return second
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
    """Containers copied, everything else by reference."""
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


def _difference(kept: Any, value: Any, path: str) -> str | None:
    """Path of the first thing in `value` that is not what was kept."""
    if not isinstance(kept, _Kept):
        if kept is value:
            return None
        plain = (bool, int, float, str, tuple, type(None))
        same = type(kept) is type(value) and isinstance(kept, plain) and kept == value
        return None if same else path
    if type(kept.container) is not type(value):
        return path
    if isinstance(value, dict):
        for key in [*kept.content, *(k for k in value if k not in kept.content)]:
            if key not in kept.content or key not in value:
                return f"{path}[{key!r}]"
            found = _difference(kept.content[key], value[key], f"{path}[{key!r}]")
            if found:
                return found
        return None
    if isinstance(value, list):
        if len(value) != len(kept.content):
            return path
        for i, (old, new) in enumerate(zip(kept.content, value, strict=True)):
            found = _difference(old, new, f"{path}[{i}]")
            if found:
                return found
        return None
    return None if value == kept.content else path


def _change(
    path: str, module: nn.Module, kept: Any, assigned: Mapping[tuple[int, str], str]
) -> TraceError | None:
    attributes = vars(module)
    for name in [*kept.content, *(n for n in attributes if n not in kept.content)]:
        place = f"{path}.{name}" if path else name
        if name in kept.content and name in attributes:
            found = _difference(kept.content[name], attributes[name], place)
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
    else:
        container.clear()
        container.update(kept.content)


def _bare(kept: Any) -> Any:
    return kept.container if isinstance(kept, _Kept) else kept
