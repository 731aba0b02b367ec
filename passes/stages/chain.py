"""Runs the stages one after the other in one process, cut from each other as on several machines.

Used to verify and to time stages.  It sends no messages: the values of one microbatch are in a
dict, and gradients go back along the edges in the plan's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pdcompile.eager.stage_compiler import Backend
from pdcompile.ir.graph import OpGraph
from pdcompile.ir.opaque import instance
from pdcompile.ir.stage_interface import Sources, StageInterface
from pdcompile.ir.stage_run import Flight, Microbatch, StageRun
from pdcompile.ir.stage_streams import Streams
from pdcompile.ir.stage_wiring import wire
from pdcompile.passes.codegen.folder import stage_classes
from pdcompile.plan import Edge, TiedParameter
from pdcompile.reference.tied_uses import add_sum
from pdcompile.weights.source import registered


class LocalStage:
    """One stage in one mode, with the edges of all stages.

    After `forward`: `left` are its results by value name, `loss` is the loss if it makes that.
    """

    def __init__(
        self,
        module: nn.Module,
        interface: StageInterface,
        num_stages: int,
        edges: Sequence[Edge],
        seed: int = 0,
        backend: Backend | None = None,
    ) -> None:
        self.module = module
        signature = interface.train if module.training else interface.eval
        self.wiring = wire(interface.index, num_stages, signature, edges, module.training)
        streams = Streams(seed, backend)
        streams.attach(module, interface)
        self._run = StageRun(interface.index, streams)
        self._flight = Flight()
        self.left: dict[str, Tensor] = {}
        self.loss: Tensor | None = None

    def forward(
        self, values: Mapping[str, Tensor], leaves: Mapping[str, Any], minibatch: int = 0
    ) -> None:
        """Runs on values of earlier stages and leaves of the call, as microbatch 0."""
        given = [
            leaves[port.path] if port.path is not None else values[port.value].detach()
            for port, _ in self.wiring.inputs
        ]
        call = Microbatch(minibatch, 0, leaves.__getitem__)
        self._flight, self.left = self._run.forward(self.module, self.wiring, given, call)
        self.loss = self._flight.loss

    def backward(self, sums: dict[int, Tensor]) -> None:
        """Continues from the gradients of later readers, by edge, and leaves its own there."""
        self._run.backward(self._flight, self.wiring, sums.get)
        for edge, entrance in self._flight.entered.items():
            if (gradient := entrance.take()) is not None:
                sums[edge] = gradient


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
    """All stages of one mode, on the model's own tensors.  `running` is the stage at work.

    They run through torch.compile where there is a `backend`.
    """

    def __init__(
        self,
        graph: OpGraph,
        edges: tuple[Edge, ...],
        tied: tuple[TiedParameter, ...],
        sources: Sources,
        model: nn.Module,
        seed: int,
        backend: Backend | None = None,
    ) -> None:
        self.graph = graph
        self.running = 0
        self.edited = sources.edited  # names of files
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._tied = [_Tied.of(one, parameters) for one in tied]

        def tensors_of(stage: int) -> dict[str, Tensor]:
            copies = {
                id(one.owned): one.by_stage[stage] for one in self._tied if stage in one.by_stage
            }
            every = tensors_by_name(model, sources)
            return {name: copies.get(id(tensor), tensor) for name, tensor in every.items()}

        self._stages = [
            LocalStage(
                build(cls, one, tensors_of(one.index), model).train(graph.training),
                one, len(sources.interfaces), edges, seed, backend,
            )
            for cls, one in zip(stage_classes(sources), sources.interfaces, strict=True)
        ]  # fmt: skip

    def forward(
        self, leaves: Mapping[str, Any], minibatch: int
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """The model's outputs by value name, and the loss if there is one."""
        for one in self._tied:
            one.refresh()
        values: dict[str, Tensor] = {}
        loss = None
        for k, stage in enumerate(self._stages):
            self.running = k
            stage.forward(values, leaves, minibatch)
            values.update(stage.left)
            loss = stage.loss if stage.loss is not None else loss
        return self._stages[-1].left, loss

    def backward(self) -> None:
        """Gradients of every parameter; sums along an edge start at its last reader."""
        sums: dict[int, Tensor] = {}
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
    stage = instance(cls, interface, model)
    fill(stage, interface, tensors.__getitem__)
    return stage


def fill(stage: nn.Module, interface: StageInterface, tensor: Callable[[str], Tensor]) -> None:
    """Puts tensors, by canonical FQN, into a stage."""
    for one in registered(stage, shared=False):
        one.table[one.leaf] = tensor(interface.aliases.get(one.name, one.name))
