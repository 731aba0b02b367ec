"""Assembles recordings at several batch sizes into one OpGraph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdcompile.ir.graph import GRADIENT, Op, OpGraph, Ref
from pdcompile.passes.trace.batch_sizes import SizeMerge
from pdcompile.passes.trace.interceptors.checkpoints import summed_apart
from pdcompile.passes.trace.reachable import prune, with_consumers, with_gradients
from pdcompile.passes.trace.tape.run import Recording


def assemble(recordings: Sequence[Recording], sizes: tuple[int, ...], *, training: bool) -> OpGraph:
    """One graph for all recordings; its concrete numbers belong to the first size.

    Raises:
        TraceError: the recordings are different computations.
    """
    first = recordings[0]
    merge = SizeMerge(sizes)
    ops = merge.ops([recording.ops for recording in recordings])
    values = merge.values([recording.values for recording in recordings], first.ops)
    output = merge.any([recording.output for recording in recordings], "the model's output")
    loss = merge.any([recording.loss for recording in recordings], "the loss")
    tensors = merge.any([tuple(r.tensors.items()) for r in recordings], "the tensors of the model")
    ops = prune(ops, (output, None if loss is None else Ref(loss)))
    ops = ops if training else _with_autograd(ops)
    kept = {op.name for op in ops} | {entry.name for entry in first.inputs}
    values = {name: value for name, value in values.items() if name in kept}
    values = with_consumers(ops, values)
    values = with_gradients(ops, values, loss, output)
    return OpGraph(
        training=training,
        ops=ops,
        values=values,
        inputs=first.inputs,
        tensors=dict(tensors),
        output=output,
        loss=loss,
        batch_size=sizes[0],
        constants=first.constants,
        classes=first.classes,
        passed=first.passed,
        notes=(
            *_notes(ops),
            *(summed_apart(ops, first.regions, dict(tensors)) if training else ()),
        ),
        output_spec=first.output_spec,
        tensor_values=first.tensor_values,
    )


def as_evaluation(train: OpGraph) -> OpGraph:
    """The evaluation graph of a model that computes the same in both modes."""
    return replace(train, training=False, ops=_with_autograd(train.ops))


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
