"""The stages one after the other in one process, cut from each other as on several machines.

What verify runs.  It is written apart from the runtime on purpose, and moves no messages: the
values of one microbatch in a dict, gradients handed back along the edges in the plan's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pdcompile import opaque
from pdcompile.entrance import Entrance
from pdcompile.graph import OpGraph
from pdcompile.passes.codegen.load import set_draw, stage_classes
from pdcompile.plan import Edge, TiedParameter
from pdcompile.randomness import DrawScope, reseed, seed_of
from pdcompile.stage import Signature, Sources, StageInterface


class Chain:
    """All stages of one mode, on the model's own tensors.  `running` is the stage at work."""

    def __init__(
        self,
        graph: OpGraph,
        edges: tuple[Edge, ...],
        tied: tuple[TiedParameter, ...],
        sources: Sources,
        model: nn.Module,
        seed: int,
    ) -> None:
        self.graph = graph
        self.running = 0
        self._edges = {edge.value: edge for edge in edges}
        self._interfaces = sources.interfaces
        parameters = dict(model.named_parameters())
        self._tied = [(one.stages, parameters[one.fqn]) for one in tied]
        tensors: dict[str, torch.Tensor] = dict(sources.constants)
        tensors.update(model.named_parameters(remove_duplicate=False))
        tensors.update(model.named_buffers(remove_duplicate=False))
        self._stages = [
            build(cls, interface, tensors.__getitem__, model).train(graph.training)
            for cls, interface in zip(stage_classes(sources), self._interfaces, strict=True)
        ]
        self._seed = seed
        self._announced: list[Any] = []
        self.begin(0)
        self._entered: list[dict[str, Entrance]] = []
        self._left: list[dict[str, torch.Tensor]] = []

    def begin(self, minibatch: int) -> None:
        """From here on random ops draw the streams of this minibatch (its microbatch 0)."""
        for handle in self._announced:
            handle.remove()
        pairs = list(zip(self._stages, self._interfaces, strict=True))
        self._announced = [
            handle
            for stage, interface in pairs
            for handle in announce(stage, self._signature(interface), self._seed, minibatch)
        ]
        self._scopes = [DrawScope(stage, self._seed, minibatch, 0) for stage in self._stages]
        for (stage, interface), scope in zip(pairs, self._scopes, strict=True):
            opaque.announce(stage, interface, partial(_same, scope))

    def _signature(self, interface: StageInterface) -> Signature:
        return interface.train if self.graph.training else interface.eval

    def forward(
        self, leaves: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """The model's outputs by value name, and the loss if there is one."""
        values: dict[str, torch.Tensor] = {}
        outputs: dict[str, torch.Tensor] = {}
        loss = None
        self._entered, self._left = [], []
        for stage, interface in zip(self._stages, self._interfaces, strict=True):
            self.running = interface.index
            signature = self._signature(interface)
            entered: dict[str, Entrance] = {}
            arguments = []
            for port in signature.inputs:
                value = leaves[port.path] if port.path is not None else values[port.value]
                if port.path is None and self._returns_gradient(port.value):
                    entrance = entered[port.value] = Entrance(value)
                    value = entrance.value
                elif port.path is None:
                    value = value.detach()
                arguments.append(value.clone() if port.mutated else value)
            results = stage(*arguments)
            outputs = {p.value: one for p, one in zip(signature.outputs, results, strict=True)}
            values.update(outputs)
            self._entered.append(entered)
            self._left.append(outputs)
            if signature.loss_inputs:
                arguments = [
                    outputs[p.value] if p.value in outputs else leaves[p.path or ""]
                    for p in signature.loss_inputs
                ]
                loss = stage.loss(*arguments)  # type: ignore[operator]
            elif signature.loss is not None:
                loss = outputs[signature.loss]
        return outputs, loss

    def _returns_gradient(self, value: str) -> bool:
        return self.graph.training and self._edges[value].gradient

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of every parameter; sums along an edge start at its last reader."""
        sums: dict[str, torch.Tensor] = {}
        for k in reversed(range(len(self._stages))):
            self.running = k
            roots: list[torch.Tensor] = []
            gradients: list[torch.Tensor | None] = []
            for value, entrance in self._entered[k].items():
                if value in sums:
                    roots.append(entrance.value)
                    gradients.append(sums[value])
            for stages, parameter in self._tied:
                if k in stages and parameter.grad is not None:  # summed by later stages
                    roots.append(parameter)
                    gradients.append(parameter.grad)
                    parameter.grad = None
            for value, tensor in self._left[k].items():
                edge = self._edges.get(value)
                if edge is not None and edge.source == k and value in sums and tensor.requires_grad:
                    roots.append(tensor)
                    gradients.append(sums[value])
            if k == len(self._stages) - 1 and loss.requires_grad:
                roots.append(loss)
                gradients.append(None)
            if roots:
                scope = self._scopes[k]
                run = scope.backward_of if scope.draws else torch.autograd.backward
                run(roots, gradients)
            for value, entrance in self._entered[k].items():
                if entrance.gradient is not None:
                    sums[value] = entrance.gradient
            for stages, parameter in self._tied:
                if k in stages[1:] and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)  # a copy sends zeros then


def _same(scope: DrawScope) -> DrawScope:
    return scope


def build(
    cls: type[nn.Module],
    interface: StageInterface,
    tensor: Callable[[str], torch.Tensor],
    model: nn.Module | None = None,
) -> nn.Module:
    """A stage that holds the given tensors (by canonical FQN) under its own names."""
    with torch.device("meta"):
        stage = cls()
    opaque.bind(stage, interface, model)
    for path, module in stage.named_modules():
        prefix = f"{path}." if path else ""
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, value in table.items():
                if value is not None:
                    fqn = interface.aliases.get(prefix + name, prefix + name)
                    table[name] = tensor(fqn)
    return stage


def announce(
    stage: nn.Module, signature: Signature, seed: int, minibatch: int = 0
) -> list[RemovableHandle]:
    """Seed every random op of the stage by its place in the model (microbatch 0).

    Returns the hooks on its modules, to be removed before the next minibatch is announced.
    """
    names = {module: name for name, module in stage.named_modules()}

    def draw(where: nn.Module | str, index: int) -> None:
        path = where if isinstance(where, str) else names[where]
        reseed(seed_of(seed, minibatch, 0, path, index))

    set_draw(type(stage), draw)
    handles = []
    for path, indices in signature.draws.items():
        calls = count()

        def hook(
            module: nn.Module,
            args: Any,
            path: str = path,
            calls: count[int] = calls,
            indices: tuple[int, ...] = indices,
        ) -> None:
            draw(path, indices[next(calls)])

        handles.append(stage.get_submodule(path).register_forward_pre_hook(hook))
    return handles
