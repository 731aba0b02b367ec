"""The model's state around a capture: nothing may change, and what changes is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pdcompile.passes.trace import refuse
from pdcompile.passes.trace.facts import source_of_class


@contextmanager
def unchanged(
    model: nn.Module, training: bool, assigned: dict[tuple[int, str], str]
) -> Iterator[None]:
    """Run in train or eval mode; afterwards everything in the modules is as before.

    `assigned` is filled during the run: (id of module, attribute) to the line that assigned it.

    Raises:
        TraceError: forward changed an attribute, a buffer's binding or a hook.
    """
    modules = list(model.named_modules())
    modes = [(module, module.training) for _, module in modules]
    if model.training != training:
        model.train(training)
    before = {path: _copy(vars(module)) for path, module in modules}
    try:
        yield
        for path, module in modules:
            _compare(path, module, before[path], assigned)
    finally:
        for path, module in modules:
            _restore(vars(module), before[path])
        for module, mode in modes:
            module.training = mode


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
    if kept.container is not value:
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


def _compare(path: str, module: nn.Module, kept: Any, assigned: dict[tuple[int, str], str]) -> None:
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
        raise refuse.error(refusal, found, where)


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
