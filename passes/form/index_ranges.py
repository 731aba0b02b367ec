"""Ranges of the integers that a value may hold, by the ops that take it as an index."""

from __future__ import annotations

from pdcompile.ir.graph import Attr, Op, OpGraph, Ref, size_at


def upper_bound(graph: OpGraph, name: str) -> int:
    """One more than the largest integer that the ops which look the values up all accept; 2 where
    none does so directly."""
    readers = graph.values[name].consumers
    ranges = (
        index_range(graph, op, name, graph.batch_size) for op in graph.ops if op.name in readers
    )
    return max(min((found for found in ranges if found is not None), default=2), 1)


def index_range(graph: OpGraph, op: Op, value: str, b: int) -> int | None:
    """Number of rows or classes that the op distinguishes, where it takes the value as an index."""

    def size(argument: object, dim: int) -> int | None:
        if isinstance(argument, Attr):
            return graph.tensors[argument.fqn].shape[dim]
        if isinstance(argument, Ref):
            shape = graph.values[argument.name].shape
            return size_at(shape[dim], b) if len(shape) > dim else None
        return None

    word = op.target.rpartition(".")[2]
    arguments = [*op.args, *(argument for _, argument in op.kwargs)]
    others = [a for a in arguments if a != Ref(value)]
    if op.kind == "module":
        built = dict(op.constructor)
        if word in ("Embedding", "EmbeddingBag"):
            count = built.get("num_embeddings")
            return count if isinstance(count, int) else None
    if word in ("embedding", "embedding_bag") and others:
        return size(others[0], 0)
    if word in ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss") and others:
        scores = others[0]
        dims = len(graph.values[scores.name].shape) if isinstance(scores, Ref) else 0
        return size(scores, 1 if dims > 1 else 0)
    if word == "one_hot":
        count = next((a for a in others if isinstance(a, int)), -1)
        return count if count > 0 else None
    if word in ("index_select", "gather", "take_along_dim") and others:
        return size(others[0], next((a for a in arguments if type(a) is int), 0))
    if word == "getitem" and others:
        index = op.args[1] if isinstance(op.args[1], tuple) else (op.args[1],)
        plain = Ref(value) in index and None not in index and Ellipsis not in index
        return size(others[0], index.index(Ref(value))) if plain else None
    return None
