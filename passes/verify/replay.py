"""The captured graph once more, op by op, with the random streams of one step of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.eager.randomness import DrawScope, reseed, seed_of
from pdcompile.ir.graph import Op, OpGraph, Ref, leaves
from pdcompile.ir.graph_module import execute
from pdcompile.passes.trace.session import device_of
from pdcompile.passes.trace.streams import StreamLookup, announce, whole_modules
from pdcompile.passes.verify.runs import Loss, Outcome, Values, copied_leaves, outcome_of
from pdcompile.passes.verify.watch import Watch, digest


@dataclass(slots=True)
class Replay:
    """What each op made, by content: of values and gradients those that a `Watch` on the same
    run saw, since others would be missed in the stages as well."""

    outcome: Outcome
    values: dict[str, str]
    gradients: dict[str, str]
    inputs: dict[str, frozenset[str]]  # of what each op read
    everything: set[str]  # what the ops made inside, too


@dataclass(slots=True)
class _Recorder:
    graph: OpGraph
    seeds: tuple[int, int]  # seed, minibatch
    watch: Watch
    contents: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, frozenset[str]] = field(default_factory=dict)
    done: int = 0

    def announce(self) -> None:
        """Seed the op that comes next."""
        if self.done < len(self.graph.ops):
            announce(self.graph.ops[self.done], *self.seeds)

    def ran(self, name: str, value: Any) -> None:
        """An op has run."""
        op: Op = self.graph.ops[self.done]
        self.inputs[name] = frozenset(self.contents[i] for i in op.inputs if i in self.contents)
        if isinstance(value, Tensor):
            found = self.contents[name] = digest(value)
            if found in self.watch.values:
                self.values[name] = found
            if value.requires_grad and value.grad_fn is not None:
                value.register_hook(partial(self._gradient, name))  # type: ignore[no-untyped-call]
        self.done += 1
        self.announce()

    def _gradient(self, name: str, gradient: Tensor) -> None:
        found = digest(gradient)
        if found in self.watch.gradients:
            self.gradients[name] = found


def replay(
    model: nn.Module,
    graph: OpGraph,
    call: FlatCall,
    layout: BatchLayout,
    seed: int,
    minibatch: int,
) -> Replay:
    """Run the graph on the model's tensors; the model's buffers are as before afterwards.

    Args:
        call, layout: one microbatch.
        seed, minibatch: name the random streams.
    """
    watch = Watch()
    recorder = _Recorder(graph, (seed, minibatch), watch)
    scope = DrawScope(model, seed, minibatch, 0)
    lookup = StreamLookup(
        model, layout.size, device_of(model, call), graph.tensor_values, scope, whole_modules(graph)
    )

    def run() -> tuple[Values, Loss]:
        given = copied_leaves(call)
        entered = {entry.name: given[entry.path] for entry in graph.inputs}
        recorder.contents.update((name, digest(tensor)) for name, tensor in entered.items())
        reseed(seed_of(seed, minibatch, 0, "", -1))
        recorder.announce()
        with watch:
            env = execute(graph, entered, lookup, watch=recorder.ran)
        loss = env[graph.loss] if graph.loss is not None else None
        if graph.training and loss is not None and loss.requires_grad:
            back = scope.backward_of if scope.draws else torch.autograd.backward
            back([loss], [None])
        names = [leaf.name for leaf in leaves(graph.output) if isinstance(leaf, Ref)]
        return {name: env[name] for name in names}, loss

    outcome = outcome_of(model, graph, run)
    return Replay(outcome, recorder.values, recorder.gradients, recorder.inputs, watch.values)
