"""Locates a difference: the first op whose value the stages do not have, by source line.

The captured graph runs once more, op by op, and so do the stages, under `Watch`: only after a
comparison that failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pdcompile.errors import PdcompileError, VerifyError
from pdcompile.ir.graph import Op, OpGraph
from pdcompile.passes.stages.chain import Chain
from pdcompile.passes.trace.comparison.content_watch import Replay, Watch, replay
from pdcompile.passes.trace.comparison.fidelity import AsksForGradients, compare_mode
from pdcompile.passes.trace.comparison.step_values import StepValues, differing
from pdcompile.passes.trace.comparison.steps import Loss, Outputs, Step
from pdcompile.passes.verify.step_runs import stages
from pdcompile.passes.verify.verification import Difference
from pdcompile.plan import Plan


def located(
    found: Sequence[Difference], expected: StepValues, step: Step, plan: Plan, chain: Chain
) -> list[Difference]:
    """The same differences with `first` filled in, as far as it can be found.

    Args:
        expected: what eager left behind.
    """
    graph, seen = chain.graph, Watch()

    def watched() -> tuple[Outputs, Loss]:
        with seen:
            return stages(chain, step, plan)

    try:
        right, result = replay(step)
        step.values(watched)
    except PdcompileError:
        return list(found)  # nothing more can be said of it
    if any(differing(expected, result)):
        where = _of_the_capture(step)
        return [replace(one, first=where) for one in found]
    search = _Locator(graph, right, seen)
    return [replace(one, first=search.place(one)) for one in found]


def _of_the_capture(step: Step) -> str:
    """The place where the graph itself begins to differ from the model.

    Raises:
        AsksForGradients: where that is the cause.
    """
    try:
        compare_mode(step)
    except AsksForGradients:
        raise
    except VerifyError as error:
        return f"{error.where}, in the capture already: {error.message}"
    return "an op of the captured graph whose random draws are not the model's"


class _Locator:
    """Finds the first op of each difference, from a replay of the graph and a run of the stages."""

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
        """The last op whose gradient is wrong, which comes first in backward; values agree."""
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
        """The line of the generated source that computes the op, or another result instead."""
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
