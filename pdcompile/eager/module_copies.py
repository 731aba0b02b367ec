"""Copies of models: deep ones, and twins that share tensors, attributes and hooks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pdcompile.eager.snapshot import tensors_at
from pdcompile.errors import InputError, errors_as

_DEPTH = 3  # of containers in an attribute


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy of the model.

    Torch refuses to copy tensors of an autograd graph (the weight that an old weight_norm computes,
    an auxiliary loss of the last call); such a tensor in an attribute is detached in the copy.

    Raises:
        InputError: an attribute of the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for _, tensor in tensors_at(vars(module), depth=_DEPTH):
            if not tensor.is_leaf:
                memo[id(tensor)] = tensor.detach().clone()
    remedy = (
        "keep what copy.deepcopy refuses (generators, locks, open files) out of the attributes of "
        "its modules; keep_model=False trains without a copy"
    )
    said, where = "the model cannot be copied", type(model).__qualname__
    with errors_as(InputError, said, where, remedy, Exception):
        return copy.deepcopy(model, memo)


def twins(root: nn.Module) -> dict[int, nn.Module]:
    """A twin of every module from `root` down, by the id of the original.

    Each has its own tables (parameters, buffers, submodules, hooks), so that changing the twins
    does not change the originals; bound methods of one module become those of its twin.
    copy.copy cannot be used: a parametrized module refuses it.
    """
    copies: dict[int, nn.Module] = {}
    for module in root.modules():
        twin = copies[id(module)] = module.__class__.__new__(module.__class__)
        twin.__dict__.update(vars(module))
    for module in root.modules():
        table = copies[id(module)].__dict__
        for name, value in vars(module).items():
            if isinstance(value, dict | set) and name.startswith("_"):
                table[name] = copy.copy(value)  # tensors, hooks
            else:
                table[name] = _of_twins(value, copies)
        table["_modules"] = {
            name: None if child is None else copies[id(child)]
            for name, child in module._modules.items()
        }
    return copies


def twin_with(model: nn.Module, change: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A twin of the model that holds, under all names, what `change` makes of each tensor of it, by
    its first name."""
    copies, made = twins(model), dict[int, Tensor]()
    names = {id(t): fqn for fqn, t in (*model.named_parameters(), *model.named_buffers())}
    for twin in copies.values():
        tables: tuple[dict[str, Any], ...] = (twin._parameters, twin._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in made:
                    new = change(names[id(tensor)], tensor.detach())
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = new
                table[name] = None if tensor is None else made[id(tensor)]
    return copies[id(model)]


Places: TypeAlias = list[tuple[nn.Module, str, Tensor | None]]


def buffers_of(modules: Iterable[nn.Module]) -> Places:
    """Places of the modules' own buffers, with what is there."""
    return [(one, name, held) for one in modules for name, held in one._buffers.items()]


def rebound(places: Places) -> Places:
    """Those of the places where there is another tensor now, or none."""
    return [(one, name, held) for one, name, held in places if one._buffers.get(name) is not held]


def write_rebound(places: Places, known: Callable[[Tensor], bool] = lambda _: True) -> list[Tensor]:
    """Writes tensors that ``self.buffer = new`` has bound into the buffers that were there before,
    and returns those.

    A new shape or dtype, or a value that brings gradients into the next call, is left alone and
    refused afterwards: writing it would not be the same.
    """
    written = []
    for module, name, old in rebound(places):
        new = module._buffers.get(name)
        if new is None or old is None or new.requires_grad or not known(new):
            continue
        if (old.shape, old.dtype) == (new.shape, new.dtype):
            with torch.no_grad():
                written.append(old.copy_(new))
            module._buffers[name] = old
    return written


def _of_twins(value: Any, copies: Mapping[int, nn.Module]) -> Any:
    """A module, a method of one or a partial with them: that of the twins.  Else the value."""
    if isinstance(value, MethodType) and id(value.__self__) in copies:
        return MethodType(value.__func__, copies[id(value.__self__)])
    if isinstance(value, functools.partial):
        function, *given = (_of_twins(one, copies) for one in (value.func, *value.args))
        return functools.partial(function, *given, **value.keywords)
    return copies.get(id(value), value)
