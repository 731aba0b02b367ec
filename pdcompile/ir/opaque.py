"""Opaque modules: a stage runs a twin of the user's module.

A twin has the module's class, attributes and hooks, and its own tables of tensors, so that a stage
can put other versions of the weights in.  Its result is checked against the capture, because the
inside is not known, and its random draws are seeded one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from pdcompile.eager.modes import modes_in
from pdcompile.eager.module_copies import Places, buffers_of, rebound, twins, write_rebound
from pdcompile.eager.snapshot import tensors_at
from pdcompile.errors import ContractError, SourceError
from pdcompile.ir.graph import Affine, size_at
from pdcompile.ir.stage_interface import OpaqueCall, StageInterface, submodule_of

Around = Callable[[], AbstractContextManager[Any]]


def describe(result: Any) -> str:
    """The form of a result as text: nesting, keys, classes, and the places of tensors.

    Raises:
        TypeError: it holds other objects than tensors, None and containers of them.
    """
    if isinstance(result, torch.Tensor):
        return "*"
    if result is None:
        return "None"
    kind = type(result).__name__
    if isinstance(result, tuple | list):
        return f"{kind}({', '.join(map(describe, result))})"
    if isinstance(result, dict) and all(type(key) is str for key in result):
        return f"{kind}({', '.join(f'{key}={describe(x)}' for key, x in result.items())})"
    raise TypeError(f"{type(result).__module__}.{type(result).__qualname__}")


def tensors_among(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers."""
    return [tensor for _, tensor in tensors_at(value)]


class OpaqueState:
    """The state that a twin has in addition to the user's module."""

    def __init__(self, path: str, modes: Mapping[bool, Mapping[nn.Module, bool]]) -> None:
        self.path = path
        self.modes = modes  # of its modules, in training (True) and in evaluation
        self.with_buffers = [module for module in modes[True] if module._buffers]
        self.around: Around = nullcontext
        self.expected: dict[bool, tuple[OpaqueCall, ...]] = {}
        self.rebinds: list[tuple[Any, str]] = []  # owner and name of buffers that calls bind anew

    def check(self, training: bool, args: Any, kwargs: Any, result: Any, buffers: Places) -> None:
        """Raises ContractError unless the result has the form and sizes of a captured one, and
        buffers are those that there were before."""
        for _, name, _ in rebound(buffers):
            raise ContractError(
                f"the opaque module {self.path!r} binds its buffer {name!r} to another tensor",
                where=self.path,
                remedy="keep its shape and dtype, and no gradient: self.buffer.copy_(new.detach())",
            )
        problems = [_problem(one, args, kwargs, result) for one in self.expected.get(training, ())]
        if problems and all(problems):
            raise ContractError(
                f"the opaque module {self.path!r} returned {problems[0]}",
                where=self.path,
                remedy="results of its shape are part of the plan: make them depend on the shapes "
                "of its inputs only",
            )


def _problem(expected: OpaqueCall, args: Any, kwargs: Any, result: Any) -> str:
    form = describe(result)
    if expected.form and form != expected.form:
        return f"{form}, and {expected.form} when it was captured"
    given = {**dict(enumerate(args)), **kwargs}
    b = None
    for (key,), shape in expected.takes:
        real = given[key].shape
        for size, number in zip(shape, real, strict=False):
            if isinstance(size, Affine) and b is None:
                b = (number - size.offset) * size.over // size.scale
    found = dict(tensors_at(result))
    for path, shape, dtype in expected.gives:
        tensor = found[path]
        sizes = [n if isinstance(s, Affine) and b is None else size_at(s, b or 0)
                 for s, n in zip(shape, tensor.shape, strict=False)]  # fmt: skip
        kind = str(tensor.dtype).removeprefix("torch.")
        if list(tensor.shape) != sizes or len(shape) != tensor.dim() or kind != dtype:
            return f"{kind} {tuple(tensor.shape)} where {dtype} {tuple(sizes)} was captured"
    return ""


def twin_of(model: nn.Module, path: str) -> nn.Module:
    """A copy of the module at `path` that shares tensors, attributes and hooks with it."""
    original = model.get_submodule(path)
    copies = twins(original)
    modes = {
        training: {copies[id(m)]: of_model[m] for m in original.modules()}
        for training, of_model in ((mode, modes_in(model, mode)) for mode in (True, False))
    }
    twin = copies[id(original)]
    cls: Any = type(original)
    twin.__class__ = _class_of(cls)
    twin.__dict__["_pdcompile"] = OpaqueState(path, modes)
    return twin


@functools.cache
def _class_of(cls: Any) -> type[nn.Module]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: OpaqueState = self.__dict__["_pdcompile"]
        buffers = buffers_of(state.with_buffers)
        for owner, name in state.rebinds:  # the graph of this call may keep the one that is there
            owner._buffers[name] = owner._buffers[name].clone()
        try:
            with state.around():
                result = cls.__call__(self, *args, **kwargs)
        finally:
            write_rebound(buffers)
        state.check(self.training, args, kwargs, result, buffers)
        return result

    def train(self: Any, mode: bool = True) -> Any:
        state: OpaqueState = self.__dict__["_pdcompile"]
        for module in self.modules():
            module.training = state.modes[mode].get(module, mode)
        return self

    return type(cls.__name__, (cls,), {
        "__call__": __call__, "train": train, "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    })  # fmt: skip


def instance(cls: type[nn.Module], interface: StageInterface, model: nn.Module | None) -> nn.Module:
    """A stage without memory, with twins of the model's modules as its opaque modules.

    Raises:
        SourceError: there is no model to take them from.
    """
    with torch.device("meta"):
        stage = cls()
    for path in interface.opaque:
        if model is None:
            raise SourceError(
                f"stage {interface.index} needs the model's own module {path!r}",
                remedy="run the stages through pdcompile, with the model",
            )
        twin = twin_of(model, path)
        state: OpaqueState = twin.__dict__["_pdcompile"]
        for training, signature in ((True, interface.train), (False, interface.eval)):
            state.expected[training] = signature.opaque_calls.get(path, ())
        calls = (*state.expected[True], *state.expected[False])
        for fqn in {one.removeprefix(f"{path}.") for call in calls for one in call.rebinds}:
            owner, _, name = fqn.rpartition(".")
            state.rebinds.append((submodule_of(twin, owner), name))
        owner, _, name = path.rpartition(".")
        submodule_of(stage, owner)._modules[name] = twin
        twin.train(stage.training)
    return stage


def announce(stage: nn.Module, interface: StageInterface, around: Around) -> None:
    """Makes the opaque modules of a stage run inside ``around()``."""
    for path in interface.opaque:
        submodule_of(stage, path).__dict__["_pdcompile"].around = around
