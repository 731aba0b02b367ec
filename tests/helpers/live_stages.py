"""Generated stages, each run alone on real tensors while what is alive is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.batch import FlatCall
from pdcompile.eager.randomness import preserved_rng
from pdcompile.eager.split_backward import Entrance
from pdcompile.ir.graph import Capture
from pdcompile.ir.stage_interface import Signature
from pdcompile.ir.stage_streams import Streams
from pdcompile.passes import codegen
from pdcompile.passes.costs.rehearsal.live_storages import LiveStorages
from pdcompile.passes.stages.chain import build, tensors_by_name
from pdcompile.plan import Plan


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of one microbatch on one stage: after forward, and the most during both passes.

    Parameters, buffers, what is received and the caller's inputs are left out; results are held
    until the end.  `first_peak`: without gradients of parameters at the start; `next_peak`: with
    them, which then are left out too.
    """

    resident: int
    first_peak: int
    next_peak: int


@dataclass
class _Runs:
    signature: Signature
    edges: Mapping[str, Any]
    stage: int
    leaves: Mapping[str, Any]
    values: dict[str, Tensor] = field(default_factory=dict)

    def once(self, module: nn.Module) -> tuple[int, int]:
        """(bytes after forward, peak) of one forward and backward."""
        held = [*module.parameters(), *module.buffers()]
        held += [p.grad for p in module.parameters() if p.grad is not None]
        arguments = [
            self.leaves[port.path] if port.path is not None else self.values[port.value]
            for port in self.signature.inputs
        ]
        inputs = [leaf for leaf in self.leaves.values() if isinstance(leaf, Tensor)]
        live = LiveStorages([*held, *arguments, *inputs])
        with live:
            entered = self._forward(module, arguments)
        resident = live.now_bytes
        roots, gradients = self._heads(entered)
        live.give(gradient for gradient in gradients if gradient is not None)
        if roots:
            with live:
                torch.autograd.backward(roots, gradients)
        return resident, live.peak_bytes

    def _forward(self, module: nn.Module, given: list[Tensor]) -> dict[str, Entrance]:
        entered: dict[str, Entrance] = {}
        arguments = []
        for port, value in zip(self.signature.inputs, given, strict=True):
            if port.path is None and self.edges[port.value].gradient:
                entered[port.value] = Entrance(value)
                arguments.append(entered[port.value].value)
            else:
                arguments.append(value)
            if port.mutated:
                arguments[-1] = arguments[-1].clone()
        made = module(*arguments)
        del arguments
        self.results = dict(zip((p.value for p in self.signature.outputs), made, strict=True))
        self.loss = self.results.get(self.signature.loss or "")
        if self.signature.loss_inputs:
            ports = self.signature.loss_inputs
            self.loss = module.loss(  # type: ignore[operator]
                *(self.results.get(p.value, self.leaves.get(p.path or "")) for p in ports)
            )
        return entered

    def _heads(self, entered: dict[str, Entrance]) -> tuple[list[Tensor], list[Tensor | None]]:
        last = {name: self.edges[name].targets[-1] for name in entered}
        roots = [entered[name].value for name in entered if last[name] != self.stage]
        for name, value in self.results.items():
            edge = self.edges.get(name)
            if edge is not None and edge.source == self.stage and edge.gradient:
                roots.append(value)
        gradients: list[Tensor | None] = [torch.zeros_like(root) for root in roots]
        if self.loss is not None:
            roots.append(self.loss)
            gradients.append(None)
        return roots, gradients


def measured(model: nn.Module, flat: FlatCall, capture: Capture, plan: Plan) -> list[Measured]:
    """Every stage of the plan on one microbatch, `flat`; gradients of the model are dropped."""
    sources = codegen.generate(capture, plan)
    tensors = tensors_by_name(model, sources)
    edges = {edge.value: edge for edge in plan.edges}
    values: dict[str, Tensor] = {}
    found = []
    with preserved_rng():
        for cls, interface in zip(codegen.stage_classes(sources), sources.interfaces, strict=True):
            model.zero_grad(set_to_none=True)
            runs = []
            for _ in range(2):  # the first without gradients, the next one with them
                module = build(cls, interface, tensors, model).train()
                streams = Streams(0)
                streams.attach(module, interface)
                streams.begin(0, 0)
                run = _Runs(interface.train, edges, interface.index, flat.leaves, values)
                runs.append(run.once(module))
            values.update({name: one.detach().clone() for name, one in run.results.items()})
            found.append(Measured(runs[0][0], runs[0][1], runs[1][1]))
    model.zero_grad(set_to_none=True)
    return found
