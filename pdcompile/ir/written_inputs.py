"""Inputs of a model that its forward writes in place."""

from __future__ import annotations

from pdcompile.ir.graph import Op, OpGraph


def written_inputs(graph: OpGraph) -> dict[str, Op]:
    """Path of each input that forward writes, or a view of it, to the first op that does."""
    paths = {graph.values[entry.name].storage: entry.path for entry in graph.inputs}
    found: dict[str, Op] = {}
    for op in graph.ops:
        for name in op.mutates:
            if path := paths.get(graph.values[name].storage):
                found.setdefault(path, op)
    return found
