"""Axes of a graph: which dimensions of which values are the same, and how each op divides.

Every dimension of every value and tensor of the model is a product of atoms.  The rule of each op
(`rules.RULES`) joins those of its operands and says which loops it has: what is free or summed may
be split, each part computing its own share; what is whole may not, in this op.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self, cast

from pdcompile.ir.graph import GRADIENT, Op, OpGraph, Value
from pdcompile.passes.costs.costed_op import costed_ops
from pdcompile.passes.costs.flops import forward_flops, rule_of
from pdcompile.passes.parts.atoms import Atom, Run, extent, fresh, join, leaves
from pdcompile.passes.parts.calls import Call, Operand, extents
from pdcompile.passes.parts.in_place import written_storages
from pdcompile.passes.parts.layout import SPREAD, SUM, WHOLE, Layout
from pdcompile.passes.parts.rules import form_of
from pdcompile.passes.parts.shares import GROUPED, Shares, passed_on
from pdcompile.passes.parts.signature import (
    Binding,
    Dims,
    Form,
    Loop,
    Term,
    Whole,
)

ATTENTION = "scaleddotproductattention"


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way for parts to compute an op: split along an axis, or whole on each of them (None).

    `operands` are the layouts that it wants, in the order of `calls.operands(op)`.  `results` are
    what it gives, by number of the item for a container.  `added`: numbers of operands that are
    left out of a sum over parts and added to its total (the bias of a row-split linear), which is
    had as `after`.
    """

    axis: Atom | None
    operands: tuple[Layout, ...]
    results: Mapping[int, Layout] = field(default_factory=dict)
    added: tuple[int, ...] = ()
    after: Layout | None = None

    @property
    def result(self) -> Layout:
        """The layout that the op itself gives."""
        return self.results.get(0, WHOLE)

    @property
    def gives(self) -> Layout:
        """The layout of its value, once what is added is added."""
        return self.result if self.after is None else self.after


@dataclass(frozen=True)
class OpAxes:
    """Axes of one op, and its ways to divide.  `reason`: why there are none, "" with a rule.

    `reads` and `makes` are the loops, by letter, of the dimensions of operands and results, by
    number.  `added`: numbers of operands that are added after a sum.  `vocabulary`: the letter of
    what operands have numbers of.  `partial`: operands that may be shares of a sum over experts,
    and then make `shares`.
    """

    call: Call
    loops: Mapping[str, Loop] = field(default_factory=dict)
    results: Mapping[int, Dims] = field(default_factory=dict)
    dims: Mapping[int, Dims] = field(default_factory=dict)  # of the operands
    reads: Mapping[int, Term] = field(default_factory=dict)
    makes: Mapping[int, Term] = field(default_factory=dict)
    added: tuple[int, ...] = ()
    reason: str = ""
    vocabulary: str = ""
    partial: tuple[int, ...] = ()
    shares: Shares | None = None

    @property
    def op(self) -> Op:
        return self.call.op

    @property
    def classes(self) -> Atom | None:
        """The axis of its vocabulary, which parts may share."""
        loop = self.loops.get(self.vocabulary)
        return next(iter(leaves(loop.run)), None) if loop else None

    @cached_property
    def whole(self) -> Way:
        return Way(None, (WHOLE,) * len(self.call.operands))

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """Every way to split it whose layouts can be written, in order of its loops.

        Operands with the axis are S, others are read whole (R); last, that on shares of a sum (P).
        """
        found = list[Way]()
        for letter, loop in self.loops.items():
            run = leaves(loop.run) if loop.kind != "whole" else ()
            if letter == self.vocabulary:
                run = run[:1]  # of which each part has one run of numbers
            for at, axis in enumerate(run):
                read = self._split(letter, at, self.reads, self.dims)
                made = self._split(letter, at, self.makes, self.results)
                if read is None or made is None:
                    continue
                added = self.added if loop.kind == "sum" else ()
                wants = tuple(WHOLE if n in added else read.get(n, SPREAD)
                              for n in range(len(self.call.operands)))  # fmt: skip
                made = {0: SUM} if loop.kind == "sum" else made if loop.kind == "free" else {}
                found.append(Way(axis, wants, made, added, WHOLE if added else None))
        return (*found, *self._of_shares(found))

    def _of_shares(self, ways: Sequence[Way]) -> Iterator[Way]:
        """The way that takes shares and makes some: elsewhere than in products nothing is split."""
        if self.shares is None or not self.partial:
            return
        for axis in leaves(self.shares.experts)[:1]:
            count, made = len(self.call.operands), dict.fromkeys(self.results, SUM)
            own = (way for way in ways if way.axis is axis and self.call.name == GROUPED)
            way = next(own, Way(axis, (SPREAD,) * count, made))
            wants = (SUM if i in self.partial else one for i, one in enumerate(way.operands))
            yield replace(way, operands=tuple(wants))

    def _split(
        self, letter: str, at: int, terms: Mapping[int, Term], dims: Mapping[int, Dims]
    ) -> dict[int, Layout] | None:
        """The layouts of what an axis divides, the one in this place of a loop, by number; None
        where a size cannot be written."""
        found = {}
        for number, term in terms.items():
            for dim, letters in enumerate(term):
                sizes = tuple(atom.extent.size for atom in leaves(dims[number][dim]))
                if letter not in letters or not sizes:
                    continue  # of size one: it broadcasts
                written = tuple(size for size in sizes if size is not None)
                if written != sizes:
                    return None
                before = letters[: letters.index(letter)]
                which = at + sum(len(leaves(self.loops[one].run)) for one in before)
                found[number] = Layout("S", dim, written, which)
        return found


WHOLE_STAGE = "its stage is whole"  # the reason of an op that is not to divide
READS_WRITTEN = "what it reads is written in place"


class Axes:
    """The axes of one graph.

    Attributes:
        values: dimensions of each value that is a tensor.
        tensors: dimensions of each tensor of the model.
        ops: how each op divides, by name, in order.
        products: operations of each op of the matmul family.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.values: dict[str, Dims] = {}
        self.tensors: dict[str, Dims] = {}
        self.ops: dict[str, OpAxes] = {}
        self._items: dict[str, Mapping[int, Dims]] = {}  # of containers
        self._named = {op.name: op for op in graph.ops}
        self._written = written_storages(graph)
        for entry in graph.inputs:
            self.values[entry.name] = tuple(map(fresh, extents(graph.values[entry.name])))
        for fqn, info in graph.tensors.items():
            self.tensors[fqn] = tuple(fresh(extent(size)) for size in info.shape)
            for alias in info.aliases:
                self.tensors[alias] = self.tensors[fqn]
        calls = costed_ops(graph, graph.batch_size)
        self.products = {c.op.name: forward_flops(c) for c in calls if rule_of(c).product}
        for op in graph.ops:
            found = self.ops[op.name] = self._divided(op)
            if graph.values[op.name].is_tensor:
                self.values[op.name] = found.results[0]
            else:
                self._items[op.name] = found.results

    @classmethod
    def of(cls, graph: OpGraph) -> Self:
        """The axes of a graph, found once for all the ways to divide it; its `ops` may be set."""
        if (found := next((one for one in _known if one.graph is graph), None)) is None:
            found = cls(graph)
            _known.append(found)
        own = copy(found)
        own.ops = dict(found.ops)
        return cast(Self, own)

    def _divided(self, op: Op) -> OpAxes:
        call = Call(op, self.graph)
        try:
            self._refuse(call)
            if takes_item(op) and call.operands[0].name in self._items:
                return self._item(call)
            return self._bound(call, form_of(call))
        except Whole as error:
            return OpAxes(call, results=self._results(op), reason=str(error))

    def _results(self, op: Op) -> dict[int, Dims]:
        """New dimensions of the result, or of the items that are taken out of a container."""
        values = self.graph.values
        made = {0: values[op.name]}
        if not made[0].is_tensor:
            items = (self._named[name] for name in made[0].consumers)
            made = {item_of(one): values[one.name] for one in items
                    if takes_item(one) and values[one.name].is_tensor}  # fmt: skip
        return {i: tuple(map(fresh, extents(value))) for i, value in made.items()}

    def _refuse(self, call: Call) -> None:
        """Raise Whole where an op is whole whatever its rule says."""
        op, values = call.op, self.graph.values
        made = values[op.name]
        read = [values[operand.name] for operand in call.operands if not operand.of_model]
        mutated = [values[name] for name in op.mutates]
        draws = op.draw is not None
        for refused, reason in (
            (op.opaque, "an opaque module"),
            (op.target == GRADIENT or op.enables_grad, "it differentiates inside of forward"),
            (self._is_written(made), "it writes in place, or what it makes is written"),
            (self._is_written(*mutated), "it writes in place"),
            (draws and call.name not in ("dropout", ATTENTION), "it draws random numbers"),
            (op.buffers_written and not call.name.startswith("batchnorm"), "it writes a buffer"),
            (self._is_written(*read) and not self._shares(call), READS_WRITTEN),
            (not (takes_item(op) or all(one.is_tensor for one in read)), "it takes a container"),
            (not (made.is_tensor or self._taken_apart(op)), "its results are not taken apart"),
        ):
            if refused:
                raise Whole(reason)

    def _is_written(self, *values: Value) -> bool:
        return any(value.storage in self._written for value in values)

    def _taken_apart(self, op: Op) -> bool:
        readers = [self._named[name] for name in self.graph.values[op.name].consumers]
        return all(takes_item(one) and self.graph.values[one.name].is_tensor for one in readers)

    def _item(self, call: Call) -> OpAxes:
        """An item of a container: as the op divides that made it."""
        name, index = call.operands[0].name, item_of(call.op)
        made = self.ops[name]
        if index not in self._items[name]:
            raise Whole(made.reason or "it takes a container")
        term, dims = {0: made.makes.get(index, ())}, {0: self._items[name][index]}
        loops = {letter: Loop(loop.run, "free" if loop.kind == "sum" else loop.kind)
                 for letter, loop in made.loops.items()
                 if any(letter in letters for letters in term[0])}  # fmt: skip
        return OpAxes(call, loops, dims, dims, term, term, reason=made.reason, shares=made.shares)

    def _bound(self, call: Call, form: Form) -> OpAxes:
        made = self._results(call.op)
        dims = {i: self._dims(operand) for i, operand in enumerate(call.operands)
                if operand.of_model or self.graph.values[operand.name].is_tensor}  # fmt: skip
        if form.signature:
            bound = Binding(form, dims, made)
            found = OpAxes(call, bound.loops, made, dims, bound.reads, bound.makes, bound.added,
                           vocabulary=form.vocabulary)  # fmt: skip
        else:
            found = _viewed(call, dims, made)
        partial, shares = passed_on(found, self._shares(call))
        about = [self.graph.values[name] for name in call.op.inputs]
        if written := [one for one in about if self._is_written(one)]:
            if not partial or any(one.requires_grad for one in written):
                raise Whole(READS_WRITTEN)
            found = replace(found, loops={}, reason=READS_WRITTEN)  # a copy would soon be old
        return replace(found, partial=partial, shares=shares)

    def _shares(self, call: Call) -> dict[int, Shares]:
        """Return the shares of a sum over experts that an op reads, by number of operand."""
        known = {i: self.ops[one.name].shares for i, one in enumerate(call.operands)
                 if not one.of_model and one.name in self.ops}  # fmt: skip
        return {i: one for i, one in known.items() if one is not None}

    def _dims(self, operand: Operand) -> Dims:
        return self.tensors[operand.name] if operand.of_model else self.values[operand.name]


_known: deque[Axes] = deque(maxlen=2)  # a model in training and evaluation


def _viewed(call: Call, dims: Mapping[int, Dims], results: Mapping[int, Dims]) -> OpAxes:
    """The axes of a view, with a loop for each atom."""
    read, made = ([atom for run in each[0] for atom in run] for each in (dims, results))
    if not join(read, made):
        raise Whole
    loops = {f"{i}": Loop((atom,), "free") for i, atom in enumerate(leaves(read))}
    reads, makes = _lettered(dims[0], loops), _lettered(results[0], loops)
    return OpAxes(call, loops, results, dims, {0: reads}, {0: makes})


def _lettered(dims: Sequence[Run], names: Iterable[str]) -> Term:
    """Dimensions whose atoms have these names, in order."""
    each = iter(names)
    return tuple(tuple(next(each) for _ in leaves(run)) for run in dims)


def item_of(op: Op) -> int:
    """The number of the item that an op takes out of a container."""
    assert isinstance(op.args[1], int)
    return op.args[1]


def takes_item(op: Op) -> bool:
    """True if an op may take an item out of a container."""
    return op.target == "operator.getitem" and type(op.args[1]) is int
