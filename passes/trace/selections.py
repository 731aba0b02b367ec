"""Selections: results whose size depends on values, such as rows that a mask chooses.

Fake tensors have no values, so such a size is made up.  No other computation may depend on it: the
model is recorded with several sizes, none and all rows among them, and has to run the same
operators with the same arguments.  The dims that varied are then marked.  Where Python passes such
a number on (``torch.arange(chosen.shape[0])``), the module is opaque.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pdcompile.errors import TraceError
from pdcompile.ir.graph import Ref, walk
from pdcompile.passes.trace.tape.observer import storage_key

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.run import Recording

Policy = Callable[[int, int], int]  # (number of earlier selections, elements of the mask) -> size
_all: Policy = lambda index, elements: elements  # noqa: E731

_aten = torch.ops.aten
_CHOOSES = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default,
            _aten._index_put_impl_.default)  # fmt: skip


class Selections:
    """Runs the ATen ops that choose by values, with made-up sizes.

    Args:
        policy: the made-up size of each choice.
        place: returns the path of the running module.
    """

    def __init__(self, policy: Policy, place: Callable[[], str]) -> None:
        self._policy, self._place = policy, place
        self._sizes: dict[tuple[Any, ...], int] = {}  # mask -> elements found
        self._kept: list[Tensor] = []
        self.found: list[tuple[str, int]] = []  # (place, elements of the mask)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's result; None where it does not choose by values."""
        if func is _aten.repeat_interleave.Tensor:
            return args[0].new_empty((self._size(args[0]),))
        if func is _aten.nonzero.default:
            return self._indices(args[0])
        if func is _aten.masked_select.default:
            tensor, mask = args
            elements = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
            times = math.prod(elements) // max(mask.numel(), 1)
            return tensor.new_empty((self._size(mask) * times,))
        if func not in _CHOOSES or not any(map(_is_mask, args[1])):
            return None
        indices: list[Any] = []
        for index in args[1]:
            indices += self._indices(index).unbind(1) if _is_mask(index) else [index]
        return func(args[0], indices, *args[2:], **kwargs)

    def _indices(self, mask: Tensor) -> Tensor:
        return mask.new_empty((self._size(mask), mask.dim()), dtype=torch.int64)

    def _size(self, mask: Tensor) -> int:
        # Equal for the same part of the same memory, unless written in between.
        part = mask.storage_offset(), tuple(mask.shape), mask.stride()
        key = storage_key(mask), mask._version, *part
        if key not in self._sizes:
            self._kept.append(mask)
            self._sizes[key] = self._policy(len(self.found), mask.numel())
            self.found.append((self._place(), mask.numel()))
        return self._sizes[key]


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of the recordings of one mode at the first batch size."""

    sizes: list[int]  # expected size of each choice, which it has at every batch size
    dims: dict[str, tuple[int, ...]]  # that vary, by value
    most: int  # elements of the largest inputs with which everything was chosen

    def usual(self, index: int, elements: int) -> int:
        return self.sizes[index] if index < len(self.sizes) else elements


def with_made_up_sizes(
    run: Callable[[Policy], Recording], proofs: dict[bool, Proof], training: bool, elements: int
) -> Recording | None:
    """A recording with expected sizes; None if the computation depends on what they are.

    Args:
        run: records the model with these sizes.
        proofs: of each mode, filled in.
        elements: of the inputs.
    """
    known = proofs.get(training)
    try:
        if known is None:
            everything = run(_all)
            if not everything.chosen:
                return everything
            known = Proof(_expected(everything.chosen), {}, elements)
            found = [run(known.usual), everything, run(lambda *_: 1), run(lambda *_: 0)]
        else:  # choices of one row, or of none, are no others at another batch size
            found = [run(one) for one in (known.usual, _all)[: 1 + (elements > known.most)]]
    except TraceError:
        return None
    if not _same(found) or (dims := known.dims or _varying_dims(found)) is None:
        return None
    proofs[training] = replace(known, dims=dims, most=max(elements, known.most))
    graph = found[0].graph
    values = {n: replace(v, varies=dims.get(n, ())) for n, v in graph.values.items()}
    return replace(found[0], graph=replace(graph, values=values))


def _expected(chosen: Sequence[tuple[str, int]]) -> list[int]:
    """Average sizes, if choices of one module share their elements, as experts share tokens."""
    counts = Counter(place for place, _ in chosen)
    return [max(-(-elements // counts[place]), 2) for place, elements in chosen]


def _same(recordings: Sequence[Recording]) -> bool:
    """True if the same operators ran, with the same arguments."""
    runs = [(r.returned, [replace(op, variable="") for op in r.graph.ops]) for r in recordings]
    return all(each == runs[0] for each in runs)


def _varying_dims(recordings: Sequence[Recording]) -> dict[str, tuple[int, ...]] | None:
    """The dims that vary, by value; None where values differ in more than sizes, or where one that
    varies is returned."""
    found = {}
    for name in recordings[0].graph.values:
        versions = [each.graph.values[name] for each in recordings]
        if len({(len(v.shape), v.dtype, v.requires_grad) for v in versions}) > 1:
            return None
        sizes = enumerate(zip(*(v.shape for v in versions), strict=True))
        found[name] = tuple(dim for dim, each in sizes if len(set(each)) > 1)
    return None if any(found[ref.name] for ref in walk(recordings[0].returned, Ref)) else found
