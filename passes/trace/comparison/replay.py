"""Replay: a graph run op by op, to find the first op that differs from another run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from pdcompile.ir.graph import Op
from pdcompile.passes.trace.comparison.content_watch import Watch, digest
from pdcompile.passes.trace.comparison.step_values import StepValues
from pdcompile.passes.trace.comparison.steps import Step


@dataclass(slots=True)
class Replay:
    """The contents of each op's value and gradient, where a `Watch` on the same run saw them.

    Values that it did not see would not be seen in the run to compare with either.
    """

    ops: Mapping[str, Op]
    watch: Watch = field(default_factory=Watch)
    contents: dict[str, str] = field(default_factory=dict)  # of inputs and all ops
    values: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, frozenset[str]] = field(default_factory=dict)  # read by each op

    def ran(self, name: str, value: Any) -> None:
        """Notes what an op that has run read and made, or the value of an input."""
        op = self.ops.get(name)
        if op is not None:
            read = [self.contents[i] for i in op.inputs if i in self.contents]
            self.inputs[name] = frozenset(read)
        if isinstance(value, Tensor):
            found = self.contents[name] = digest(value)
            if op is not None and found in self.watch.values:
                self.values[name] = found
            if value.requires_grad and value.grad_fn is not None:
                value.register_hook(partial(self._gradient, name))  # type: ignore[no-untyped-call]

    def _gradient(self, name: str, gradient: Tensor) -> None:
        found = digest(gradient)
        if found in self.watch.gradients:
            self.gradients[name] = found


def replay(step: Step) -> tuple[Replay, StepValues]:
    """Runs the graph of a step under a `Watch`; the model's buffers are as before afterwards."""
    recorder = Replay({op.name: op for op in step.graph.ops})

    def run() -> Any:
        with recorder.watch:
            return step.captured(recorder.ran)

    return recorder, step.values(run)


def first_difference(step: Step, gradients: bool | None) -> Op | None:
    """The first op whose value the model's own run does not have; None where there is none.

    With `gradients` (None: as the graph's mode has it) autograd records the model's run.
    """
    seen = Watch()

    def run() -> Any:
        with seen:
            return step.eager()

    step.values(run, gradients=gradients)
    known = {"", *seen.values}.union(*(event.inputs for event in seen.events))
    recorder, _ = replay(step)
    for op in step.graph.ops:
        # What a torch.func transform computes inside cannot be seen in the model's run.
        plain = not op.target.startswith("torch.ops.aten.")
        if plain and recorder.values.get(op.name, "") not in known:
            return op
    return None
