"""Axes of a graph: which dimensions of which values are the same, and how each op divides.

Every dimension of every value and tensor of the model is a product of atoms.  The rule of each op
(`rules.RULES`) joins those of its operands and says which loops it has: what is free or summed may
be split, each part computing its own share; what is whole may not, in this op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdcompile.ir.graph import GRADIENT, Op, OpGraph
from pdcompile.passes.parts.atoms import Atom, Extent, Run, cut, extent, fresh, leaves
from pdcompile.passes.parts.calls import Call, Operand, value_extents
from pdcompile.passes.parts.in_place import written_storages
from pdcompile.passes.parts.layout import SPREAD, SUM, WHOLE, Layout
from pdcompile.passes.parts.rules import RULES
from pdcompile.passes.parts.signature import Form, Loop, Mismatch, Place, added_operands, bind

Dims = tuple[Run, ...]


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

    `added`: numbers of operands that are added after a sum.  `vocabulary`: what operands have
    numbers of.
    """

    call: Call
    loops: tuple[Loop, ...] = ()
    results: Mapping[int, Dims] = field(default_factory=dict)
    dims: Mapping[int, Dims] = field(default_factory=dict)  # of the operands, by number
    added: tuple[int, ...] = ()
    reason: str = ""
    vocabulary: Loop | None = None

    @property
    def op(self) -> Op:
        return self.call.op

    @property
    def classes(self) -> Atom | None:
        """The axis of its vocabulary, which parts may share."""
        return next(iter(leaves(self.vocabulary.run)), None) if self.vocabulary else None

    @property
    def whole(self) -> Way:
        return Way(None, (WHOLE,) * len(self.call.operands))

    def ways(self) -> list[Way]:
        """Every way to split it whose layouts can be written, in order of its loops.

        Operands with the axis are S, others are read whole (R).
        """
        found = []
        for loop in self.loops:
            run = leaves(loop.run) if loop.kind != "whole" else ()
            if loop is self.vocabulary:
                run = run[:1]  # of which each part has one run of numbers
            for i, axis in enumerate(run):
                read = _split(loop.operands, self.dims, run[:i])
                made = _split(loop.results, self.results, run[:i])
                if read is None or made is None:
                    continue
                added = self.added if loop.kind == "sum" else ()
                wants = tuple(WHOLE if n in added else read.get(n, SPREAD)
                              for n in range(len(self.call.operands)))  # fmt: skip
                made = {0: SUM} if loop.kind == "sum" else made if loop.kind == "free" else {}
                found.append(Way(axis, wants, made, added, WHOLE if added else None))
        return found


WHOLE_STAGE = "its stage is whole"  # the reason of an op that is not to divide


def _split(
    places: Mapping[int, Place], dims: Mapping[int, Dims], before: Run
) -> dict[int, Layout] | None:
    """The layouts of what an axis divides, by number; None where a size cannot be written."""
    found = {}
    for number, place in places.items():
        sizes = tuple(atom.extent.size for atom in leaves(dims[number][place.dim]))
        written = tuple(size for size in sizes if size is not None)
        if written != sizes:
            return None
        which = len(leaves(place.before)) + len(before)
        found[number] = Layout("S", place.dim, written, which)
    return found


class Axes:
    """The axes of one graph.

    Attributes:
        values: dimensions of each value that is a tensor.
        tensors: dimensions of each tensor of the model.
        ops: how each op divides, by name, in order.
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
            self.values[entry.name] = tuple(map(fresh, value_extents(graph, entry.name)))
        for fqn, info in graph.tensors.items():
            self.tensors[fqn] = tuple(fresh(extent(size)) for size in info.shape)
            for alias in info.aliases:
                self.tensors[alias] = self.tensors[fqn]
        for op in graph.ops:
            self._visit(op)

    def _visit(self, op: Op) -> None:
        found = self._divided(op)
        self.ops[op.name] = found
        if self.graph.values[op.name].is_tensor:
            self.values[op.name] = found.results[0]
        else:
            self._items[op.name] = found.results

    def _divided(self, op: Op) -> OpAxes:
        call = Call(op, self.graph)
        sizes = self._result_sizes(op)
        reason = self._refused(call)
        if not reason and takes_item(op) and call.operands[0].name in self._items:
            return self._item(call)
        rule = RULES.get(call.name)
        if not reason:
            reason = "no rule" if rule is None else ""
        if not reason and not call.operands:
            reason = "it makes a tensor of no other"
        if not reason and rule is not None:
            try:
                form = rule(call)
                if not isinstance(form, str):
                    return self._bound(call, form, sizes)
                reason = form
            except Mismatch:
                reason = "its sizes do not divide alike"
            except (LookupError, TypeError, ValueError):
                reason = "its arguments are of a form without a rule"
        whole = {i: tuple(map(fresh, one)) for i, one in sizes.items()}
        return OpAxes(call, results=whole, reason=reason)

    def _result_sizes(self, op: Op) -> dict[int, tuple[Extent, ...]]:
        """Sizes of the result, or of those items of a container that are taken out of it."""
        value = self.graph.values[op.name]
        if value.is_tensor:
            return {0: value_extents(self.graph, op.name)}
        items = (self._named[name] for name in value.consumers)
        return {
            item_of(one): value_extents(self.graph, one.name)
            for one in items
            if takes_item(one) and self.graph.values[one.name].is_tensor
        }

    def _refused(self, call: Call) -> str:
        """Why an op is whole whatever its rule says."""
        op, values = call.op, self.graph.values
        if op.opaque:
            return "an opaque module"
        if op.target == GRADIENT or op.enables_grad:
            return "it differentiates inside of forward"
        if values[op.name].storage in self._written:
            return "it writes in place, or what it makes is written"
        if any(values[name].storage in self._written for name in op.mutates):
            return "it writes in place"
        if op.draw is not None and call.name not in ("dropout", "scaleddotproductattention"):
            return "it draws random numbers"
        if op.buffers_written and not call.name.startswith("batchnorm"):
            return "it writes a buffer"
        for operand in call.operands:
            if not operand.of_model and values[operand.name].storage in self._written:
                return "what it reads is written in place"
        held = [one.name for one in call.operands if not one.of_model]
        if any(not values[name].is_tensor for name in held) and not takes_item(op):
            return "it takes a container"
        if not values[op.name].is_tensor and not self._taken_apart(op):
            return "its results are not taken apart"
        return ""

    def _taken_apart(self, op: Op) -> bool:
        readers = [self._named[name] for name in self.graph.values[op.name].consumers]
        return all(takes_item(one) and self.graph.values[one.name].is_tensor for one in readers)

    def _item(self, call: Call) -> OpAxes:
        """An item of a container: as the op divides that made it."""
        name, index = call.operands[0].name, item_of(call.op)
        made = self.ops[name]
        if index not in self._items[name]:
            whole = {i: tuple(map(fresh, one)) for i, one in self._result_sizes(call.op).items()}
            return OpAxes(call, results=whole, reason=made.reason or "it takes a container")
        dims = self._items[name][index]
        loops = [
            Loop(loop.run, "free" if loop.kind == "sum" else loop.kind, {0: place}, {0: place})
            for loop in made.loops
            if (place := loop.results.get(index)) is not None
        ]
        return OpAxes(call, tuple(loops), {0: dims}, {0: dims}, reason=made.reason)

    def _bound(self, call: Call, form: Form, sizes: Mapping[int, tuple[Extent, ...]]) -> OpAxes:
        dims = {i: self._dims(operand) for i, operand in enumerate(call.operands)
                if operand.of_model or self.graph.values[operand.name].is_tensor}  # fmt: skip
        if not form.signature:
            loops, results = viewed(dims[0], sizes[0])
            return OpAxes(call, loops, {0: results}, dims)
        terms = {term: i for term, i in enumerate(form.operands) if i is not None}
        given = {term: dims[i] for term, i in terms.items()}
        found, made = bind(form.signature, given, sizes, form.sizes)
        for loop in found.values():
            loop.operands = {terms[term]: place for term, place in loop.operands.items()}
        added = tuple(terms[i] for i in added_operands(form.signature) if i in terms)
        for letter in form.meets:
            if letter in found:
                found[letter].kind = "meet"
        loops, vocabulary = tuple(found.values()), found.get(form.vocabulary)
        return OpAxes(call, loops, made, dims, added, vocabulary=vocabulary)

    def _dims(self, operand: Operand) -> Dims:
        return self.tensors[operand.name] if operand.of_model else self.values[operand.name]


def viewed(dims: Dims, sizes: Sequence[Extent]) -> tuple[tuple[Loop, ...], Dims]:
    """The loops of a view, one for each atom, and the dimensions of its result.

    Raises:
        Mismatch: a border of the result is where no product divides.
    """
    made = cut([atom for run in dims for atom in run], sizes)
    if made is None:
        raise Mismatch
    before = {atom: Place(i, run[:k]) for i, run in enumerate(map(leaves, dims))
              for k, atom in enumerate(run)}  # fmt: skip
    loops = []
    for i, run in enumerate(map(leaves, made)):
        for k, atom in enumerate(run):
            loops.append(Loop((atom,), "free", {0: before[atom]}, {0: Place(i, run[:k])}))
    return tuple(loops), tuple(made)


def item_of(op: Op) -> int:
    """The number of the item that an op takes out of a container."""
    assert isinstance(op.args[1], int)
    return op.args[1]


def takes_item(op: Op) -> bool:
    """True if an op may take an item out of a container."""
    return op.target == "operator.getitem" and type(op.args[1]) is int
