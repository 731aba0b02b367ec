"""Where a difference begins: the first op whose value the stages do not have, by source line.

The captured graph runs once more, op by op, and so do the stages, under `Watch`.  Only a
comparison that failed pays for this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.eager.autocast import autocast_region
from pdcompile.eager.randomness import DrawScope, reseed, seed_of
from pdcompile.errors import PdcompileError, VerifyError
from pdcompile.ir.execution import execute
from pdcompile.ir.graph import Capture, Op, OpGraph, Ref, leaves
from pdcompile.passes.stages.chain import Chain
from pdcompile.passes.trace.comparison.draw_streams import StreamLookup, announcing, opaque_paths
from pdcompile.passes.trace.comparison.fidelity import AsksForGradients, compare
from pdcompile.passes.trace.subject import device_of
from pdcompile.passes.verify.content_watch import Watch, digest
from pdcompile.passes.verify.step_runs import (
    Loss,
    Values,
    copied_leaves,
    result_of,
    stages,
)
from pdcompile.passes.verify.verification import Difference, Outcome, differences
from pdcompile.plan import Plan


def located(
    found: Sequence[Difference],
    expected: Outcome,
    model: nn.Module,
    plan: Plan,
    chain: Chain,
    call: FlatCall,
    layout: BatchLayout,
    step: int,
) -> list[Difference]:
    """The same differences with `first` filled in, as far as it can be found.

    Args:
        expected: what eager left behind.
        call, layout: the microbatch of the step.
    """
    graph = chain.graph
    seen = Watch()

    def watched() -> tuple[Values, Loss]:
        with seen:
            return stages(chain, call, plan)

    try:
        with autocast_region(plan.training.autocast):
            right, result = replay(model, graph, call, layout, plan.training.seed, step)
        chain.begin(step)
        result_of(model, graph, watched)
    except PdcompileError:
        return list(found)  # nothing more can be said of it
    if differences(graph, expected, result, {}, 0, exact=True):
        where = _of_the_capture(model, graph, call, layout)
    else:
        search = _Locator(graph, right, seen)
        return [replace(one, first=search.place(one)) for one in found]
    return [replace(one, first=where) for one in found]


def _of_the_capture(model: nn.Module, graph: OpGraph, call: FlatCall, layout: BatchLayout) -> str:
    """Where the graph itself begins to differ from the model.

    Raises:
        AsksForGradients: where that is the cause.
    """
    try:
        compare(model, Capture(graph, graph), call, layout)
    except AsksForGradients:
        raise
    except VerifyError as error:
        return f"{error.where}, in the capture already: {error.message}"
    return "an op of the captured graph whose random draws are not the model's"


class _Locator:
    def __init__(self, graph: OpGraph, right: Replay, seen: Watch) -> None:
        self._graph, self._right, self._seen = graph, right, seen
        self._ops = right.ops
        self._order = {op.name: i for i, op in enumerate(graph.ops)}
        self._wrong = {n for n, value in right.values.items() if value not in seen.values}

    def place(self, one: Difference) -> str:
        """The first op for a difference, in words; "" when there is none to name."""
        if one.what == "gradient":
            ends = [self._graph.loss] if self._graph.loss is not None else []
            return self._forward(ends) or self._backward(one.name)
        if one.what == "buffer":
            writers = [op.name for op in self._graph.ops if one.name in op.buffers_written]
            return self._forward(writers) or self._named(self._ops.get((writers or [""])[-1]))
        return self._forward([one.name])

    def _forward(self, ends: Iterable[str]) -> str:
        """The first op with a wrong value from which only wrong values lead to one of the ends."""
        reached: set[str] = set()
        stack = [name for name in ends if name in self._ops]
        while stack:
            name = stack.pop()
            if name in reached or (name in self._right.values and name not in self._wrong):
                continue
            reached.add(name)
            stack += [i for i in self._ops[name].inputs if i in self._ops]
            stack += self._writers(self._ops[name])
        wrong = reached & self._wrong
        return self._named(self._ops[min(wrong, key=self._order.__getitem__)]) if wrong else ""

    def _writers(self, op: Op) -> list[str]:
        """Earlier ops that wrote in place into what this one reads."""
        values = self._graph.values
        storages = {values[name].storage for name in op.inputs if name in values}
        return [
            other.name
            for other in self._graph.ops[: self._order[op.name]]
            if any(values[name].storage in storages for name in other.mutates if name in values)
        ]

    def _backward(self, fqn: str) -> str:
        """All values agree: the last op whose gradient is wrong is the first on the way back."""
        expected = self._right.gradients
        wrong = [n for n in expected if expected[n] not in self._seen.gradients]
        if wrong:
            op = self._ops[max(wrong, key=self._order.__getitem__)]
            return f"the gradient of {self._named(op)}"
        for op in self._graph.ops:
            if fqn in (*op.parameters, *op.attributes):
                return f"the gradient of {self._named(op)}"
        return ""

    def _named(self, op: Op | None) -> str:
        if op is None:
            return ""
        return f"{op.name} ({op.target}) at {op.source}{self._line(op)}"

    def _line(self, op: Op) -> str:
        """Where the generated source does what the op does, or something else instead."""
        events = [event for event in self._seen.events if event.where]
        value = self._right.values.get(op.name)
        for event in events:
            if value in event.outputs:
                return f", {event.where}"
        inputs = self._right.inputs.get(op.name, frozenset())
        instead = [
            event for event in events
            if (not inputs or event.inputs & inputs)
            and not event.outputs & self._right.watch.values
        ]  # fmt: skip
        name = op.target.rpartition(".")[2]
        same = [event for event in instead if event.function == name]
        if same:
            return f", {same[0].where}"
        return (
            f"; {instead[0].where} ({instead[0].function}) is not in the model" if instead else ""
        )


@dataclass(slots=True)
class Replay:
    """What each op made, by content: of values and gradients those that a `Watch` on the same
    run saw, since others would be missed in the stages as well."""

    ops: Mapping[str, Op]
    watch: Watch = field(default_factory=Watch)
    contents: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, frozenset[str]] = field(default_factory=dict)  # of what each op read

    def ran(self, name: str, value: Any) -> None:
        """Notes what an op that has run read and made."""
        read = self.ops[name].inputs
        self.inputs[name] = frozenset(self.contents[i] for i in read if i in self.contents)
        if isinstance(value, Tensor):
            found = self.contents[name] = digest(value)
            if found in self.watch.values:
                self.values[name] = found
            if value.requires_grad and value.grad_fn is not None:
                value.register_hook(partial(self._gradient, name))  # type: ignore[no-untyped-call]

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
) -> tuple[Replay, Outcome]:
    """Runs the graph on the model's tensors; the model's buffers are as before afterwards.

    Args:
        call, layout: one microbatch.
        seed, minibatch: name the random streams.
    """
    recorder = Replay({op.name: op for op in graph.ops})
    scope = DrawScope(model, seed, minibatch, 0)
    lookup = StreamLookup(
        model, layout.size, device_of(model, call), graph.tensor_values, scope, opaque_paths(graph)
    )

    def run() -> tuple[Values, Loss]:
        given = copied_leaves(call)
        entered = {entry.name: given[entry.path] for entry in graph.inputs}
        recorder.contents.update((name, digest(tensor)) for name, tensor in entered.items())
        reseed(seed_of(seed, minibatch, 0, "", -1))
        seed_next = announcing(graph, seed, minibatch)

        def ran(name: str, value: Any) -> None:
            recorder.ran(name, value)
            seed_next()

        with recorder.watch:
            env = execute(graph, entered, lookup, watch=ran)
        loss = env[graph.loss] if graph.loss is not None else None
        if graph.training and loss is not None and loss.requires_grad:
            back = scope.backward_of if scope.draws else torch.autograd.backward
            back([loss], [None])
        names = [leaf.name for leaf in leaves(graph.output) if isinstance(leaf, Ref)]
        return {name: env[name] for name in names}, loss

    return recorder, result_of(model, graph, run)
