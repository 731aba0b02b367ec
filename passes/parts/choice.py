"""Which way each op is split: one axis an op, chosen so that few bytes are converted.

Products (of the matmul family) come first.  Axes of weights are taken in the order of the bytes
that splitting along them converts for each operation that it divides: the inner width of an MLP
and the heads of an attention before the width of the whole model.  Then every op is split, or not,
as its neighbours make it cheapest, until nothing is cheaper.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from pdcompile.ir.graph import OpGraph, Ref, walk
from pdcompile.passes.costs.costed_op import costed_ops
from pdcompile.passes.costs.flops import forward_flops, rule_of
from pdcompile.passes.parts.atoms import Atom, Extent
from pdcompile.passes.parts.axes import Axes, OpAxes, Way, item_of, takes_item
from pdcompile.passes.parts.families import Family, Kinds
from pdcompile.passes.parts.layout import SPREAD, SUM, WHOLE, Layout, split_layout, wire

UNDIVIDED = 0.01  # of the bytes of a result: what computing it on every part costs
SWEEPS = 12


@dataclass(frozen=True, slots=True)
class Label:
    """How one op is split: None is whole.  `after`: how what is added to its sum is."""

    way: Way | None = None
    after: Way | None = None


STAYS = Label()


class Choice:
    """The labels of all ops of a graph.

    Attributes:
        flops: operations of each product's forward.
        labels: what was chosen for each op.
    """

    def __init__(self, axes: Axes, family: Family, parts: int) -> None:
        self.axes, self.graph, self.family, self.parts = axes, axes.graph, family, parts
        self.kinds = Kinds.of(axes)
        self.flops = product_flops(axes.graph)
        self.labels: dict[str, Label] = {}
        self._open: dict[str, list[Label]] = {}
        self._known: dict[Way, tuple[dict[int, Layout], dict[int, Layout]]] = {}
        self._container: dict[str, str] = {}  # of each item that is taken out of one
        self._items: dict[str, list[str]] = {}
        self._readers: dict[str, list[tuple[str, int]]] = {}
        self._read()
        self._shown = {ref.name for ref in walk(self.graph.output, Ref)} | {self.graph.loss}
        possible = {name: self._possible(op) for name, op in axes.ops.items()}
        taken, active = self._taken(possible)
        for name, op in axes.ops.items():
            if name not in self._container:
                own = {taken[name]} if name in taken else active
                self._open[name] = self._labels(op, possible[name], own)
        self.labels = {name: labels[0] for name, labels in self._open.items()}
        self._improve()

    def _read(self) -> None:
        """Notes who reads which value, and which values are items of containers."""
        for name, op in self.axes.ops.items():
            first = op.call.operands[0].name if op.call.operands else ""
            made = self.graph.values.get(first)
            if takes_item(op.op) and made is not None and not made.is_tensor and not op.reason:
                self._container[name] = first
                self._items.setdefault(first, []).append(name)
                continue
            for number, operand in enumerate(op.call.operands):
                if not operand.of_model:
                    self._readers.setdefault(operand.name, []).append((name, number))

    def _possible(self, op: OpAxes) -> list[Way]:
        """Ways of the family whose axis divides, and whose layouts can be written."""
        ways = self.kinds.allowed(self.family, op.ways())
        ways = [way for way in ways if divides(way.axis, self.parts) and _written(way)]
        return self.kinds.preferred(self.family, op, ways) if op.op.name in self.flops else ways

    def _labels(self, op: OpAxes, ways: list[Way], active: Collection[Atom]) -> list[Label]:
        """What an op may be; products stay whole only where nothing divides them."""
        chosen = [way for way in ways if way.axis in active or way.axis not in self.kinds.width]
        found = []
        for way in chosen:
            found.append(Label(way))
            if way.summed and op.added:
                others = [w for w in self.kinds.allowed(self.family, op.ways())
                          if not w.summed and w.axis not in self.kinds.width
                          and divides(w.axis, self.parts) and _written(w)]  # fmt: skip
                found += [Label(way, other) for other in others]
        return found if found and op.op.name in self.flops else [*found, STAYS]

    def _taken(self, possible: dict[str, list[Way]]) -> tuple[dict[str, Atom], set[Atom]]:
        """The axis of weights that each product is split along, and those that all products which
        have them are: other ops are split along these alone."""
        having: dict[Atom, dict[str, Way]] = {}
        for name, ways in possible.items():
            for way in ways:
                if way.axis in self.kinds.width:
                    having.setdefault(way.axis, {}).setdefault(name, way)
        left = {name for name in self.flops if possible[name]}
        found: dict[str, Atom] = {}
        active: set[Atom] = set()
        waiting = [(self._worth(axis, having[axis], left), axis.number, axis) for axis in having]
        heapify(waiting)
        while waiting:
            known, number, axis = heappop(waiting)
            worth = self._worth(axis, having[axis], left)
            if worth > known:  # others have taken of its products
                heappush(waiting, (worth, number, axis))
            elif worth < inf:
                own = left & having[axis].keys()
                found.update(dict.fromkeys(own, axis))
                left -= own
                if len(own) == len(self.flops.keys() & having[axis].keys()):
                    active.add(axis)
        return found, active

    def _worth(self, axis: Atom, ways: dict[str, Way], left: set[str]) -> float:
        """Bytes converted for each operation that splitting along an axis divides: of its
        products alone or, where no other axis has taken some of them, of all ops that have it."""
        own = {name: way for name, way in ways.items() if name in left}
        divided = sum(self.flops[name] for name in own)
        if not divided:
            return inf
        every = all(name in left for name in ways if name in self.flops)
        alone = self._converted(own)
        return (min(alone, self._converted(ways)) if every else alone) / divided

    def _converted(self, ways: dict[str, Way]) -> float:
        """Bytes converted where these ops alone are split, each in its way."""
        self.labels = {name: Label(way) for name, way in ways.items()}
        touched = {value for name in ways for value in self._values(name)}
        return sum(map(self._cost, touched))

    # -- layouts ----------------------------------------------------------------------------

    def label(self, name: str) -> Label:
        """The label of an op; the items of a container have that of the op that makes it."""
        return self.labels.get(self._container.get(name, name), STAYS)

    def given(self, name: str) -> Layout:
        """The layout of a value."""
        label = self.label(name)
        if label.way is None or name not in self.axes.ops:
            return WHOLE
        if label.way.summed and name not in self._container:
            if not self.axes.ops[name].added:
                return SUM
            return WHOLE if label.after is None else self._layouts(label.after)[1][0]
        index = item_of(self.axes.ops[name].op) if name in self._container else 0
        return self._layouts(label.way)[1].get(index, WHOLE)

    def wanted(self, name: str, number: int) -> Layout:
        """The layout that an op wants an operand in."""
        label = self.label(name)
        way = label.after if number in self._added(name, label) else label.way
        return WHOLE if way is None else self._layouts(way)[0].get(number, SPREAD)

    def items(self, name: str) -> dict[int, Layout]:
        """The layouts of the items of a container."""
        made = {
            item_of(self.axes.ops[item].op): self.given(item) for item in self._items.get(name, ())
        }
        return made if self.label(name).way else {}

    def _added(self, name: str, label: Label) -> tuple[int, ...]:
        split_sum = label.way is not None and label.way.summed
        return self.axes.ops[name].added if split_sum else ()

    def _layouts(self, way: Way) -> tuple[dict[int, Layout], dict[int, Layout]]:
        """The layouts of the operands and results that a way splits."""
        found = self._known.get(way)
        if found is None:
            operands, results = (
                {i: made for i, factor in factors.items() if (made := split_layout(factor))}
                for factors in (way.operands, way.results)
            )
            found = self._known[way] = operands, results
        return found

    # -- improvement ------------------------------------------------------------------------

    def _values(self, name: str) -> tuple[str, ...]:
        """The values that an op's label is about: what it reads and makes, items for containers."""
        items = self._items.get(name, ())
        return (*self.axes.ops[name].op.inputs, name, *items)

    def _cost(self, value: str) -> float:
        """Bytes that are converted of one value."""
        have, about = self.given(value), self.graph.values[value]
        if not about.is_tensor:
            return 0.0
        wants = {self.wanted(name, i) for name, i in self._readers.get(value, ())}
        if value in self._shown:
            wants.add(WHOLE)
        size = about.bytes(self.graph.batch_size)
        each = (wire(have, want, self.parts, about.needs_gradient) for want in wants)
        return size * sum(each)

    def _around(self, name: str) -> float:
        """What changes with the label of one op."""
        label, about = self.labels[name], self.graph.values[name]
        size = about.bytes(self.graph.batch_size)
        found = sum(map(self._cost, dict.fromkeys(self._values(name))))
        if label.way is None:
            found += UNDIVIDED * size
        elif label.way.summed and self.axes.ops[name].added:
            found += size * wire(SUM, self.given(name), self.parts, about.needs_gradient)
        return found

    def _unlike(self, name: str) -> int:
        """Operands that are converted: of equal labels the one that fits what is there is taken."""
        read = enumerate(self.axes.ops[name].call.operands)
        return sum(
            self.wanted(name, i) != self.given(one.name) for i, one in read if not one.of_model
        )

    def _improve(self) -> None:
        """Changes one label at a time, until no change converts fewer bytes."""
        names = [name for name, labels in self._open.items() if len(labels) > 1]
        for sweep in range(SWEEPS):
            changed = False
            for name in names if sweep % 2 == 0 else reversed(names):
                own = best = self.labels[name]
                least = self._around(name), self._unlike(name)
                for other in self._open[name]:
                    self.labels[name] = other
                    cost = self._around(name), self._unlike(name)
                    if cost[0] < least[0] * (1 - 1e-9) or (
                        cost[0] <= least[0] * (1 + 1e-9) and cost[1] < least[1]
                    ):
                        best, least = other, cost
                self.labels[name] = best
                changed |= best is not own
            if not changed:
                return


def divides(axis: Atom, parts: int) -> bool:
    """True if every part gets an equal share of an axis; of samples, wherever b divides."""
    size = axis.extent
    if size.power:
        return size == Extent(1, 1)
    return not size.tag and size.number > 0 and size.number % parts == 0


def product_flops(graph: OpGraph) -> dict[str, int]:
    """Operations of each op of the matmul family."""
    calls = costed_ops(graph, graph.batch_size)
    return {c.op.name: forward_flops(c) for c in calls if rule_of(c).product}


def _written(way: Way) -> bool:
    """True if the layouts of a way can be written: their sizes are numbers or multiples of b."""
    return all(
        split_layout(factor) is not None
        for factors in (way.operands, way.results)
        for factor in factors.values()
    )
