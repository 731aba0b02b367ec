"""Recordings in which sizes that depend on values (tokens of an expert) are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pdcompile.errors import TraceError
from pdcompile.ir.graph import Ref
from pdcompile.passes.trace.merge.conditional_code import left_out, renamed, with_gates
from pdcompile.passes.trace.merge.open_sizes import with_open_sizes
from pdcompile.passes.trace.values.reads import Undecided
from pdcompile.passes.trace.values.selections import Policy, average, same_ops, varied

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.run import Recording

Iterations = Callable[[int], Sequence[int]]  # number of a loop's iterations -> those that run


def usual_sizes(expected: Sequence[int]) -> Policy:
    """Each choice has its expected size."""
    return lambda index, elements: expected[index] if index < len(expected) else elements


def with_sizes_that_vary(
    run: Callable[..., Recording], expected: dict[bool, list[int]], training: bool, *, loops: bool
) -> Recording | None:
    """A recording with made-up sizes for those that depend on values.

    Returns None if the computation depends on these sizes.

    Args:
        run: records the model with these sizes and iterations of loops; the last time with
            `usual_sizes`.
        expected: mode to the average sizes of results, filled in by the first call.
        loops: whether there are loops through what is chosen.
    """
    try:
        everything = run(lambda index, elements: elements)
        if not everything.chosen:
            return everything
        sizes = usual_sizes(expected.setdefault(training, average(everything.chosen)))
        nothing = run(lambda index, elements: 0, lambda count: range(0))
        one = run(lambda index, elements: 1)
        some = None
        if not same_ops(everything.ops, one.ops):
            # Another size for every choice, so that sizes are not mistaken for each other.
            some = run(lambda index, elements: elements // 2 + 1 + index)
        parts = [run(sizes, lambda n, i=i: range(i, n, 2)) for i in (0, 1) if loops]
        usual = run(sizes)
    except Undecided:
        raise
    except TraceError:
        return None
    if some is not None:
        opened = with_open_sizes((usual, everything, one, some, nothing))
        if opened is None:
            return None
        usual, everything, one, some, nothing = opened
    if not all(same_ops(usual.ops, other.ops) for other in (everything, one, some or one)):
        return None
    if any((other.output, other.loss) != (usual.output, usual.loss) for other in (everything, one)):
        return None
    roots = (usual.output, Ref(usual.loss) if usual.loss else None)
    values = varied(usual.values, [everything.values, one.values], roots)
    if values is None:
        return None
    skipped: set[str] = set()
    for less in (*parts, nothing):
        found = left_out(usual.ops, less.ops, values, one.values)
        if found is None:
            return None
        skipped, names, before = found
        end = (less.output, Ref(less.loss) if less.loss else None)
        if renamed(end, names) != renamed(roots, before):
            return None
    ops, values = with_gates(usual.ops, values, skipped)
    return replace(usual, ops=ops, values=values)
