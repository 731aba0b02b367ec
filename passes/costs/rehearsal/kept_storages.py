"""Finds what autograd keeps of a whole graph: which storages, because of which op.

Each op runs on tensors without memory, with torch's own autograd, once for all ops that do the
same: the equal layers of a deep model cost what one of them costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdcompile.ir.graph import Op, OpGraph, fingerprint
from pdcompile.passes.costs.costed_op import CostedOp, GraphIndex, structural_key
from pdcompile.passes.costs.rehearsal.live_storages import saved_storages
from pdcompile.passes.costs.rehearsal.rehearse import (
    cast_as_recorded,
    from_outside,
    outside,
    staged,
    storages_in,
)
from pdcompile.passes.costs.stage_ports import Ports
from pdcompile.passes.costs.workspaces import HOST, Kernels
from pdcompile.passes.form.lifetimes import Step, operands
from pdcompile.releases.torch_internals import FakeTensorMode, pytree, quiet_shape_errors

Storages = Mapping[int, int]  # a number for each storage -> its bytes


@dataclass(frozen=True, slots=True)
class KeptStorages:
    """Storages that autograd keeps of one microbatch.

    `by_op`: the storages that the backward of each op needs; `of_value`: those that each value
    lies in.  Parameters, the caller's inputs and views of these are in neither.
    """

    by_op: Mapping[str, Storages]
    of_value: Mapping[str, Storages]

    def new(self) -> dict[str, int]:
        """The bytes that are kept because of each op and of no earlier one."""
        seen: set[int] = set()
        return {name: newly(storages, seen) for name, storages in self.by_op.items()}


def newly(storages: Storages, seen: set[int]) -> int:
    """Bytes of the storages that are not in `seen`, which grows by them."""
    new = storages.keys() - seen
    seen |= new
    return sum(storages[key] for key in new)


_CACHED_GRAPHS = 8
#: by graph, microbatch size and kernels
_cache: dict[tuple[str, int, Kernels, bool], KeptStorages] = {}


def kept_storages(graph: OpGraph, b: int, kernels: Kernels = HOST) -> KeptStorages:
    """Finds what autograd keeps of the graph at microbatch size b.

    An op that cannot run keeps what `guessed` says.
    """
    key = fingerprint(graph), b, kernels, bool(torch.backends.mkldnn.enabled)  # its kernels differ
    if key not in _cache:
        if len(_cache) >= _CACHED_GRAPHS:
            del _cache[next(iter(_cache))]
        with quiet_shape_errors(), cast_as_recorded(graph.ops):
            _cache[key] = _Walk(GraphIndex.of(graph, b), kernels).kept()
    return _cache[key]


class _Layout(NamedTuple):
    """A tensor and the number of its storage; storages with negative numbers are not counted."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    storage: int
    scalar: float | None = None  # its value, where fake tensors know it: sizes may depend on it

    @property
    def end(self) -> int:
        """Bytes from the start of the storage to the end of the tensor."""
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else (self.offset + last + 1) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Nested:
    """A value of the graph, with layouts in the place of tensors."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @staticmethod
    def of(value: Any, number: Callable[[torch.UntypedStorage], int]) -> _Nested:
        def layout(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            known = getattr(leaf, "constant", None)
            return _Layout(
                tuple(leaf.shape),
                leaf.stride(),
                int(leaf.storage_offset()),
                leaf.dtype,
                leaf.requires_grad,
                number(leaf.untyped_storage()),
                leaf.item() if leaf.ndim == 0 and known is not None else None,
            )

        leaves, spec = pytree.tree_flatten(value)
        return _Nested(tuple(map(layout, leaves)), spec)

    @property
    def layouts(self) -> list[_Layout]:
        return [leaf for leaf in self.leaves if type(leaf) is _Layout]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for values that ops cannot tell apart."""
        shown = (leaf if type(leaf) is _Layout else repr(leaf) for leaf in self.leaves)
        return (str(self.spec), *shown)

    def mapped(self, change: Callable[[_Layout], _Layout]) -> _Nested:
        leaves = (change(leaf) if type(leaf) is _Layout else leaf for leaf in self.leaves)
        return _Nested(tuple(leaves), self.spec)

    def renumbered(self, numbers: Mapping[int, int]) -> _Nested:
        return self.mapped(lambda one: one._replace(storage=numbers[one.storage]))


@dataclass(frozen=True, slots=True)
class _Effect:
    """The result of an op, and the storages that its backward needs.

    Storages are numbered: those that it reads from 0, then new ones, whose sizes are `new_bytes`;
    those of parameters and buffers from -1 downwards.  `reads`: the values that it reads, as they
    are afterwards.
    """

    result: _Nested
    saved: tuple[int, ...]
    new_bytes: tuple[int, ...]
    reads: tuple[_Nested, ...]


@dataclass
class _Walk:
    """Goes through the ops of a graph in order; values and storages are those known so far."""

    index: GraphIndex
    kernels: Kernels
    values: dict[str, _Nested] = field(default_factory=dict)
    bytes: list[int] = field(default_factory=list)  # of each storage that counts
    effects: dict[Any, _Effect] = field(default_factory=dict)
    not_counted: Iterator[int] = field(default_factory=lambda: count(-1, -1))

    def kept(self) -> KeptStorages:
        graph = self.index.graph
        with FakeTensorMode():
            for name in outside(graph.ops):
                value = from_outside(self.index, name)
                self.values[name] = _Nested.of(value, lambda _: next(self.not_counted))
        by_op: dict[str, Storages] = {}
        of_value: dict[str, Storages] = {}
        for op in graph.ops:
            by_op[op.name] = self._counted(self._run(op))
            of_value[op.name] = self._counted(one.storage for one in self.values[op.name].layouts)
        return KeptStorages(by_op, of_value)

    def _counted(self, storages: Iterable[int]) -> Storages:
        return {number: self.bytes[number] for number in storages if number >= 0}

    def _run(self, op: Op) -> list[int]:
        """Adds the op's value; returns the storages that its backward needs."""
        names = operands(op)
        storages = list(
            dict.fromkeys(one.storage for name in names for one in self.values[name].layouts)
        )
        places = {number: i for i, number in enumerate(storages)}
        reads = {name: self.values[name].renumbered(places) for name in names}
        effect = self._effect(op, names, reads)
        storages += range(len(self.bytes), len(self.bytes) + len(effect.new_bytes))
        self.bytes += effect.new_bytes
        numbers = dict(enumerate(storages))
        for one in effect.result.layouts:
            if one.storage < 0:
                numbers[one.storage] = next(self.not_counted)
        for name, after in zip(reads, effect.reads, strict=True):
            if after != reads[name]:
                self.values[name] = after.renumbered(numbers)
                self._differentiate(self.values[name])
        self.values[op.name] = effect.result.renumbered(numbers)
        return [numbers[number] for number in effect.saved]

    def _differentiate(self, written: _Nested) -> None:
        """Gives the other views of a tensor that was written the gradient that it has now."""
        storages = {one.storage for one in written.layouts if one.requires_grad}
        for name, value in self.values.items():
            self.values[name] = value.mapped(
                lambda one: one._replace(requires_grad=True) if one.storage in storages else one
            )

    def _effect(self, op: Op, names: Sequence[str], reads: Mapping[str, _Nested]) -> _Effect:
        call, places = CostedOp(op, self.index), [names.index(name) for name in names]
        # A value that is read twice is not two values that look alike.
        key = (structural_key(call), op.saved_bytes, *places, *(reads[name].key for name in names))
        if key not in self.effects:
            self.effects[key] = _effect(op, self.index, reads, self.kernels)
        return self.effects[key]


def _effect(op: Op, index: GraphIndex, reads: Mapping[str, _Nested], kernels: Kernels) -> _Effect:
    """Runs one op on fake tensors of the layouts that it reads."""
    with staged(index, [Step(op)], Ports(), kernels) as stage:
        env = _fakes(reads, written=bool(op.mutates))
        numbers = {one._cdata: -1 - i for i, one in enumerate(storages_in(stage.fakes.tensors))}
        new_bytes: list[int] = []

        def number(storage: torch.UntypedStorage) -> int:
            if storage._cdata not in numbers:
                numbers[storage._cdata] = first_new + len(new_bytes)
                new_bytes.append(storage.nbytes())
            return numbers[storage._cdata]

        read = [one.storage for value in reads.values() for one in value.layouts]
        numbers |= {one._cdata: n for n, one in zip(read, storages_in(env), strict=True)}
        first_new = len(set(read))
        with saved_storages() as saved:
            try:
                result = _Nested.of(stage.checked(op, stage.result(op, env)), number)
            except Exception:  # of a user's op
                result = _Nested.of(stage.imitated(op, env), number)
        kept = tuple(n for n in map(number, saved.values()) if n >= 0)
        after = tuple(_Nested.of(env[name], number) for name in reads)
    return _Effect(result, kept, tuple(new_bytes), after)


def _fakes(values: Mapping[str, _Nested], *, written: bool) -> dict[str, Any]:
    """Tensors of these layouts, for the fake mode that is on; equal numbers share a storage.

    `written`: an op may write into them.
    """
    sharing: dict[int, list[_Layout]] = {}
    for value in values.values():
        for one in value.layouts:
            sharing.setdefault(one.storage, []).append(one)
    bases = {number: _base(layouts, written) for number, layouts in sharing.items()}

    def tensor(one: Any) -> Any:
        if type(one) is not _Layout:
            return one
        if one.scalar is not None:
            return torch.tensor(one.scalar, dtype=one.dtype)
        base = bases[one.storage]
        if base.dtype != one.dtype:
            base = base.view(one.dtype)
        made = base.as_strided(one.shape, one.stride, one.offset)
        if made.requires_grad != one.requires_grad:
            made = made.detach().requires_grad_(one.requires_grad)
        return made

    return {
        name: pytree.tree_unflatten(map(tensor, value.leaves), value.spec)
        for name, value in values.items()
    }


def _base(layouts: Sequence[_Layout], written: bool) -> Tensor:
    """A flat tensor that all of the layouts fit into."""
    widest = max(layouts, key=lambda one: (one.requires_grad, one.dtype.itemsize))
    size = -(-max(one.end for one in layouts) // 16) * 16  # bytes, whole elements of any dtype
    base = torch.empty(size // widest.dtype.itemsize, dtype=widest.dtype)
    if widest.requires_grad:
        base.requires_grad_()
        return base.clone() if written else base  # a leaf cannot be written
    return base
