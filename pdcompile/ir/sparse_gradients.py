"""Sparse gradients: those of tables that are looked up with sparse=True, and no more."""

from __future__ import annotations

from pdcompile.ir.graph import Op, OpGraph

_LOOKUPS = ("torch.nn.Embedding", "torch.nn.EmbeddingBag")
_ASKED = {  # the argument of a function or method that asks for it: its position and name
    "torch.nn.functional.embedding": (6, "sparse"),
    "torch.nn.functional.embedding_bag": (7, "sparse"),
    "torch.embedding": (4, "sparse"),
    "torch.embedding_bag": (5, "sparse"),
    "torch.gather": (3, "sparse_grad"),
    "gather": (3, "sparse_grad"),
}


def makes_sparse(op: Op) -> bool:
    """True if the gradient for what this op looks rows up in is sparse."""
    if not op.grad_enabled:
        return False
    if op.kind == "module":
        return op.target in _LOOKUPS and dict(op.constructor).get("sparse") is True
    position, name = _ASKED.get(op.target, (0, ""))
    given = op.args[position] if len(op.args) > position else dict(op.kwargs).get(name)
    return bool(name) and given is True


def trained_readers(graph: OpGraph) -> dict[str, list[int]]:
    """The ops, by index, that give each trainable parameter a gradient."""
    found: dict[str, list[int]] = {f: [] for f, i in graph.tensors.items() if i.requires_grad}
    for i, op in enumerate(graph.ops):
        if graph.values[op.name].needs_gradient:
            for fqn in found.keys() & {*op.parameters, *op.attributes}:
                found[fqn].append(i)
    return found


def sparse_lookups(graph: OpGraph) -> dict[str, list[Op]]:
    """The parameters whose gradient is sparse, with the ops that read them."""
    found = {f: [graph.ops[i] for i in readers] for f, readers in trained_readers(graph).items()}
    return {f: ops for f, ops in found.items() if ops and all(map(makes_sparse, ops))}
