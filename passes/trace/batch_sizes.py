"""SizeMerge: captures at several batch sizes merged into one graph with `Affine` sizes.

A capture is made at a few sizes near the one that will run; later minibatches may be shorter or
longer.  Python in a forward may compare the number of samples with anything (`if len(x) > 16`,
`min(len(x), 16)`, `len(x) % 7`): what it asked of sizes, and the answers, are noted, and a
recording is right for every other size at which all answers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Any

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.errors import TraceError
from pdcompile.ir.graph import Affine, Attr, Capture, DictOf, ListOf, Op, SizeRange, Slice, Value
from pdcompile.ir.records import size_at
from pdcompile.passes.trace.interceptors.size_reads import computed
from pdcompile.warn import warn

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.run import Recording

MANY_OPS = 2_000  # above, a recording takes seconds, and as few as possible are made
_MEASURED = ("flops", "saved_bytes")


@cache
def _compared(kind: type[Op | Value]) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """(names of the fields that have to be alike, a function that returns them); the variable is
    cosmetic, and not always found."""
    names = tuple(each.name for each in fields(kind) if each.name != "variable")
    return names, attrgetter(*names)


class DiffersBySize(TraceError):
    """The model is another computation at another batch size."""


class SizeMerge:
    """Merges captures at several batch sizes into one, number by number."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def ops(self, captures: Sequence[tuple[Op, ...]]) -> tuple[Op, ...]:
        """The merged ops; raises TraceError at the first one that differs between sizes."""
        for first, *others in zip(*captures, strict=False):
            for other, size in zip(others, self.sizes[1:], strict=True):
                if (other.kind, other.target, other.name) != (first.kind, first.target, first.name):
                    raise self._diverged(first, other, size)
        if beyond := max(captures, key=len)[min(map(len, captures)) :]:
            raise self._diverged(beyond[0], None, self.sizes[0])
        return tuple(
            self._merged(_whole(ops), f"operator {ops[0].name} ({ops[0].target})", ops[0])
            for ops in zip(*captures, strict=True)
        )

    def values(
        self, captures: Sequence[dict[str, Value]], ops: Sequence[Op] = ()
    ) -> dict[str, Value]:
        """The merged values; raises TraceError, with the place of the maker among `ops`."""
        makers = {op.name: op for op in ops}
        found = {}
        for name in captures[0]:
            versions = [values[name] for values in captures]
            found[name] = self._merged(versions, f"the result {name!r}", makers.get(name))
        return found

    def any(self, parts: Sequence[Any], what: str, where: str | None = None) -> Any:
        """One argument for several of one form, which `what` names in errors."""
        first, kinds = parts[0], set(map(type, parts))
        match first:
            case tuple() if len(kinds) == 1 and len({len(part) for part in parts}) == 1:
                return tuple(self.any(items, what, where) for items in zip(*parts, strict=True))
            case ListOf() | DictOf() if len(kinds) == 1:
                return type(first)(self.any([part.items for part in parts], what, where))
            case Slice() if len(kinds) == 1:
                ends = zip(*((p.start, p.stop, p.step) for p in parts), strict=True)
                return Slice(*(self.any(items, what, where) for items in ends))
        return self._leaf(parts, what, where)

    def _leaf(self, parts: Sequence[Any], what: str, where: str | None) -> Any:
        first, kinds = parts[0], set(map(type, parts))
        if kinds == {int}:
            return self._number(parts, what, where)
        if len(kinds) == 1 and all(
            part == first or (part != part and first != first) for part in parts[1:]
        ):
            return first
        raise self._differs(parts, what, where)

    def _number(self, parts: Sequence[int], what: str, where: str | None) -> Any:
        if len(set(parts)) == 1:
            return parts[0]
        (b0, n0), (b1, n1) = list(zip(self.sizes, parts, strict=True))[:2]
        if b0 == b1:
            raise self._differs(parts, what, where)
        scale, rest = divmod(n1 - n0, b1 - b0)
        found = Affine(scale, n0 - scale * b0)
        fits = all(found.at(b) == n for b, n in zip(self.sizes, parts, strict=True))
        if rest or scale == 0 or not fits:
            raise self._differs(parts, what, where)
        return found

    def _merged(self, parts: Sequence[Any], what: str, maker: Op | None) -> Any:
        changes: dict[str, Any] = {}
        where = None if maker is None else maker.source
        names, values = _compared(parts[0].__class__)
        for name, versions in zip(names, zip(*map(values, parts), strict=True), strict=True):
            first = versions[0]
            if type(first) in (str, NoneType, bool) and versions.count(first) == len(parts):
                continue
            if name in _MEASURED:
                changes[name] = self._measured(versions)
            elif len(set(map(id, versions))) > 1:
                try:
                    if name == "storage" and len(set(versions)) > 1:
                        raise _apart(what, where)
                    changes[name] = self.any(versions, f"{name} of {what}", where)
                except TraceError as error:
                    error.module_path = None if maker is None else maker.scope
                    raise
        return replace(parts[0], **changes) if changes else parts[0]

    def _measured(self, parts: Sequence[int | None]) -> Any:
        """A count of real runs, which need not be linear in the batch."""
        numbers = [part for part in parts if part is not None]
        if len(numbers) < len(parts) or len(set(numbers)) == 1:
            return parts[0]
        try:
            return self._number(numbers, "", None)
        except TraceError:
            ratios = [number / size for number, size in zip(numbers, self.sizes, strict=True)]
            return Affine(max(round(max(ratios)), 1))

    def _differs(self, parts: Sequence[Any], what: str, where: str | None) -> TraceError:
        if all(isinstance(part, Attr) for part in parts):
            return TraceError(
                f"{what}: every call makes a new tensor in a way that capture cannot see",
                where=where,
                remedy="make it with torch functions, or once in __init__ with register_buffer",
            )
        shown = ", ".join(
            f"{part!r} at {size}" for part, size in zip(parts, self.sizes, strict=True)
        )
        how = "as a float" if set(map(type, parts)) == {float} else "and not linearly"
        return DiffersBySize(
            f"{what} depends on the batch size or on the call, {how}: {shown}",
            where=where,
            remedy="compute it from tensors, or make it independent of the number of samples",
        )

    def _diverged(self, op: Op, other: Op | None, size: int) -> TraceError:
        instead = f" where a batch of {size} runs {other.target}" if other is not None else ""
        error = DiffersBySize(
            f"forward runs other operators for other batch sizes: {op.target}{instead}",
            where=op.source,
            remedy="decide in forward by something else than the number of samples, "
            "and keep loops over samples out of it",
        )
        error.module_path = op.scope
        return error


def _apart(what: str, where: str | None) -> DiffersBySize:
    """The error for a value whose place in memory, a number that counts nothing, differs."""
    return DiffersBySize(
        f"{what} has memory of its own for some batch sizes or calls, and that of another value "
        "for others",
        where=where,
        remedy="call clone() where contiguous() or reshape() copies for some sizes only",
    )


def _whole(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """One op at several sizes, where it divides with floats that depend on them and count something
    (`total / (0.0 + len(x))`) with ints instead: quotients have the same bits and dtype."""
    if ops[0].target != "operator.truediv" or all(op.args == ops[0].args for op in ops):
        return ops
    return tuple(
        replace(op, args=tuple(int(a) if isinstance(a, float) and a.is_integer() else a
                               for a in op.args))
        for op in ops
    )  # fmt: skip


def few_sizes(microbatch_size: int) -> tuple[int, ...]:
    """The first size and an upper end of the range, whose lower end is to be like them.

    The upper end is a multiple of small numbers and the lower one is of none, so that a forward in
    which it matters whether one of them divides the number of samples differs there.  A single
    sample is itself the lower end, and needs a third size.
    """
    end = _upper_ends(microbatch_size)[0]
    return (microbatch_size, end) if microbatch_size > 1 else (1, 60, end)


def usual_sizes(microbatch_size: int) -> tuple[int, ...]:
    """The first size and small ones, three of them 2 or more, at which most models run.  Primes, so
    that sums and products of other sizes seldom look like them; and not evenly spaced, so that a
    number that counts calls does not look like one that follows the batch."""
    others = [size for size in (2, 3, 7) if size != microbatch_size]
    return (microbatch_size, *others[: 2 + (microbatch_size < 2)])


def _upper_ends(microbatch_size: int) -> tuple[int, ...]:
    """Upper ends of a range, the largest first."""
    ends = {factor * microbatch_size + 1 for factor in (2, 4, 16)}
    many = -(-16 * microbatch_size // 120) * 120
    return tuple(sorted(ends | ({many} if microbatch_size > 1 else set()), reverse=True))


def size_range(
    record: Callable[[int], Recording], recordings: Sequence[Recording], sizes: tuple[int, ...]
) -> SizeRange:
    """The range of sizes around `sizes`, where `recordings` were made.

    Args:
        record: makes a further recording, at a size that has not been tried.
    """
    below, above = "", ""
    for smallest in sorted({1, 2, min(sizes)}):
        odd = (3,) if smallest == 2 and not any(size % 2 for size in sizes) else ()
        tried = (_misfit(record, recordings, sizes, size) for size in (smallest, *odd))
        if smallest in sizes or not (reason := next(filter(None, tried), "")):
            break
        below = reason
    for largest in _upper_ends(sizes[0]):
        if largest <= max(sizes):
            break
        if not (reason := _misfit(record, recordings, sizes, largest)):
            return SizeRange(smallest, largest, below, above)
        above = reason
    return SizeRange(smallest, max(sizes), below, above)


ROOM = 8  # further sizes to record at


def narrowed(
    record: Callable[[int], Recording], sizes: tuple[int, ...], found: SizeRange
) -> SizeRange:
    """The range, where recordings of `sizes` and of its ends are alike, without sizes at which the
    model's Python goes a way of its own.

    Tried are the sizes at which none of the recordings has the answers that Python would get.
    What a table by size holds is not known: small models are tried at the first few sizes.
    """
    known = {b: record(b) for b in (*sizes, found.smallest, found.largest or sizes[0])}
    first, graphs = [*known.values()], [one.graph for one in known.values()]
    merge = SizeMerge(tuple(known))

    def leaf(made: Any) -> Any:
        if type(made) is not tuple:
            return made
        return merge.any([graph.values[made[0]].shape[made[1]] for graph in graphs], made[0])

    def answers(one: Recording) -> list[tuple[Any, Any]]:
        tables = len(one.graph.ops) * ROOM <= MANY_OPS
        asked = {computed(made, leaf): said for made, said in one.findings.answers.items()}
        kept = [pair for pair in asked.items() if type(pair[0]) is tuple]
        return [pair for pair in kept if tables or pair[0][0] is not int.__hash__]

    paths = [answers(one) for one in first]
    for b in range(found.smallest, (found.largest or 0) + 1):
        at = partial(size_at, b=b)
        if any(all(computed(made, at) == said for made, said in path) for path in paths):
            continue
        if len(paths) == len(first) + ROOM:
            break
        if not (reason := _misfit(record, first, merge.sizes, b)):
            paths.append(answers(record(b)))
        elif b < sizes[0]:
            found = replace(found, smallest=b + 1, below=reason)
        else:
            return replace(found, largest=b - 1, above=reason)
    return found


def fails_at(size: int, error: TraceError) -> DiffersBySize:
    """The error of a model that runs with some number of samples and raises with `size`."""
    return DiffersBySize(
        f"with {counted(size)} {error.message}",
        where=error.where,
        remedy="take the number of samples from the inputs (x.shape[0]) where forward needs it",
    )


class OnlyWhole(TraceError):
    """A model runs on the minibatch, and raises on a microbatch of it."""


def fails_as_microbatch(
    size: int, flat: FlatCall, layout: BatchLayout, error: TraceError
) -> OnlyWhole:
    """The error of a model that runs on the minibatch and raises on a microbatch of it."""
    split = {path: dim for path, dim in layout.dims.items() if dim is not None}
    shapes = {path: tuple(flat.leaves[path].shape) for path in split}
    elsewhere = {
        p: d for p in split for d, n in enumerate(shapes[p]) if n == layout.size and d != split[p]
    }
    inputs = [p for p in elsewhere if p not in flat.spec.target.paths]
    found = inputs or [*(elsewhere or split)][-1:]
    path, dim = found[-1], elsewhere.get(found[0]) if len(found) == 1 else None
    which = " or of ".join(f"{one} {shapes[one]}" for one in found)
    told = (
        f"where dimension {split[path]} of {which} does not count samples, say so: "
        f"batch_dims={{{flat.root(path)!r}: {dim}}}"
    )
    others = (
        "microbatches=1, or a number of microbatches that leaves the samples that it needs; or let "
        "forward take the number of samples from its inputs (x.shape[0])"
    )
    return OnlyWhole(
        f"with the {counted(size)} of a microbatch {error.message}; with the minibatch's "
        f"{layout.size} it does not",
        where=error.where,
        remedy=f"{told}; or {others}" if elsewhere else f"{others}; or, {told}",
    )


def counted(samples: int) -> str:
    return f"{samples} samples" if samples > 1 else "one sample"


def alone(size: int, error: TraceError) -> SizeRange:
    """The range of a model that is another computation at every other size.

    It loops through its samples, or depends on their number by more than limits; or
    `x.expand(len(x), -1)` is skipped for one sample, and large models run with one.
    """
    return SizeRange(size, size, below=_with_place(error), above=_with_place(error))


def warn_of_one_size(found: Capture) -> None:
    """Warns where every microbatch has to have the size of the first one."""
    graph = next((g for g in (found.train, found.eval) if g.sizes.is_one), None)
    if graph is not None:
        size = graph.batch_size
        larger = "; with fewer, larger microbatches that may not be so" if size == 1 else ""
        warn(
            f"every microbatch has to be of {counted(size)}, and minibatches of another size are "
            f"refused{larger}: {graph.sizes.above}"
        )


def _misfit(
    record: Callable[[int], Recording],
    recordings: Sequence[Recording],
    sizes: tuple[int, ...],
    size: int,
) -> str:
    """The first difference of the model at this size; "" when it is the same computation."""
    merge = SizeMerge((*sizes, size))
    try:
        graphs = [recording.graph for recording in (*recordings, record(size))]
        merge.ops([graph.ops for graph in graphs])
        merge.any([graph.output for graph in graphs], "the model's output")
        # Strides and storages are left out: a dimension of one sample is contiguous either way.
        shapes = [tuple(value.shape for value in one.values.values()) for one in graphs]
        merge.any(shapes, "the shape of a result")
    except TraceError as error:
        return _with_place(error)
    return ""


def _with_place(error: TraceError) -> str:
    return f"{error.message} ({error.where})" if error.where else error.message
