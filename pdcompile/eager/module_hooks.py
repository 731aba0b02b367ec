"""Forward hooks of modules, and which of them take part in what is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.releases.torch_internals import pytree

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks")


@contextmanager
def acting_hooks(root: nn.Module) -> Iterator[dict[str, None]]:
    """Fills in, while `root` runs, which of its hooks do more than look.

    Those that return something, write tensors that they are given, or change the modules: what is
    computed depends on them.  Names are ``path of the module: name of the hook``.
    """
    acting: dict[str, None] = {}
    replaced = []
    for path, module in root.named_modules():
        for table in HOOK_TABLES:
            hooks = getattr(module, table)
            for key, hook in list(hooks.items()):
                name = getattr(hook, "__qualname__", type(hook).__qualname__)
                shown = f"{path}: {name}" if path else name
                hooks[key] = _watched(hook, root, partial(acting.setdefault, shown))
                replaced.append((hooks, key, hook))
    try:
        yield acting
    finally:
        for hooks, key, hook in replaced:
            if key in hooks:  # a hook may have removed itself
                hooks[key] = hook


def _watched(hook: Any, root: nn.Module, acts: Callable[[], Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        values = [one.detach().clone() for one in tensors]
        before = _state(root, tensors)
        result = hook(*args, **kwargs)
        pairs = zip(tensors, values, strict=True)
        if (
            result is not None
            or _state(root, tensors) != before
            or not all(_same(now, then) for now, then in pairs)
        ):
            acts()
        return result

    return run


def _state(root: nn.Module, tensors: list[Tensor]) -> tuple[Any, ...]:
    """Attributes of the modules, and how often each was written; the tensors alike."""
    held = [*tensors, *root.parameters(), *root.buffers()]
    tables = [
        [(name, id(item)) for name, item in table.items()]
        for module in root.modules()
        for table in (vars(module), module._parameters, module._buffers, module._modules)
    ]
    return tables, [(id(one), one._version) for one in held]


def _same(now: Tensor, then: Tensor) -> bool:
    return torch.equal(now.nan_to_num(), then.nan_to_num())
