"""Removes the outputs of training that the loss does not need: they are neither made nor sent.

Caches of keys and values, hidden states and logits that a model returns beside its loss would
otherwise be sent to the last stage in every step.
"""

from __future__ import annotations

from dataclasses import replace

from pdcompile.ir.graph import Argument, Capture, OpGraph, Ref, rewritten
from pdcompile.passes.trace.merge.assemble import returned
from pdcompile.passes.trace.merge.reachable import prune, with_consumers


def loss_only(capture: Capture) -> Capture:
    """The capture whose training returns nothing but the loss and what loss_fn reads.

    Ops that only made other outputs are left out, unless they draw random numbers, write or check
    something.  Evaluation is as before, and so is training that has no loss.
    """
    graph = capture.train
    if graph.loss is None:
        return capture
    wanted = {graph.loss}
    for op in graph.ops:
        if op.region == "loss":
            wanted.update(op.inputs)
    output = rewritten(
        graph.output,
        lambda part: None if isinstance(part, Ref) and part.name not in wanted else part,
    )
    if output == graph.output:
        return capture
    return replace(capture, train=_smaller(graph, output, Ref(graph.loss)))


def _smaller(graph: OpGraph, output: Argument, loss: Ref) -> OpGraph:
    ops = prune(graph.ops, (output, loss))
    kept = {op.name for op in ops} | {entry.name for entry in graph.inputs}
    values = {name: value for name, value in graph.values.items() if name in kept}
    output_notes = returned(graph.values, graph.output, graph.loss)
    return replace(
        graph,
        ops=ops,
        values=with_consumers(ops, values),
        output=output,
        notes=tuple(note for note in graph.notes if note not in output_notes),
    )
