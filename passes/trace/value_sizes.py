"""Recordings in which sizes that depend on values (tokens of an expert) are made up.

Python may pass on such a number: ``torch.arange(chosen.shape[0])``.  An argument that differs
between the recordings, and is in each of them the size of the same dimension of the same earlier
value, becomes that size: an op ``size`` before the one that takes it.  That Python does nothing
else with the number is checked by recordings at sizes in the middle and at both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pdcompile.errors import TraceError
from pdcompile.ir.graph import Op, Ref, Value
from pdcompile.passes.trace.batch_sizes import merged
from pdcompile.passes.trace.conditional_code import left_out, renamed, with_gates
from pdcompile.passes.trace.selections import Policy, average, same_ops, varied
from pdcompile.passes.trace.tape.results import beside

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.run import Recording

Iterations = Callable[[int], Sequence[int]]  # number of a loop's iterations -> those that run
Where = tuple[str, int]  # value, dim


@dataclass(frozen=True, slots=True)
class Tried:
    """What recordings with made-up sizes showed at the first batch size, in one mode.

    sizes: the average size of each choice.
    usual: the recording with these sizes, with `varies` filled in; None until all have been made.
    skipped: ops that do not run where nothing is chosen.
    open_sizes: arguments of ops are such sizes.
    most: elements of the largest inputs with which everything was chosen.
    """

    sizes: list[int]
    usual: Recording | None = None
    skipped: frozenset[str] = frozenset()
    open_sizes: bool = False
    most: int = 0


def usual_sizes(expected: Sequence[int]) -> Policy:
    """Each choice has its expected size."""
    return lambda index, elements: expected[index] if index < len(expected) else elements


def with_sizes_that_vary(
    run: Callable[..., Recording],
    tried: dict[bool, Tried],
    training: bool,
    *,
    elements: int,
    loops: bool,
) -> Recording | None:
    """A recording with made-up sizes for those that depend on values.

    Returns None if the computation depends on these sizes.

    Args:
        run: records the model with these sizes and iterations of loops; the last time with
            `usual_sizes`.
        tried: filled in by the first call in each mode; later ones are at other batch sizes.
        elements: of the inputs.
        loops: whether there are loops through what is chosen.
    """
    known = tried.get(training)
    try:
        if known is not None and known.usual is not None and not known.open_sizes:
            again = _at_another_batch_size(run, known, larger=elements > known.most)
            if again is not None:
                tried[training] = replace(known, most=max(elements, known.most))
                return again
        everything = run(lambda index, elements: elements)
        if not everything.chosen:
            return everything
        known = tried.setdefault(training, Tried(average(everything.chosen)))
        found = _at_many_sizes(run, known.sizes, everything, loops=loops)
    except TraceError:
        return None
    if found is None or found.usual is None:
        return None
    tried[training] = replace(found, most=elements)
    return _gated(found.usual, found.skipped)


def _gated(usual: Recording, skipped: frozenset[str]) -> Recording:
    ops, values = with_gates(usual.ops, usual.values, skipped)
    return replace(usual, ops=ops, values=values)


def _at_another_batch_size(
    run: Callable[..., Recording], known: Tried, *, larger: bool
) -> Recording | None:
    """The recording, if it is the same computation; of larger inputs with everything chosen too.

    Choices of one row, or of none, are no others at another batch size.
    """
    everything = run(lambda index, elements: elements) if larger else None
    usual, first = run(usual_sizes(known.sizes)), known.usual
    if first is None or [op.name for op in usual.ops] != [op.name for op in first.ops]:
        return None
    if everything is not None and not _same(usual, everything):
        return None
    dims = {name: value.varies for name, value in first.values.items()}
    values = {n: replace(value, varies=dims.get(n, ())) for n, value in usual.values.items()}
    return _gated(replace(usual, values=values), known.skipped)


def _at_many_sizes(
    run: Callable[..., Recording], average_sizes: list[int], everything: Recording, *, loops: bool
) -> Tried | None:
    """What recordings show with everything chosen, nothing, one row, a part, and sizes between
    them; None where they are not the same computation."""
    sizes = usual_sizes(average_sizes)
    nothing = run(lambda index, elements: 0, lambda count: range(0))
    one = run(lambda index, elements: 1)
    some = None
    if not same_ops(everything.ops, one.ops):
        # Another size for every choice, so that sizes are not mistaken for each other.
        some = run(lambda index, elements: elements // 2 + 1 + index)
    parts = [run(sizes, lambda n, i=i: range(i, n, 2)) for i in (0, 1) if loops]
    usual = run(sizes)
    if some is not None:
        opened = _with_open_sizes((usual, everything, one, some, nothing))
        if opened is None:
            return None
        usual, everything, one, some, nothing = opened
    if not all(_same(usual, other) for other in (everything, one, some or one)):
        return None
    values = varied(usual.values, [everything.values, one.values], usual.returned)
    if values is None:
        return None
    skipped: set[str] = set()
    for less in (*parts, nothing):
        found = left_out(usual.ops, less.ops, values, one.values)
        if found is None:
            return None
        skipped, names, before = found
        if renamed(less.returned, names) != renamed(usual.returned, before):
            return None
    return Tried(average_sizes, replace(usual, values=values), frozenset(skipped), some is not None)


def _same(one: Recording, other: Recording) -> bool:
    return one.returned == other.returned and same_ops(one.ops, other.ops)


class _Differ(Exception):
    """Two recordings are not the same computation."""


def _with_open_sizes(recordings: Sequence[Recording]) -> list[Recording] | None:
    """The recordings with equal operators and arguments; None where these differ otherwise."""
    if len({len(each.ops) for each in recordings}) > 1:
        return None
    sizes = _OpenSizes(recordings)
    try:
        for ops in zip(*(each.ops for each in recordings), strict=True):
            sizes.enter(ops)
    except _Differ:
        return None
    names = [op.name for op in sizes.made]
    found = []
    for each in recordings:
        values = {**each.values, **sizes.new}
        given = {name: value for name, value in values.items() if name not in set(names)}
        in_order = {**given, **{name: values[name] for name in names}}
        found.append(replace(each, ops=tuple(sizes.made), values=in_order))
    return found


class _OpenSizes:
    """One list of ops for those of recordings at different sizes, with ops that ask for sizes."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._values = [each.values for each in recordings]
        self.made: list[Op] = []
        self.new: dict[str, Value] = {}  # the sizes
        self._known: dict[Where, Ref] = {}

    def enter(self, ops: Sequence[Op]) -> None:
        """Enters one op for the same op at all sizes."""
        plain = [replace(op, variable="", args=(), kwargs=()) for op in ops]
        if any(op != plain[0] for op in plain):
            raise _Differ
        parts = [(op.args, op.kwargs) for op in ops]
        args, kwargs = merged(parts, lambda leaves: self._leaf(leaves, ops[0]))
        self.made.append(replace(ops[0], args=args, kwargs=kwargs))

    def _leaf(self, parts: Sequence[Any], op: Op) -> Any:
        if all(type(part) is type(parts[0]) and part == parts[0] for part in parts):
            return parts[0]
        if any(type(part) is not int for part in parts):
            raise _Differ
        where = name, dim = self._where(tuple(parts), op)
        if where not in self._known:
            new = f"{name}_size"
            while new in self.new or new in self._values[0]:
                new += "_"
            index = len(self.new)
            self.made.append(beside(op, new, "method", "size", (Ref(name), dim), call_index=index))
            self.new[new] = Value(new, (), "container", producer=new)
            self._known[where] = Ref(new)
        return self._known[where]

    def _where(self, numbers: tuple[int, ...], op: Op) -> Where:
        """The first value that has this size in all recordings, if possible one that op reads."""
        made = [op.name for op in self.made]
        for name in (*(name for name in op.inputs if name in made), *made):
            shapes = [values[name].shape for values in self._values if name in values]
            if len(shapes) < len(numbers):
                continue
            for dim, found in enumerate(zip(*shapes, strict=False)):
                if found == numbers:
                    return name, dim
        raise _Differ
