"""An OpGraph as a torch.fx Graph.

torch.fx pastes module paths and placeholder names into source text, so only plain identifiers
are given to it; a module or tensor with any other name is handed in as an argument.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from pdcompile.batch.call import TARGET
from pdcompile.eager.autocast import OFF
from pdcompile.ir.records import (
    Affine,
    Argument,
    Attr,
    GraphInput,
    LeftOut,
    Op,
    Ref,
    TorchLiteral,
    leaves,
    python_value,
    walk,
)
from pdcompile.ir.targets import from_literal, resolve
from pdcompile.releases.torch_internals import enter_autocast, exit_autocast, set_grad_enabled

if TYPE_CHECKING:
    from pdcompile.ir.graph import OpGraph


@dataclass(frozen=True, slots=True)
class Program:
    """The fx graph of one mode, and its placeholders in order."""

    graph: OpGraph
    fx_graph: fx.Graph
    inputs: tuple[GraphInput, ...]  # of the model, without loss_fn's target
    extras: tuple[tuple[str, str], ...]  # (kind, FQN): b, device, module, tensor


class _Builder:
    def __init__(self, graph: OpGraph, ops: Sequence[Op]) -> None:
        self.fx = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self._made: dict[Any, fx.Node] = {}
        self.inputs = tuple(entry for entry in graph.inputs if not _of_target(entry.path))
        for entry in self.inputs:
            self.nodes[entry.name] = self.fx.placeholder(entry.name)
        self.extras = tuple(dict.fromkeys(_extras(graph, ops)))
        for n, (kind, name) in enumerate(self.extras):
            self._made[kind, name] = self.fx.placeholder(f"{kind}_{n}")

    def add(self, op: Op) -> None:
        args = tuple(self.argument(argument) for argument in op.args)
        kwargs = {name: self.argument(argument) for name, argument in op.kwargs}
        kind: str = "call_function"
        target: Any = None
        if op.kind in ("module", "opaque") and is_plain(op.module_path):
            kind, target = "call_module", op.module_path
        elif op.kind in ("module", "opaque"):
            target, args = call_module, (self._made["module", op.module_path], *args)
        elif op.kind == "method":
            kind, target = "call_method", op.target
        elif op.kind == "getattr":
            target, args = getattr, (args[0], op.target)
        else:
            target = _function(op.target)
        # Named here: torch.fx itself would call the result of a module `self` just that.
        node = self.fx.create_node(kind, target, args, kwargs, name=op.name)
        node.meta["op"] = op
        self.nodes[op.name] = node

    def argument(self, argument: Argument) -> Any:
        return python_value(argument, self._leaf)

    def _leaf(self, argument: Argument) -> Any:
        match argument:
            case Ref(name):
                return self.nodes[name]
            case LeftOut():
                return None
            case Attr(fqn) if is_plain(fqn):
                return self.fx.create_node("get_attr", fqn, name=f"tensor_{len(self._made)}")
            case Attr(fqn):
                return self._made["tensor", fqn]
            case Affine():
                return self._affine(argument)
            case TorchLiteral("device", "self"):
                return self._made["device", ""]
            case TorchLiteral():
                return from_literal(argument, torch.device("cpu"))
        return argument

    def _affine(self, size: Affine) -> Any:
        node = self._made.get(size)
        if node is None:
            node = self._made["b", ""]
            if size.scale != 1:
                node = self.fx.call_function(operator.mul, (node, size.scale))
            if size.offset:
                node = self.fx.call_function(operator.add, (node, size.offset))
            self._made[size] = node
        return node


@functools.cache
def _function(target: str) -> Callable[..., Any]:
    """The callable of a function op, under a name that torch.fx does not take for torch's."""
    found = resolve(target)
    owner = getattr(found, "__self__", None)
    if not (isinstance(owner, type) and issubclass(owner, torch.autograd.Function)):
        return found

    def apply_function(*args: Any, **kwargs: Any) -> Any:
        return found(*args, **kwargs)

    return apply_function


def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a module whose name cannot be put into fx's source text."""
    return module(*args, **kwargs)


def program_of(graph: OpGraph) -> Program:
    """The model's ops, without those of loss_fn, as an fx graph."""
    used = [op for op in graph.ops if op.region == "forward"]
    builder = _Builder(graph, used)
    for (grad, enables, autocast), region in groupby(
        used, key=lambda op: (op.grad_enabled, op.enables_grad, op.autocast)
    ):
        before = None
        context = None
        if enables or not grad:
            before = builder.fx.call_function(torch.is_grad_enabled)
            builder.fx.call_function(set_grad_enabled, (grad,))
        if autocast is not None:
            device, _, dtype = autocast.partition(":")
            on = dtype != OFF
            arguments = (device, getattr(torch, dtype) if on else None, on, None)
            context = builder.fx.call_function(enter_autocast, arguments)
        for op in region:
            builder.add(op)
        if context is not None:
            builder.fx.call_function(exit_autocast, (context,))
        if before is not None:
            builder.fx.call_function(set_grad_enabled, (before,))
    builder.fx.output(tuple(builder.argument(leaf) for leaf in leaves(graph.output)))
    return Program(graph, builder.fx, builder.inputs, builder.extras)


def _of_target(path: str) -> bool:
    return re.match(rf"{TARGET}($|\W)", path) is not None


def _extras(graph: OpGraph, ops: Sequence[Op]) -> Iterator[tuple[str, str]]:
    """Placeholders besides the inputs, for what source text cannot name."""
    for op in ops:
        if op.kind in ("module", "opaque") and not is_plain(op.module_path):
            yield "module", op.module_path
    for part in walk(
        (tuple((op.args, op.kwargs) for op in ops), graph.output), (Affine, Attr, TorchLiteral)
    ):
        if isinstance(part, Affine):
            yield "b", ""
        elif part == TorchLiteral("device", "self"):
            yield "device", ""
        elif isinstance(part, Attr) and not is_plain(part.fqn):
            yield "tensor", part.fqn


def is_plain(fqn: str) -> bool:
    """True if every part of a dotted name may appear in source text as it is."""
    return all(
        re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+", part) and not iskeyword(part)
        for part in fqn.split(".")
    )
