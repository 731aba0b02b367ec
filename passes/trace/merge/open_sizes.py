"""Sizes that depend on values as arguments: ``torch.arange(chosen.shape[0])``.

Python gets a made-up number for such a size and passes it on.  An argument that differs between
the recordings with different sizes, and is in each of them the size of the same dimension of the
same earlier value, becomes that size: an op ``size`` before the one that takes it.  That Python
does nothing else with the number is checked by recordings at sizes in the middle and at both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pdcompile.ir.graph import Op, Ref, Value
from pdcompile.passes.trace.merge.batch_sizes import merged

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.run import Recording

Where = tuple[str, int]  # value, dim


class _Differ(Exception):
    """Two recordings are not the same computation."""


def with_open_sizes(recordings: Sequence[Recording]) -> list[Recording] | None:
    """The recordings with equal operators and arguments; None where these differ otherwise."""
    if len({len(each.ops) for each in recordings}) > 1:
        return None
    sizes = _Sizes(recordings)
    made: list[Op] = []
    try:
        for ops in zip(*(each.ops for each in recordings), strict=True):
            before = len(sizes.ops)
            op = sizes.one(ops)
            made += [*sizes.ops[before:], op]
            sizes.known.append(op.name)
    except _Differ:
        return None
    new = {op.name: Value(op.name, (), "container", producer=op.name) for op in sizes.ops}
    return [
        replace(each, ops=tuple(made), values=_in_order(each.values, new, made))
        for each in recordings
    ]


class _Sizes:
    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._values = [each.values for each in recordings]
        self._inputs = [entry.name for entry in recordings[0].inputs]
        self.known: list[str] = []  # results of the ops so far
        self.ops: list[Op] = []  # the new ``size`` ops
        self._made: dict[Where, Ref] = {}

    def one(self, ops: Sequence[Op]) -> Op:
        """One op for the same op at all sizes."""
        first = ops[0]
        plain = [replace(op, variable="", args=(), kwargs=()) for op in ops]
        if any(op != plain[0] for op in plain):
            raise _Differ
        if all((op.args, op.kwargs) == (first.args, first.kwargs) for op in ops):
            return first
        args = self._argument([op.args for op in ops], first)
        kwargs = self._argument([op.kwargs for op in ops], first)
        return replace(first, args=args, kwargs=kwargs)

    def _argument(self, parts: Sequence[Any], op: Op) -> Any:
        def leaf(parts: Sequence[Any]) -> Any:
            if all(type(part) is type(parts[0]) and part == parts[0] for part in parts):
                return parts[0]
            if any(type(part) is not int for part in parts):
                raise _Differ
            return self._size(parts, op)

        return merged(parts, leaf)

    def _size(self, numbers: Sequence[int], op: Op) -> Ref:
        where = self._where(tuple(numbers), op)
        if where not in self._made:
            name, dim = where
            taken = {*self.known, *self._values[0], *(op.name for op in self.ops)}
            new = f"{name}_size"
            while new in taken:
                new += "_"
            self.ops.append(replace(
                op, name=new, kind="method", target="size", args=(Ref(name), dim), kwargs=(),
                variable="", parameters=(), buffers_read=(), buffers_written=(), mutates=(),
                draw=None, constructor=(), call_index=len(self.ops), returns="", flops=None,
                saved_bytes=None,
            ))  # fmt: skip
            self._made[where] = Ref(new)
        return self._made[where]

    def _where(self, numbers: tuple[int, ...], op: Op) -> Where:
        """The first value that has this size in all recordings, if possible one that op reads."""
        read = [name for name in op.inputs if name in self.known]
        for name in (*read, *self.known):
            shapes = [values[name].shape for values in self._values if name in values]
            if len(shapes) < len(numbers):
                continue
            for dim, found in enumerate(zip(*shapes, strict=False)):
                if found == numbers:
                    return name, dim
        raise _Differ


def _in_order(
    values: dict[str, Value], new: dict[str, Value], ops: Sequence[Op]
) -> dict[str, Value]:
    """The values and those of new ops, in the order of the ops."""
    made = {op.name for op in ops}
    found = {name: value for name, value in values.items() if name not in made}
    found |= {op.name: new[op.name] if op.name in new else values[op.name] for op in ops}
    return found
