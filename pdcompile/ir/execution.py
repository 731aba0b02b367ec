"""Runs an OpGraph on real tensors, one op or all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pdcompile.eager.autocast import autocast_region
from pdcompile.ir.records import Affine, Argument, Attr, Op, Ref, TorchLiteral, python_value
from pdcompile.ir.targets import from_literal, resolve

if TYPE_CHECKING:
    from pdcompile.ir.graph import OpGraph

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Lookup:
    """Finds the model's modules and tensors for an op, at one batch size and device.

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

    def leaf(argument: Argument) -> Any:
        match argument:
            case Ref(name):
                return env[name]
            case Attr(fqn):
                return lookup.tensor(fqn)
            case Affine():
                return argument.at(lookup.b)
            case TorchLiteral():
                return from_literal(argument, lookup.device)
        return argument

    return python_value(argument, leaf)


def run_op(op: Op, env: Mapping[str, Any], lookup: Lookup) -> Any:
    """Runs one op on the values in `env`, in its grad and autocast mode.

    Where the op's region has gradients on, the caller's mode decides, as it does for the model.
    """
    with _modes(op):
        return bound(op, env, lookup)()


def bound(op: Op, env: Mapping[str, Any], lookup: Lookup) -> Callable[[], Any]:
    """The call of one op with its arguments; made in the mode of the caller."""
    args = [materialise(argument, env, lookup) for argument in op.args]
    kwargs = {name: materialise(argument, env, lookup) for name, argument in op.kwargs}
    return partial(_callable(op, lookup), *args, **kwargs)


@contextmanager
def _modes(op: Op) -> Iterator[None]:
    """Opens the modes of an op.  Ops of one region share them: autocast caches casts of weights."""
    with ExitStack() as stack:
        if op.enables_grad or not op.grad_enabled:
            stack.enter_context(torch.set_grad_enabled(op.grad_enabled))
        if op.autocast is not None:
            stack.enter_context(autocast_region(op.autocast))
        yield


_region = attrgetter("grad_enabled", "enables_grad", "autocast")


def _callable(op: Op, lookup: Lookup) -> Callable[..., Any]:
    if op.kind in ("module", "opaque"):
        return lookup.module(op.module_path)
    if op.kind == "method":
        return lambda tensor, *args, **kwargs: getattr(tensor, op.target)(*args, **kwargs)
    if op.kind == "getattr":
        return lambda tensor: getattr(tensor, op.target)
    return resolve(op.target)


def execute(
    graph: OpGraph,
    inputs: Mapping[str, torch.Tensor],
    lookup: Lookup,
    *,
    kept: Collection[str] | None = None,
) -> dict[str, Any]:
    """Runs all ops in order; `inputs` by value name.  Returns every value by name.

    With `kept` the ops of the model alone run, and other values are dropped once no op reads them
    any more.
    """
    env: dict[str, Any] = dict(inputs)
    ops = [op for op in graph.ops if kept is None or op.region == "forward"]
    ends: dict[int, set[str]] = {}
    if kept is not None:
        last = {name: i for i, op in enumerate(ops) for name in (op.name, *op.inputs)}
        for name in last.keys() - set(kept):
            ends.setdefault(last[name], set()).add(name)
    for _, region in groupby(enumerate(ops), key=lambda one: _region(one[1])):
        members = list(region)
        with _modes(members[0][1]):
            for i, op in members:
                env[op.name] = bound(op, env, lookup)()
                for name in ends.get(i, ()):
                    del env[name]
    return env
