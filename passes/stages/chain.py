"""Runs the stages one after the other in one process, cut from each other as on several machines.

Used to verify and to time stages.  It shares nothing with the runtime on purpose and sends no
messages: the values of one microbatch are in a dict, and gradients go back along the edges in
the plan's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pdcompile.eager.entrance import Entrance
from pdcompile.eager.randomness import DrawScope, reseed, seed_of
from pdcompile.ir import opaque
from pdcompile.ir.graph import OpGraph
from pdcompile.ir.stage_interface import Signature, Sources, StageInterface, named_results
from pdcompile.passes.codegen.folder import set_draw, stage_classes
from pdcompile.plan import Edge, TiedParameter
from pdcompile.reference.tied_uses import add_sum


@dataclass
class LocalStage:
    """One stage in one mode, with the edges of all stages by value.

    After `forward`: `entered` are the values of earlier stages that send a gradient back, `left`
    its results, `loss` the loss if it makes that.
    """

    module: nn.Module
    interface: StageInterface
    edges: Mapping[str, Edge]
    seed: int
    entered: dict[str, Entrance] = field(default_factory=dict)
    left: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    _hooks: list[RemovableHandle] = field(default_factory=list)

    @property
    def signature(self) -> Signature:
        return self.interface.train if self.module.training else self.interface.eval

    def begin(self, minibatch: int) -> None:
        """Seeds random ops for this minibatch (its microbatch 0) from here on."""
        for hook in self._hooks:
            hook.remove()
        self._scope, self._hooks = announce(
            self.module, self.interface, self.signature, self.seed, minibatch
        )

    def forward(self, values: Mapping[str, Tensor], leaves: Mapping[str, Any]) -> None:
        """Runs on values of earlier stages and leaves of the call."""
        self.entered, arguments = {}, []
        for port in self.signature.inputs:
            value = leaves[port.path] if port.path is not None else values[port.value].detach()
            if port.path is None and self.module.training and self.edges[port.value].gradient:
                entrance = self.entered[port.value] = Entrance(value)
                value = entrance.value
            arguments.append(value.clone() if port.mutated else value)
        results = self.module(*arguments)
        self.left = named_results(self.interface.index, self.signature.outputs, results)
        self.loss = self.left.get(self.signature.loss or "")
        if self.signature.loss_inputs:
            arguments = [
                self.left[p.value] if p.value in self.left else leaves[p.path or ""]
                for p in self.signature.loss_inputs
            ]
            self.loss = self.module.loss(*arguments)  # type: ignore[operator]

    def backward(self, sums: dict[str, Tensor]) -> None:
        """Continues from the gradients of later readers, by value, and leaves its own there."""
        roots: list[tuple[Tensor, Tensor | None]] = [
            (one.value, sums[value]) for value, one in self.entered.items() if value in sums
        ]
        for value, tensor in self.left.items():
            edge = self.edges.get(value)
            own = edge is not None and edge.source == self.interface.index
            if own and value in sums and tensor.requires_grad:
                roots.append((tensor, sums[value]))
        if self.loss is not None and self.loss.requires_grad:
            roots.append((self.loss, None))
        if roots:
            scope = self._scope
            run = scope.backward_of if scope.draws else torch.autograd.backward
            run([root for root, _ in roots], [gradient for _, gradient in roots])
        for value, entrance in self.entered.items():
            if entrance.gradient is not None:
                sums[value] = entrance.gradient


@dataclass(slots=True)
class _Tied:
    """A parameter that several stages hold, each a copy.

    Copies have no hooks: those of the user's run once, on the sum of what the stages accumulate.
    """

    owned: nn.Parameter
    by_stage: dict[int, nn.Parameter]

    @classmethod
    def of(cls, tied: TiedParameter, parameters: Mapping[str, nn.Parameter]) -> _Tied:
        owned = parameters[tied.fqn]
        return cls(
            owned,
            {
                stage: nn.Parameter(owned.detach(), requires_grad=owned.requires_grad)
                for stage in tied.stages
            },
        )

    def refresh(self) -> None:
        """Points the copies at the model's data, which may have been replaced."""
        for copy in self.by_stage.values():
            copy.data = self.owned.data

    def add_sum(self) -> None:
        """Adds the sum of the copies' gradients to the model's."""
        add_sum(self.owned, [copy.grad for copy in self.by_stage.values()])
        for copy in self.by_stage.values():
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
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._tied = [_Tied.of(one, parameters) for one in tied]
        by_value = {edge.value: edge for edge in edges}

        def tensors_of(stage: int) -> dict[str, Tensor]:
            copies = {
                id(one.owned): one.by_stage[stage] for one in self._tied if stage in one.by_stage
            }
            every = tensors_by_name(model, sources)
            return {name: copies.get(id(tensor), tensor) for name, tensor in every.items()}

        self._stages = [
            LocalStage(
                build(cls, one, tensors_of(one.index), model).train(graph.training),
                one, by_value, seed,
            )
            for cls, one in zip(stage_classes(sources), sources.interfaces, strict=True)
        ]  # fmt: skip
        self.begin(0)

    def begin(self, minibatch: int) -> None:
        """Seeds random ops for this minibatch (its microbatch 0) from here on."""
        for one in self._tied:
            one.refresh()
        for stage in self._stages:
            stage.begin(minibatch)

    def forward(self, leaves: Mapping[str, Any]) -> tuple[dict[str, Tensor], Tensor | None]:
        """The model's outputs by value name, and the loss if there is one."""
        values: dict[str, Tensor] = {}
        loss = None
        for k, stage in enumerate(self._stages):
            self.running = k
            stage.forward(values, leaves)
            values.update(stage.left)
            loss = stage.loss if stage.loss is not None else loss
        return self._stages[-1].left, loss

    def backward(self) -> None:
        """Gradients of every parameter; sums along an edge start at its last reader."""
        sums: dict[str, Tensor] = {}
        for k, stage in reversed(list(enumerate(self._stages))):
            self.running = k
            stage.backward(sums)
        for one in self._tied:
            one.add_sum()


def tensors_by_name(model: nn.Module, sources: Sources) -> dict[str, Tensor]:
    """Parameters, buffers and constants, by every name."""
    found: dict[str, Tensor] = dict(sources.constants)
    found.update(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    return found


def build(
    cls: type[nn.Module],
    interface: StageInterface,
    tensors: Mapping[str, Tensor],
    model: nn.Module | None = None,
) -> nn.Module:
    """A stage that holds the given tensors (by canonical FQN) under its own names."""
    with torch.device("meta"):
        stage = cls()
    opaque.bind(stage, interface, model)
    fill(stage, "", interface, tensors.__getitem__)
    return stage


def fill(
    module: nn.Module, path: str, interface: StageInterface, tensor: Callable[[str], Tensor]
) -> None:
    """Puts tensors, by canonical FQN, into a module that lies at `path` in a stage."""
    for at, part in module.named_modules(prefix=path):
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, value in table.items():
                if value is not None:
                    full = f"{at}.{name}" if at else name
                    table[name] = tensor(interface.aliases.get(full, full))


def announce(
    stage: nn.Module, interface: StageInterface, signature: Signature, seed: int, minibatch: int = 0
) -> tuple[DrawScope, list[RemovableHandle]]:
    """Seeds every random op of the stage by its place in the model (microbatch 0).

    Returns the scope of opaque modules, and the hooks, to be removed before the next minibatch.
    """
    names = {module: name for name, module in stage.named_modules()}

    def draw(where: nn.Module | str, index: int) -> None:
        path = where if isinstance(where, str) else names[where]
        reseed(seed_of(seed, minibatch, 0, path, index))

    def hooked(path: str, indices: tuple[int, ...]) -> RemovableHandle:
        following = cycle(indices)
        hook = lambda module, args: draw(path, next(following))  # noqa: E731
        return stage.get_submodule(path).register_forward_pre_hook(hook)

    set_draw(type(stage), draw)
    scope = DrawScope(stage, seed, minibatch, 0)
    opaque.announce(stage, interface, lambda: scope)
    return scope, [hooked(path, indices) for path, indices in signature.draws.items()]
