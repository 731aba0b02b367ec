"""A pass as docs/architecture.md adds one: casts that change nothing are left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pdcompile.ir.graph import Capture, OpGraph, Ref, rewritten
from pdcompile.passes.trace.assemble import with_consumers

CASTS = {"float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16"}


def without_casts(capture: Capture) -> Capture:
    """Removes casts to the dtype that a value has: such a call returns the value itself."""
    return replace(capture, train=_without(capture.train), eval=_without(capture.eval))


def _without(graph: OpGraph) -> OpGraph:
    same: dict[str, str] = {}  # a cast's result -> what it was made of
    for op in graph.ops:
        if op.kind == "method" and op.target in CASTS:
            (value,) = op.inputs
            if graph.values[value].dtype == CASTS[op.target]:
                same[op.name] = same.get(value, value)

    def change(part: Any) -> Any:
        return Ref(same[part.name]) if isinstance(part, Ref) and part.name in same else part

    ops = tuple(
        replace(
            op,
            args=rewritten(op.args, change),
            kwargs=rewritten(op.kwargs, change),
            mutates=tuple(same.get(name, name) for name in op.mutates),
        )
        for op in graph.ops
        if op.name not in same
    )
    return replace(
        graph,
        ops=ops,
        values=with_consumers(ops, graph.values),
        output=rewritten(graph.output, change),
        loss=None if graph.loss is None else same.get(graph.loss, graph.loss),
    )
