"""Decides which outputs training steps give: nothing is sent that only an output needs.

A decoder's caches of keys and values, or the hidden states of all layers, would otherwise be sent
to the last stage in every step.  What is planned is what the loss needs; once it is known where
that runs, the last stage returns what it makes, and makes besides what it can of what it has.
Evaluation gives everything.  Where nobody names any, outputs are kept as long as they take little:
logits of a large vocabulary may be more than all else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from pdcompile.batch.omitted_output import DROPPED
from pdcompile.cluster import Device
from pdcompile.errors import some
from pdcompile.ir.graph import (
    Argument,
    LeftOut,
    Op,
    OpGraph,
    Ref,
    named_leaves,
    rewritten,
    walk,
)
from pdcompile.passes.trace.assemble import prune, with_consumers
from pdcompile.plan import Plan, Training
from pdcompile.units import format_bytes

LITTLE_BYTES = 64 * 10**6  # outputs that nobody names are kept up to so many
LITTLE = 0.02  # and up to this share of a device's memory


def outputs_bytes(graph: OpGraph, batch_size: int) -> int:
    """Bytes of what training steps return beside the loss, of the two minibatches that are held."""
    names = {ref.name for ref in walk(graph.output, Ref)} - {graph.loss}
    return 2 * sum(graph.values[name].bytes(batch_size) for name in names)


def kept_by_default(graph: OpGraph, batch_size: int, devices: Sequence[Device]) -> bool:
    """True where outputs that nobody names take little."""
    limits = (one.memory_bytes for one in devices)
    most = min((LITTLE * limit for limit in limits if limit is not None), default=LITTLE_BYTES)
    return outputs_bytes(graph, batch_size) <= min(most, LITTLE_BYTES)


def note_on_dropped(plan: Plan, graph: OpGraph) -> Iterator[str]:
    """A note on outputs of training that a plan drops, as nobody named any: what they would take.

    `graph`: the whole training graph.
    """
    training = plan.training
    size = outputs_bytes(graph, training.batch_size)
    if size and training.outputs_by_size and not training.keeps_outputs:
        beside = ", and be sent between replicas" if plan.stages[-1].replicas > 1 else ""
        yield (
            f"{DROPPED}, which would take {format_bytes(size)} on the last ranks{beside}; "
            "outputs='last' (--outputs last) keeps them, and evaluation gives its own"
        )


def planned(graph: OpGraph, training: Training) -> OpGraph:
    """The part of a training graph that is planned; `whole` of it is the graph itself.

    All of it where all outputs are sent, else what the loss needs.  What the last stage may then
    make besides takes time there: it counts as the loss's.
    """
    if not graph.training or (training.keeps_outputs and training.sends_outputs):
        return graph
    smaller = loss_only(graph)
    if smaller is graph or not training.keeps_outputs:
        return smaller
    there = {op.name for op in smaller.ops}
    costs = [op.cost for op in graph.ops if op.name not in there and op.cost is not None]
    beside = sum(cost.forward_seconds for cost in costs)

    def with_cost(op: Op) -> Op:
        if op.name != graph.loss or op.cost is None or not beside:
            return op
        seconds = op.cost.forward_seconds + beside
        return replace(op, cost=replace(op.cost, forward_seconds=seconds))

    return replace(smaller, ops=tuple(map(with_cost, smaller.ops)), whole=graph)


def loss_only(graph: OpGraph) -> OpGraph:
    """The graph that returns nothing but the loss and what loss_fn reads.

    Ops that only made other outputs are left out, unless they draw random numbers, write or check
    something.  A graph that has no loss stays as it is.
    """
    if graph.loss is None:
        return graph
    wanted = {graph.loss, *(n for op in graph.ops if op.region == "loss" for n in op.inputs)}
    output = _returning(graph.output, lambda name: name in wanted)
    if output == graph.output:
        return graph
    return _of(graph, graph.ops, output)


def given_by(
    training: Training, graph: OpGraph, stage_of: Mapping[str, int], num_stages: int
) -> OpGraph:
    """The part that training steps run and return of a `planned` graph whose ops are on stages.

    The last stage returns what it makes, and what the loss needs.  It runs ops that only outputs
    need (`aside`) where it has all that they read.
    """
    whole, last = graph.whole, num_stages - 1
    if whole is None or not training.keeps_outputs:
        return graph
    planned_ops = {op.name: op for op in graph.ops}
    made = {given.name for given in graph.inputs} | {n for n, s in stage_of.items() if s == last}
    has = made | {name for op in graph.ops if stage_of[op.name] == last for name in op.inputs}
    elsewhere = {fqn for op in graph.ops if stage_of[op.name] != last for fqn in op.used_tensors}
    written = {whole.values[name].storage for op in whole.ops for name in op.mutates}
    ops = []
    for op in whole.ops:
        if op.name in planned_ops:
            ops.append(planned_ops[op.name])
        elif (
            has.issuperset(op.inputs)
            and elsewhere.isdisjoint(op.used_tensors)
            and not any(whole.values[name].storage in written for name in op.inputs)
        ):
            ops.append(replace(op, aside=True))
            has.add(op.name)
            made.add(op.name)
    kept = {ref.name for ref in walk(graph.output, Ref)} | made
    output = _returning(whole.output, lambda name: name in kept)
    return _of(whole, tuple(ops), output)


def _returning(output: Argument, wanted: Callable[[str], bool]) -> Argument:
    """The output with the values that are wanted, and marks in place of the others."""

    def change(part: Argument) -> Argument:
        return LeftOut(part.name) if isinstance(part, Ref) and not wanted(part.name) else part

    return rewritten(output, change)


def _of(graph: OpGraph, ops: tuple[Op, ...], output: Argument) -> OpGraph:
    """The graph with this output, and those of these ops that it, the loss or an effect needs."""
    ops = prune(ops, (output, Ref(graph.loss or "")))
    return replace(graph, ops=ops, values=with_consumers(ops, graph.values), output=output)


def note_on_left_out(training: Training, given: OpGraph) -> tuple[str, ...]:
    """A note on the outputs that are left out of what is `given` of a planned graph."""
    places = [path for path, leaf in named_leaves(given.output) if isinstance(leaf, LeftOut)]
    if not places or not training.keeps_outputs:
        return ()
    return (
        f"training steps leave out {len(places)} outputs that the last stage does not make "
        f"({some(places)}), which are then not sent; outputs='everything' gives them too, as "
        "evaluation does",
    )
