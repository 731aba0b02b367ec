"""Ops that make sparse gradients, which stay on the stage where they are made.

How many rows such a gradient has depends on values, so that no other rank could receive it.
"""

from __future__ import annotations

import networkx as nx  # type: ignore[import-untyped]

from pdcompile.ir.graph import Op, OpGraph
from pdcompile.passes.coarsen.groups import Groups

SPARSE = "a sparse gradient and what it belongs to"

_MODULES = ("torch.nn.Embedding", "torch.nn.EmbeddingBag")
_ASKED = {  # the argument of a function or method that asks for it: its position and name
    "torch.nn.functional.embedding": (6, "sparse"),
    "torch.nn.functional.embedding_bag": (7, "sparse"),
    "torch.embedding": (4, "sparse"),
    "torch.embedding_bag": (5, "sparse"),
    "torch.gather": (3, "sparse_grad"),
    "gather": (3, "sparse_grad"),
}


def makes_sparse(op: Op) -> bool:
    """Whether the gradient for what this op looks rows up in is sparse."""
    if not op.grad_enabled:
        return False
    if op.kind == "module":
        return op.target in _MODULES and dict(op.constructor).get("sparse") is True
    position, name = _ASKED.get(op.target, (0, ""))
    given = op.args[position] if len(op.args) > position else dict(op.kwargs).get(name)
    return bool(name) and given is True


def join_sparse(graph: OpGraph, groups: Groups, position: dict[str, int]) -> None:
    """Keep sparse gradients off the edges between stages.

    What a stage sends of a tied parameter is the sum over its own readers and later ones, which
    is dense where one of them gives a dense gradient.  So a reader that makes a sparse one stays
    with another reader, unless it comes before one that makes a dense one.
    """
    sparse = [i for i, op in enumerate(graph.ops) if makes_sparse(op)]
    if not sparse:
        return
    arrows = nx.DiGraph()
    for i, op in enumerate(graph.ops):
        arrows.add_node(i)
        arrows.add_edges_from((position[name], i) for name in op.inputs if name in position)
    for i in sparse:
        made = [position[n] for n in graph.ops[i].inputs if n in position and _returns(graph, n)]
        groups.join([i, *made], SPARSE)
    trained = (fqn for fqn, info in graph.tensors.items() if info.requires_grad)
    for fqn in trained:
        readers = [
            i
            for i, op in enumerate(graph.ops)
            if fqn in (*op.parameters, *op.attributes) and _returns(graph, op.name)
        ]
        dense = [i for i in readers if i not in sparse]
        for i in readers:
            if i in sparse and not any(nx.has_path(arrows, i, other) for other in dense):
                groups.join([i, dense[-1] if dense else readers[0]], SPARSE)


def _returns(graph: OpGraph, name: str) -> bool:
    return graph.values[name].needs_gradient
