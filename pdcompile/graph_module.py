"""Running an OpGraph on real tensors: one op, all ops, or as a torch.fx GraphModule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pdcompile.graph import (
    Affine,
    Argument,
    Attr,
    DictOf,
    ListOf,
    Op,
    OpGraph,
    Ref,
    Slice,
    TorchLiteral,
)
from pdcompile.targets import from_literal, resolve

__all__ = ["Lookup", "execute", "materialise", "run_op"]

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Lookup:
    """Where an op finds the model's modules and tensors, for one batch size and device.

    `model` may be any module that has the names: the model itself or a part of it.
    `constants` are tensors of kind "constant" (`OpGraph.tensor_values`).
    """

    model: nn.Module
    b: int
    device: torch.device = CPU
    constants: Mapping[str, torch.Tensor] | None = None

    def tensor(self, fqn: str) -> torch.Tensor:
        if self.constants is not None and fqn in self.constants:
            return self.constants[fqn]
        path, _, name = fqn.rpartition(".")
        return getattr(self.model.get_submodule(path), name)  # type: ignore[no-any-return]

    def module(self, path: str) -> nn.Module:
        return self.model.get_submodule(path)


def materialise(argument: Argument, env: Mapping[str, Any], lookup: Lookup) -> Any:
    """The Python value of an argument.

    Args:
        argument: from an op's args or kwargs, or the graph's output.
        env: value name to tensor or container.
        lookup: finds Attrs; its b is the microbatch size of Affine numbers.
    """
    match argument:
        case Ref(name):
            return env[name]
        case Attr(fqn):
            return lookup.tensor(fqn)
        case Affine():
            return argument.at(lookup.b)
        case TorchLiteral():
            return from_literal(argument, lookup.device)
        case ListOf(items):
            return [materialise(item, env, lookup) for item in items]
        case DictOf(items):
            return {key: materialise(item, env, lookup) for key, item in items}
        case Slice(start, stop, step):
            return slice(*(materialise(part, env, lookup) for part in (start, stop, step)))
        case tuple():
            return tuple(materialise(item, env, lookup) for item in argument)
        case _:
            return argument


def run_op(op: Op, env: Mapping[str, Any], lookup: Lookup) -> Any:
    """Execute one op on the values in `env`, in its grad and autocast mode.

    Where the op's region has gradients on, the caller's mode decides, as it does for the model.
    """
    args = [materialise(argument, env, lookup) for argument in op.args]
    kwargs = {name: materialise(argument, env, lookup) for name, argument in op.kwargs}
    with ExitStack() as stack:
        if not op.grad_enabled:
            stack.enter_context(torch.no_grad())
        if op.autocast is not None:
            device, _, dtype = op.autocast.partition(":")
            stack.enter_context(torch.autocast(device, dtype=getattr(torch, dtype)))
        return _callable(op, lookup)(*args, **kwargs)


def _callable(op: Op, lookup: Lookup) -> Callable[..., Any]:
    if op.kind in ("module", "opaque"):
        return lookup.module(op.module_path)
    if op.kind == "method":
        return lambda tensor, *args, **kwargs: getattr(tensor, op.target)(*args, **kwargs)
    if op.kind == "getattr":
        return lambda tensor: getattr(tensor, op.target)
    return resolve(op.target)


def execute(graph: OpGraph, inputs: Mapping[str, torch.Tensor], lookup: Lookup) -> dict[str, Any]:
    """Run all ops in order; `inputs` by value name.  Returns every value by name."""
    env: dict[str, Any] = dict(inputs)
    for op in graph.ops:
        env[op.name] = run_op(op, env, lookup)
    return env
