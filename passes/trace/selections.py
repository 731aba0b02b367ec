"""Selections: results whose size depends on values, such as rows that a mask chooses.

Fake tensors have no values, so such a size is made up.  No other computation may depend on it: the
model is recorded with several sizes, none and all rows among them, and has to run the same
operators with the same arguments.  The dims that varied are then marked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pdcompile.ir.graph import Op, Ref, Value, walk
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.observer import locate, storage_key

Policy = Callable[[int, int], int]  # (number of earlier selections, elements of the mask) -> size
Key = tuple[Any, ...]

_aten = torch.ops.aten
_PACK = _aten._pack_padded_sequence.default
_INDEX = (_aten.index.Tensor,)
_PUT = (_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)


class Selections:
    """Runs the ATen ops that choose by values, with made-up sizes.

    Args:
        policy: the made-up size of each choice; None where only sizes in `fixed` are used.
        place: returns the path of the running module.
    """

    def __init__(self, policy: Policy | None, place: Callable[[], str]) -> None:
        self._policy = policy
        self._place = place
        self._sizes: dict[Key, int] = {}  # `mask_key` -> elements found
        self.fixed: dict[Key, int] = {}  # sizes that are the example's, by `mask_key`
        self._kept: list[Tensor] = []
        self.found: list[tuple[str, int]] = []  # (place, elements of the mask)
        self.allows: Callable[[Tensor], bool] = lambda mask: True  # choices in loops

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's result; None where it does not choose by values."""
        masks = _masks(func, args)
        if not masks or (
            self._policy is None and any(mask_key(m) not in self.fixed for m in masks)
        ):
            return None
        if func is _PACK:
            return self._packed(*args)
        if func is _aten.repeat_interleave.Tensor:
            return args[0].new_empty((self._size(args[0]),))
        if func is _aten.nonzero.default:
            return self._indices(args[0])
        if func is _aten.masked_select.default:
            tensor, mask = args
            elements = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
            times = math.prod(elements) // max(mask.numel(), 1)
            return tensor.new_empty((self._size(mask) * times,))
        indices: list[Any] = []
        for index in args[1]:
            indices += self._indices(index).unbind(1) if is_mask(index) else [index]
        return func(args[0], indices, *args[2:], **kwargs)

    def _indices(self, mask: Tensor) -> Tensor:
        return mask.new_empty((self._size(mask), mask.dim()), dtype=torch.int64)

    def _packed(self, padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """The steps of all samples one after the other, and the batch size of each step."""
        assert self._policy is not None
        found = []
        for elements in (padded.shape[0] * padded.shape[1], padded.shape[1 if batch_first else 0]):
            found.append(max(self._policy(len(self.found), elements), 1))
            self.found.append((f"{self._place()} {len(self.found)}", elements))
        steps, longest = found
        return padded.new_empty((steps, *padded.shape[2:])), lengths.new_empty((longest,))

    def _size(self, mask: Tensor) -> int:
        if mask_key(mask) in self.fixed:
            return self.fixed[mask_key(mask)]
        assert self._policy is not None
        key = mask_key(mask)
        if not self.allows(mask):
            raise refusals.error(refusals.BY_VALUE, "a choice in a loop", locate(None)[0])
        if key not in self._sizes:
            self._kept.append(mask)
            self._sizes[key] = self._policy(len(self.found), mask.numel())
            self.found.append((self._place(), mask.numel()))
        return self._sizes[key]


def average(chosen: Sequence[tuple[str, int]]) -> list[int]:
    """The average size of each choice, if the choices of one module share the elements, as experts
    share tokens."""
    counts = Counter(place for place, _ in chosen)
    return [max(-(-elements // counts[place]), 2) for place, elements in chosen]


def _masks(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors whose values determine the size of an ATen op's result."""
    if func in (_aten.nonzero.default, _aten.repeat_interleave.Tensor):
        return [args[0]]
    if func in (_PACK, _aten.masked_select.default):
        return [args[1]]
    return [index for index in args[1] if is_mask(index)] if func in _INDEX + _PUT else []


def mask_key(mask: Tensor) -> Key:
    """A key that is equal for the same part of the same memory, unless written in between."""
    part = mask.storage_offset(), tuple(mask.shape), mask.stride()
    return storage_key(mask), mask._version, *part


def is_mask(index: Any) -> bool:
    """Whether an index chooses by its values."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def same_ops(one: Sequence[Op], other: Sequence[Op]) -> bool:
    """Whether the same operators ran, with the same arguments."""
    return len(one) == len(other) and all(
        a == b or replace(a, variable="") == replace(b, variable="")
        for a, b in zip(one, other, strict=True)
    )


def varied(
    values: dict[str, Value], others: Sequence[dict[str, Value]], output: Any
) -> dict[str, Value] | None:
    """The values with `varies` filled in; None where they differ in more than the sizes of dims, or
    where one that varies is returned."""
    found = {}
    returned = {ref.name for ref in walk(output, Ref)}
    for name, value in values.items():
        versions = [each[name] for each in others if name in each]
        if len(versions) < len(others):
            return None
        kind = len(value.shape), value.dtype, value.requires_grad
        if any((len(v.shape), v.dtype, v.requires_grad) != kind for v in versions):
            return None
        dims = tuple(
            dim
            for dim, size in enumerate(value.shape)
            if any(version.shape[dim] != size for version in versions)
        )
        if dims and name in returned:
            return None
        found[name] = replace(value, varies=dims) if dims else value
    return found
