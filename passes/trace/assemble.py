"""Assembles recordings at several batch sizes into one OpGraph, without ops that nothing uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pdcompile.ir.graph import CHECK, GRADIENT, Argument, Op, OpGraph, Ref, Value, walk
from pdcompile.passes.trace.batch_sizes import SizeMerge
from pdcompile.passes.trace.interceptors.checkpoints import summed_apart

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.run import Recording


def assemble(recordings: Sequence[Recording], sizes: tuple[int, ...], *, training: bool) -> OpGraph:
    """One graph for all recordings; its concrete numbers belong to the first size.

    Raises:
        TraceError: the recordings are different computations.
    """
    graphs, merge = [recording.graph for recording in recordings], SizeMerge(sizes)
    first = graphs[0]
    ops = merge.ops([graph.ops for graph in graphs])
    values = merge.values([graph.values for graph in graphs], first.ops)
    output = merge.any([graph.output for graph in graphs], "the model's output")
    loss = merge.any([graph.loss for graph in graphs], "the loss")
    tensors = merge.any([tuple(g.tensors.items()) for g in graphs], "the tensors of the model")
    ops = prune(ops, (output, None if loss is None else Ref(loss)))
    ops = ops if training else _with_autograd(ops)
    values = with_gradients(ops, with_consumers(ops, values), loss, output)
    regions = recordings[0].regions if training else ()
    notes = (*_notes(ops), *summed_apart(ops, regions, dict(tensors)))
    return replace(
        first, training=training, ops=ops, values=values, tensors=dict(tensors), output=output,
        loss=loss, batch_size=sizes[0], notes=notes,
    )  # fmt: skip


def _with_autograd(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """The ops of evaluation, which record autograd only where forward itself takes a gradient."""
    last = max((i for i, op in enumerate(ops) if op.target == GRADIENT), default=-1)
    return (
        *(replace(op, enables_grad=True) if op.grad_enabled else op for op in ops[: last + 1]),
        *ops[last + 1 :],
    )


def _notes(ops: tuple[Op, ...]) -> tuple[str, ...]:
    norms = [op.module_path or op.name for op in ops if op.buffers_written]
    if not norms:
        return ()
    shown = ", ".join(dict.fromkeys(norms).keys())
    return (
        f"buffers are written once a microbatch, as in gradient accumulation, not once a "
        f"minibatch: {shown}",
    )


def with_gradients(
    ops: tuple[Op, ...], values: dict[str, Value], loss: str | None, output: Argument
) -> dict[str, Value]:
    """The values with `needs_gradient` filled in.

    Without a loss every output that requires grad is a root.  A value whose storage an op
    writes depends on that op too: after ``y = x[0]; y.add_(w)`` the gradient of x reaches w.
    """

    def among(names: Iterable[str]) -> list[str]:
        return [n for n in names if values[n].requires_grad or not values[n].is_tensor]

    needed = set(among([loss] if loss is not None else [ref.name for ref in walk(output, Ref)]))
    storages = {values[name].storage for name in needed if values[name].is_tensor}
    for op in reversed(ops):
        written = {values[name].storage for name in op.mutates if values[name].is_tensor}
        if op.grad_enabled and (op.name in needed or not written.isdisjoint(storages)):
            into = among(op.inputs)
            needed.update(into)
            storages.update(values[name].storage for name in into if values[name].is_tensor)
    return {
        name: replace(value, needs_gradient=value.is_tensor and name in needed)
        for name, value in values.items()
    }


def without_gradients(graph: OpGraph) -> OpGraph:
    """The graph as inference runs it: nothing in it is trained."""
    tensors = {fqn: replace(info, requires_grad=False) for fqn, info in graph.tensors.items()}
    values = {
        name: replace(value, requires_grad=False, needs_gradient=False)
        for name, value in graph.values.items()
    }
    return replace(graph, tensors=tensors, values=values)


def with_consumers(ops: tuple[Op, ...], values: Mapping[str, Value]) -> dict[str, Value]:
    """The values that the ops make and the graph's inputs, with the names of the ops that read
    them, in order."""
    made = {None, *(op.name for op in ops)}
    readers = {name: list[str]() for name, value in values.items() if value.producer in made}
    for op in ops:
        for name in op.inputs:
            readers[name].append(op.name)
    return {name: replace(values[name], consumers=tuple(own)) for name, own in readers.items()}


def prune(ops: tuple[Op, ...], roots: Argument) -> tuple[Op, ...]:
    """Removes unused pure ops: those that draw, write or check remain."""
    used = {ref.name for ref in walk(roots, Ref)}
    kept: list[Op] = []
    for op in reversed(ops):
        impure = op.draw is not None or op.mutates or op.buffers_written or op.opaque
        if impure or op.target == CHECK or op.name in used:
            kept.append(op)
            used.update(op.inputs)
    return tuple(reversed(kept))
