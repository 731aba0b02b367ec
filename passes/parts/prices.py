"""Seconds of conversions between the layouts of parts, on the link that joins these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pdcompile.cluster import Level, message_seconds, ring_seconds
from pdcompile.ir.graph import Op, OpGraph
from pdcompile.ir.records import CONVERSIONS
from pdcompile.units import format_rate


def priced(graph: OpGraph, link: Level | None) -> OpGraph:
    """The graph with the seconds that conversions take on a link between so many parts as its size
    says, beside what the costs of these ops have; None: there are no parts."""
    if link is None:
        return graph
    return replace(graph, ops=tuple(_priced(graph, op, link) for op in graph.ops))


def note_on_exchange(graph: OpGraph, link: Level | None) -> Iterator[str]:
    """A note on the share of a microbatch's time in which parts exchange values."""
    if link is None:
        return
    costs = [(op.target in CONVERSIONS, op.cost) for op in graph.ops if op.cost is not None]
    took = [(there, one.forward_seconds + one.backward_seconds) for there, one in costs]
    total = sum(seconds for _, seconds in took)
    share = sum(seconds for there, seconds in took if there) / total if total else 0.0
    yield (
        f"the {link.size} parts of a stage exchange values in {share:.0%} of the time of its "
        f"operators, which is part of forward and backward (link {link.name!r}, "
        f"{format_rate(link.bytes_per_second)})"
    )


def _priced(graph: OpGraph, op: Op, link: Level) -> Op:
    if op.target not in CONVERSIONS or op.cost is None:
        return op
    name, value, parts = op.target.rpartition(".")[2], graph.values[op.name], link.size
    whole = value.bytes(op.cost.microbatch_size)
    whole *= parts if name in ("own", "scatter", "swap") else 1
    reduced = ring_seconds(link, whole, parts)
    gathered = (parts - 1) * message_seconds(link, whole / parts)
    exchanged = (parts - 1) * message_seconds(link, whole / parts**2)
    forward, backward = {
        "spread": (0.0, reduced),
        "total": (reduced, 0.0),
        "gather": (gathered, gathered if dict(op.kwargs).get("spread") else 0.0),
        "unshard": (gathered, 2 * gathered),  # before its gradient is scattered it is had again
        "own": (0.0, gathered),
        "scatter": (gathered, gathered),
        "swap": (exchanged, exchanged),
    }[name]
    forward += op.cost.forward_seconds
    backward = backward * value.needs_gradient + op.cost.backward_seconds
    return replace(op, cost=replace(op.cost, forward_seconds=forward, backward_seconds=backward))
