"""Where a graph first differs from the one that a plan was made of, for people.

A plan holds no graph, but names, places and bytes of its ops and what crosses between stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pdcompile.ir.graph import Op, OpGraph
from pdcompile.plan.schema import Plan
from pdcompile.units import format_bytes

if TYPE_CHECKING:
    from torch import nn


def made_of(plan: Plan) -> str:
    """The model of a plan: its class, and the target as the command line had it."""
    target = f" of {plan.command[0]}" if plan.command else ""
    return f"{plan.model or 'a model'}{target}"


def recorded_reduction(plan: Plan) -> str:
    """The function that the command which made a plan named as the loss reduction; "": none."""
    name = "--loss-reduction="
    return next((word.removeprefix(name) for word in plan.command if word.startswith(name)), "")


def absent_weight(plan: Plan, model: nn.Module) -> tuple[str, int] | None:
    """A parameter of the plan that the model does not have, and its stage; known before capture."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    held = ((fqn, stage.index) for stage in plan.stages for fqn in stage.parameters)
    return next(((fqn, stage) for fqn, stage in held if fqn not in known), None)


def first_difference(plan: Plan, graph: OpGraph) -> str:
    """The first thing of the graph that is not as the plan has it, with the line of the model."""
    return next(_differences(plan, graph), "") or (
        "the fingerprint of the graph differs, though ops, weights and what stages send are alike: "
        f"of one of the {len(graph.ops)} ops an argument is another, or a shape inside a stage"
    )


def _differences(plan: Plan, graph: OpGraph) -> Iterator[str]:
    places = {name: stage.index for stage in plan.stages for name in stage.ops}
    ops = {op.name: op for op in graph.ops}
    more = [_op(op) for op in graph.ops if op.name not in places]
    less = [f"{name!r} on stage {places[name]}" for name in places if name not in ops]
    if more or less:
        first = [f"the first that only this model has is {one}" for one in more[:1]]
        first += [f"the first that only the plan has is {one}" for one in less[:1]]
        yield f"{len(places)} ops in the plan, {len(ops)} in this model; {'; '.join(first)}"
        return
    for stage in plan.stages:
        used = {fqn for name in stage.ops for fqn in ops[name].used_tensors}
        held = {fqn for fqn in used if graph.tensors[fqn].kind == "parameter"}
        for fqn in sorted(held.symmetric_difference(stage.parameters)):
            only = "this model" if fqn in held else "the plan"
            yield f"the parameter {fqn!r} on stage {stage.index} is only in {only}"
    yield from _other_weights(plan, graph, ops)
    for edge in plan.edges:
        value = graph.values[edge.value]
        shape = tuple(str(size) for size in value.shape)
        if edge.shape and (edge.shape, edge.dtype) != (shape, value.dtype):
            yield (
                f"what {_op(ops[edge.value])} gives is {edge.dtype} ({', '.join(edge.shape)}) in "
                f"the plan, {value.dtype} ({', '.join(shape)}) in this model"
            )


def _other_weights(plan: Plan, graph: OpGraph, ops: dict[str, Op]) -> Iterator[str]:
    """Ops that hold other bytes; those of a tensor that several items hold are a list of its own,
    and so left out."""
    if plan.problem is None:
        return
    shared = {one.fqn for one in plan.problem.shared}
    for item in plan.problem.items:
        held = {fqn for name in item.ops for fqn in ops[name].used_tensors} - shared
        found = sum(graph.tensors[fqn].bytes for fqn in held)
        if found != item.parameter_bytes:
            holder = next((ops[name] for name in item.ops if ops[name].used_tensors), None)
            yield (
                f"the weights of {_op(holder or ops[item.ops[0]])} are "
                f"{format_bytes(item.parameter_bytes)} in the plan, {format_bytes(found)} here"
            )


def _op(op: Op) -> str:
    module = f" in {op.module_path!r}" if op.module_path else ""
    return f"{op.name!r} ({op.target}{module}, {op.source})"
