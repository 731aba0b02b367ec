"""Writes in place: which ones could as well have made a new tensor."""

from __future__ import annotations

from pdcompile.ir.graph import Attr, Op, OpGraph, Ref, walk
from pdcompile.passes.costs.costed_op import VIEWS, plain_name, words
from pdcompile.passes.parts.rules import ELEMENTWISE

_MAY_BE_VIEWS = VIEWS | words("contiguous to float half double bfloat16 type getitem")


def written_storages(graph: OpGraph) -> frozenset[int]:
    """Storages that are written in a way that somebody notices.

    ``x += y`` is ``x = x + y`` where nobody reads the old x, or a view of it, later.
    """
    members: dict[int, list[str]] = {}
    for value in graph.values.values():
        members.setdefault(value.storage, []).append(value.name)
    order = {op.name: i for i, op in enumerate(graph.ops)}
    shown = {ref.name for ref in walk(graph.output, Ref)} | {graph.loss}
    found = set()
    for at, op in enumerate(graph.ops):
        for name in op.mutates:
            storage = graph.values[name].storage
            older = [one for one in members[storage] if order.get(one, -1) < at]
            seen = any(
                one in shown
                or one not in order
                or any(order[reader] > at for reader in graph.values[one].consumers)
                for one in older
            )
            if seen or not _makes_anew(graph, op) or _of_the_model(graph, older, order):
                found.add(storage)
    return frozenset(found)


def _makes_anew(graph: OpGraph, op: Op) -> bool:
    """True if an op is elementwise and writes its first operand alone."""
    known = plain_name(op) in ELEMENTWISE | {"dropout"} and op.draw is None
    first = op.args[0] if op.args else None
    if not known or not isinstance(first, Ref) or op.mutates != (first.name,):
        return False
    new, old = graph.values[op.name], graph.values[first.name]
    return new.is_tensor and (new.shape, new.dtype) == (old.shape, old.dtype)


def _of_the_model(graph: OpGraph, older: list[str], order: dict[str, int]) -> bool:
    """True if what is written may be a view of a tensor of the model."""
    first = graph.ops[min((order[one] for one in older if one in order), default=0)]
    return plain_name(first) in _MAY_BE_VIEWS and bool(walk((first.args, first.kwargs), Attr))
