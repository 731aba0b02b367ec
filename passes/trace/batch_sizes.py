"""SizeMerge: captures at several batch sizes merged into one graph with `Affine` sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from pdcompile.errors import TraceError
from pdcompile.ir.graph import Affine, Attr, DictOf, ListOf, Op, Slice, Value
from pdcompile.passes.stages.naming import scope_of

# Primes: sums and products of other sizes seldom look like them.
_CANDIDATES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43)


def probe_sizes(
    microbatch_size: int, tensors: Sequence[torch.Tensor], batch_dims: Sequence[int | None]
) -> tuple[int, ...]:
    """Batch sizes to capture at: the one that will run, and others until there are three >= 2.

    The others avoid the sizes of all other dims, so that equal numbers mean the same size; the
    three are not evenly spaced, so that a number that counts calls does not look like one that
    follows the batch.
    """
    taken = {
        size
        for tensor, batch_dim in zip(tensors, batch_dims, strict=True)
        for dim, size in enumerate(tensor.shape)
        if dim != batch_dim
    } | {microbatch_size}
    free = [size for size in _CANDIDATES if size not in taken] or [101, 103, 107]
    own = [microbatch_size] if microbatch_size >= 2 else []
    chosen = [*own, *free[:2]] if own else [free[0], free[1], free[-1]]
    if microbatch_size < 2:
        chosen.insert(0, microbatch_size)
    steps = {b - a for a, b in itertools.pairwise(chosen)}
    if len(steps) == 1 and len(chosen) > 2:
        chosen[-1] = free[-1]
    return tuple(chosen)


_MEASURED = ("flops", "saved_bytes")
_CONTAINERS = (tuple, ListOf, DictOf, Slice)


def merged(parts: Sequence[Any], leaf: Callable[[Sequence[Any]], Any]) -> Any:
    """One argument for several of one form; `leaf` merges the parts that hold no others."""
    first = parts[0]
    if type(first) in _CONTAINERS and len(set(map(type, parts))) == 1:
        match first:
            case tuple() if len({len(part) for part in parts}) == 1:
                return tuple(merged(items, leaf) for items in zip(*parts, strict=True))
            case ListOf() | DictOf():
                return type(first)(merged([part.items for part in parts], leaf))
            case Slice():
                ends = zip(*((p.start, p.stop, p.step) for p in parts), strict=True)
                return Slice(*(merged(items, leaf) for items in ends))
    return leaf(parts)


class DiffersBySize(TraceError):
    """The model is another computation at another batch size."""


class SizeMerge:
    """Merges captures at several batch sizes into one, number by number."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def ops(self, captures: Sequence[tuple[Op, ...]]) -> tuple[Op, ...]:
        """The merged ops; raises TraceError at the first one that differs between sizes."""
        for ops in zip(*captures, strict=False):
            first = ops[0]
            for other, size in zip(ops[1:], self.sizes[1:], strict=True):
                same = (other.kind, other.target) == (first.kind, first.target)
                if not same or other.name != first.name:
                    raise self._diverged(first, other, size)
        lengths = [len(ops) for ops in captures]
        if len(set(lengths)) > 1:
            longest = max(captures, key=len)
            raise self._diverged(longest[min(lengths)], None, self.sizes[0])
        return tuple(
            self._merged(ops, f"operator {ops[0].name} ({ops[0].target})", ops[0])
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
        """The merged argument, which `what` names in errors."""
        return merged(parts, lambda leaves: self._leaf(leaves, what, where))

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
        if (
            rest
            or scale == 0
            or any(found.at(b) != n for b, n in zip(self.sizes, parts, strict=True))
        ):
            raise self._differs(parts, what, where)
        return found

    def _merged(self, parts: Sequence[Any], what: str, maker: Op | None) -> Any:
        try:
            return self._fields(parts, what, None if maker is None else maker.source)
        except TraceError as error:
            error.module_path = None if maker is None else scope_of(maker)
            raise

    def _fields(self, parts: Sequence[Any], what: str, where: str | None) -> Any:
        changes = {}
        for entry in fields(parts[0]):
            versions = [getattr(part, entry.name) for part in parts]
            if entry.name == "variable":
                continue  # cosmetic, and not always found
            if entry.name in _MEASURED:
                changes[entry.name] = self._measured(versions)
            elif any(version is not versions[0] for version in versions):
                changes[entry.name] = self.any(versions, f"{entry.name} of {what}", where)
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
        return DiffersBySize(
            f"{what} depends on the batch size or on the call, and not linearly: {shown}",
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
        error.module_path = scope_of(op)
        return error
