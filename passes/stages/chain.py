"""The stages one after the other in one process, cut from each other as on several machines.

What verify runs.  It is written apart from the runtime on purpose, and moves no messages: the
values of one microbatch in a dict, gradients handed back along the edges in the plan's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pdcompile.eager.entrance import Entrance
from pdcompile.eager.randomness import DrawScope, reseed, seed_of
from pdcompile.ir import opaque
from pdcompile.ir.graph import OpGraph
from pdcompile.ir.stage_interface import Signature, Sources, StageInterface
from pdcompile.passes.codegen.folder import set_draw, stage_classes
from pdcompile.plan import Edge, TiedParameter


@dataclass(slots=True)
class _Tied:
    """A parameter that several stages hold: the first one has the model's own, the others copies.

    Copies have no hooks: those of the user's run once, on the whole gradient, as in eager.
    """

    owned: nn.Parameter
    held: dict[int, nn.Parameter]  # by stage
    sum: torch.Tensor | None = None  # of the gradients in the stages that have run

    @classmethod
    def of(cls, tied: TiedParameter, parameters: Mapping[str, nn.Parameter]) -> _Tied:
        owned = parameters[tied.fqn]
        copies = {
            stage: nn.Parameter(owned.detach(), requires_grad=owned.requires_grad)
            for stage in tied.stages[1:]
        }
        return cls(owned, {tied.stages[0]: owned, **copies})

    def refresh(self) -> None:
        """The parameter may have been given other data."""
        for copy in self.held.values():
            if copy is not self.owned:
                copy.data = self.owned.data

    def ran(self, stage: int) -> None:
        """Take the gradient of a copy, to be summed further in the stage before."""
        copy = self.held.get(stage)
        if copy is None or copy is self.owned:
            return
        # Where there is none, a copy sends zeros.
        self.sum = torch.zeros_like(copy) if copy.grad is None else copy.grad
        copy.grad = None


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
        self.edited = sources.edited  # names of files
        self._edges = {edge.value: edge for edge in edges}
        self._interfaces = sources.interfaces
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._tied = [_Tied.of(one, parameters) for one in tied]
        tensors: dict[str, torch.Tensor] = {**sources.constants, **parameters}
        tensors.update(model.named_buffers(remove_duplicate=False))
        self._stages = [
            build(cls, interface, self._tensors_of(interface.index, tensors), model).train(
                graph.training
            )
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
        for one in self._tied:
            one.refresh()
        pairs = list(zip(self._stages, self._interfaces, strict=True))
        self._announced = [
            handle
            for stage, interface in pairs
            for handle in announce(stage, self._signature(interface), self._seed, minibatch)
        ]
        self._scopes = [DrawScope(stage, self._seed, minibatch, 0) for stage in self._stages]
        for (stage, interface), scope in zip(pairs, self._scopes, strict=True):
            opaque.announce(stage, interface, partial(_same, scope))

    def _tensors_of(
        self, stage: int, tensors: Mapping[str, torch.Tensor]
    ) -> Callable[[str], torch.Tensor]:
        copies = {id(one.owned): one.held[stage] for one in self._tied if stage in one.held}

        def tensor(fqn: str) -> torch.Tensor:
            return copies.get(id(tensors[fqn]), tensors[fqn])

        return tensor

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
        for one in self._tied:
            one.sum = None
        for k in reversed(range(len(self._stages))):
            self.running = k
            roots: list[torch.Tensor] = []
            gradients: list[torch.Tensor | None] = []
            for value, entrance in self._entered[k].items():
                if value in sums:
                    roots.append(entrance.value)
                    gradients.append(sums[value])
            for one in self._tied:
                if k in one.held and one.sum is not None:  # by later stages
                    roots.append(one.held[k])
                    gradients.append(one.sum)
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
            for one in self._tied:
                one.ran(k)


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
