"""The order in which eager sums the gradients of a value that several ops read.

Autograd runs backward in the reverse order of forward, and adds gradients one by one.  In a
pipeline later stages come first: the sums are the same to the last bit when no earlier reader is
on a later stage than a later one.  Two summands commute; from three on the order matters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise

from pdcompile.ir.graph import Op, OpGraph, Ref, walk


def summation_order(graph: OpGraph) -> tuple[tuple[str, str, str], ...]:
    """(first op, second op, value) for ops whose stages must not decrease.

    For every gradient with three summands or more these are each reader and the next one.  A
    parameter has none: each stage accumulates the gradients of its own uses (`TiedParameter`).
    """
    readers = defaultdict[str, Counter[str]](Counter)  # value -> op -> how many summands
    for op in graph.ops:
        if not op.grad_enabled or not _differentiated(op, graph):
            continue
        for what in _summands(op, graph):
            readers[what][op.name] += 1
    return tuple(
        (first, second, what)
        for what, counts in readers.items()
        if sum(counts.values()) > 2
        for first, second in pairwise(counts)
    )


def disordered(graph: OpGraph, stage_of: Mapping[str, int]) -> Iterator[tuple[str, str, str]]:
    """The pairs of `summation_order` that a placement reverses."""
    for first, second, what in summation_order(graph):
        if stage_of[first] > stage_of[second]:
            yield first, second, what


def _summands(op: Op, graph: OpGraph) -> Iterator[str]:
    for ref in walk((op.args, op.kwargs), Ref):
        value = graph.values.get(ref.name)
        if value is not None and value.is_tensor and value.needs_gradient:
            yield ref.name


def _differentiated(op: Op, graph: OpGraph) -> bool:
    """True if backward passes through this op; a container counts as differentiated."""
    made = [op.name, *op.mutates]
    values = [graph.values[name] for name in made if name in graph.values]
    return any(value.needs_gradient or not value.is_tensor for value in values)
