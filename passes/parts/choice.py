"""Chooses the way that each op is split: one axis an op, so that few bytes are converted.

Products (of the matmul family) come first.  Axes of weights are taken in the order of the bytes
that splitting along them converts for each operation that it divides: the inner width of an MLP
and the heads of an attention before the width of the whole model.  Then every op is split, or not,
as its neighbours make it cheapest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from math import inf
from typing import cast

from pdcompile.ir.graph import Attr, walk
from pdcompile.parts.shard import Split
from pdcompile.passes.parts.asked import Asked
from pdcompile.passes.parts.atoms import Atom, leaves
from pdcompile.passes.parts.axes import WHOLE_STAGE, Axes, OpAxes, Way, item_of, takes_item
from pdcompile.passes.parts.families import AT_REST, Kinds, divides
from pdcompile.passes.parts.layout import SUM, WHOLE, Layout, wire
from pdcompile.passes.parts.local import has_function

UPDATED = 4.0  # of the bytes of a table: its weights, gradient and states, updated on every part
UNDIVIDED = 0.01  # of the bytes of a result: what computing it on every part costs


class Choice:
    """The ways of all ops of a graph.

    Attributes:
        flops: operations of the forward of each product of stages that are divided.
        ways: what was chosen for each op.
        held: the layouts of tensors: that which all ops want; whole where they differ, in outputs,
            and where they are `shared`.
        asked: constraints that ask for an axis, with their products or, without any, all ops.
        fixed: their names, as these may not stay whole.
    """

    def __init__(
        self, axes: Axes, family: Split, parts: int, shown: frozenset[str],
        shared: Collection[str] = (), wishes: Sequence[Asked] = (),
    ) -> None:  # fmt: skip
        self.axes, self.graph, self.parts = axes, axes.graph, parts
        families = {name: cast(Split, one.axis) for one, names in wishes for name in names}
        self.kinds = Kinds.of(axes, family, families)
        self.flops = {n: f for n, f in axes.products.items() if axes.ops[n].reason != WHOLE_STAGE}
        self.asked = [(one, tuple(n for n in names if n in self.flops) or names)
                      for one, names in wishes]  # fmt: skip
        self.fixed = {name for _, names in self.asked for name in names}
        self.ways: dict[str, Way] = {}
        self._maker: dict[str, str] = {}  # of each item that is taken out of a container
        self._readers: dict[str, list[tuple[str, int]]] = {}
        self._values: dict[str, tuple[str, ...]] = {}  # that an op's way is about
        self._tables: dict[str, list[tuple[str, int]]] = {}  # readers of tables of embeddings
        self._read()
        self._shown = shown
        self._loss_is_whole = any(
            op.region == "loss" and not shown.isdisjoint(op.inputs) for op in self.graph.ops
        )
        possible = {name: self._possible(op) for name, op in axes.ops.items()}
        taken = self._taken(possible)
        whole = self._of_all_products(taken, possible)
        self.open = {
            name: self._open(axes.ops[name], ways, {taken[name]} if name in taken else whole)
            for name, ways in possible.items()
            if name not in self._maker
        }
        self.ways = {}
        for name, ways in self.open.items():
            self.ways[name] = max(ways, key=lambda way: self._of_shares(name, way))
        self._improve()
        self.ways = {name: self._way(name) for name in axes.ops}
        self.held = self._held(shared)

    def _read(self) -> None:
        """Notes who reads which value, and which values are items of containers."""
        for name, op in self.axes.ops.items():
            read = op.call.operands
            if takes_item(op.op) and not op.reason and not read[0].of_model:
                maker = read[0].name
                if not self.graph.values[maker].is_tensor:
                    self._maker[name] = maker
                    self._values[maker] += (name,)
                    continue
            self._values[name] = (*op.op.inputs, name)
            for number, operand in enumerate(read):
                known = self._tables if operand.of_model else self._readers
                known.setdefault(operand.name, []).append((name, number))
        looks_up = {name for name, op in self.axes.ops.items() if op.call.name == "embedding"}
        self._tables = {f: read for f, read in self._tables.items()
                        if not looks_up.isdisjoint(name for name, _ in read)}  # fmt: skip

    def _possible(self, op: OpAxes) -> list[Way]:
        """Ways of the family whose axis divides; of a product those that it is to be split in.

        What the loss reads is whole where the caller reads it too.
        """
        if op.op.region == "loss" and self._loss_is_whole:
            return []
        ways = [way for way in self.kinds.allowed(op) if divides(way.axis, self.parts)]
        return self.kinds.preferred(op, ways) if op.op.name in self.flops else ways

    def _open(self, op: OpAxes, ways: list[Way], active: Collection[Atom | None]) -> list[Way]:
        """Ways open to an op; products stay whole only where nothing divides them."""
        found, fixed = [], op.op.name in self.fixed
        for way in ways:
            if (
                fixed
                or way.axis in active
                or way.axis not in self.kinds.width
                or _looks_up(op, way)
            ):
                found.append(way)
                if way.added:
                    found += [_added_to(way, other) for other in self.kinds.allowed(op)
                              if other.result.kind == "S" and other.axis not in self.kinds.width
                              and divides(other.axis, self.parts)]  # fmt: skip
        return found if found and (fixed or op.op.name in self.flops) else [*found, op.whole]

    def _taken(self, possible: Mapping[str, list[Way]]) -> dict[str, Atom]:
        """The axis of weights that each product is split along."""
        having: dict[Atom, dict[str, Way]] = {}
        for name, ways in possible.items():
            for way in ways:
                if way.axis is not None and way.axis in self.kinds.width:
                    having.setdefault(way.axis, {}).setdefault(name, way)
        found: dict[str, Atom] = {}
        waiting = [(self._worth(ways, found), axis.number, axis) for axis, ways in having.items()]
        heapify(waiting)
        while waiting:
            known, number, axis = heappop(waiting)
            worth = self._worth(having[axis], found)
            if worth > known:  # others have taken of its products
                heappush(waiting, (worth, number, axis))
                continue
            for name in having[axis].keys() & self.flops.keys():
                found.setdefault(name, axis)
        return found

    def _of_shares(self, name: str, way: Way) -> int:
        """1 if all that a way takes shares of is had in shares so far; -1 where it is not."""
        read = zip(self.axes.ops[name].call.operands, way.operands, strict=True)
        had = [self.given(one.name) == SUM for one, want in read if want == SUM]
        return (1 if all(had) else -1) if had else 0

    def _of_all_products(
        self, taken: Mapping[str, Atom], possible: Mapping[str, list[Way]]
    ) -> set[Atom | None]:
        """Axes that all products which have them are split along: other ops are along these."""
        lost = {way.axis for name, axis in taken.items() for way in possible[name]
                if way.axis is not axis}  # fmt: skip
        return {axis for axis in taken.values() if axis not in lost}

    def _worth(self, ways: Mapping[str, Way], taken: Collection[str]) -> float:
        """Bytes converted for each operation that splitting along an axis divides: of its
        products alone or, where no other axis has taken some of them, of all ops that have it."""
        products = {name: way for name, way in ways.items() if name in self.flops}
        left = {name: way for name, way in products.items() if name not in taken}
        divided = sum(self.flops[name] for name in left)
        forms = (left, ways) if len(left) == len(products) else (left,)
        return min(map(self._converted, forms)) / divided if divided else inf

    def _converted(self, ways: Mapping[str, Way]) -> float:
        """Bytes converted where these ops alone are split, each in its way."""
        self.ways = dict(ways)
        touched = {value for name in ways for value in self._values.get(name, ())}
        return sum(map(self._cost, touched))

    # -- layouts ----------------------------------------------------------------------------

    def given(self, name: str) -> Layout:
        """The layout of a value."""
        maker = self._maker.get(name)
        if maker is None:
            return self.ways[name].gives if name in self.ways else WHOLE
        found = self.ways.get(maker)
        return found.results.get(item_of(self.axes.ops[name].op), WHOLE) if found else WHOLE

    def _way(self, name: str) -> Way:
        """Return how an op is computed; items of a container as they are."""
        if name not in self._maker:
            return self.ways[name]
        layout, maker = self.given(name), self.ways[self._maker[name]]
        return Way(maker.axis, (layout,), {0: layout})

    def _held(self, shared: Collection[str]) -> dict[str, Layout]:
        whole = [*shared, *(one.fqn for one in walk(self.graph.output, Attr))]
        wanted: dict[str, set[Layout]] = {fqn: {WHOLE} for fqn in whole}
        for name, op in self.axes.ops.items():
            for operand, layout in zip(op.call.operands, self.ways[name].operands, strict=True):
                if operand.of_model:
                    wanted.setdefault(operand.name, set()).add(layout)
        held = {f: found.pop() if len(found) == 1 else WHOLE for f, found in wanted.items()}
        if self.kinds.family == AT_REST:
            held |= self._at_rest({*held} - {*whole})
        return held

    def _at_rest(self, names: set[str]) -> dict[str, Layout]:
        """Slices of weights that are split at rest: of those with several dimensions, along the
        first one that divides, unless a module that reads one runs only as it is built."""
        fixed = {o.name for op in self.axes.ops.values() for o in op.call.operands
                 if op.op.opaque or op.reason == WHOLE_STAGE
                 or (op.op.kind == "module" and not has_function(op.op))}  # fmt: skip
        found: dict[str, Layout] = {}
        for fqn in names - fixed:
            info = self.graph.tensors[fqn]
            dims = [n for n, size in enumerate(info.shape) if size and size % self.parts == 0]
            if info.kind == "parameter" and len(info.shape) > 1 and dims:
                found[fqn] = Layout("S", dims[0], (info.shape[dims[0]],))
        return found

    def converts(self, op: OpAxes) -> bool:
        """True if an op wants a tensor of the model in another layout than it is held in, or adds
        one later."""
        way = self.ways[op.op.name]
        pairs = zip(op.call.operands, way.operands, strict=True)
        return bool(way.added) or any(o.of_model and self.held[o.name] != w for o, w in pairs)

    # -- improvement ------------------------------------------------------------------------

    def _cost(self, value: str) -> float:
        """Bytes that are converted of one value."""
        have, about = self.given(value), self.graph.values[value]
        if not about.is_tensor:
            return 0.0
        wants = self._wants(self._readers.get(value, ()))
        if value in self._shown:
            wants.add(WHOLE)
        size = about.bytes(self.graph.batch_size)
        return size * sum(wire(have, want, self.parts, about.needs_gradient) for want in wants)

    def _wants(self, readers: Iterable[tuple[str, int]]) -> set[Layout]:
        return {self.ways[n].operands[i] if n in self.ways else WHOLE for n, i in readers}

    def _of_table(self, fqn: str) -> float:
        """Bytes for a table: where it is not had in slices, all of it is updated on every part, and
        those who want a slice cut it anew for each microbatch."""
        wants = self._wants(self._tables[fqn])
        info, alike = self.graph.tensors[fqn], len(wants) == 1
        if alike and next(iter(wants)).kind == "S":
            return 0.0
        found = sum(wire(WHOLE, one, self.parts, info.requires_grad) for one in wants if not alike)
        return info.bytes * (found + UPDATED * (self.parts - 1) / self.parts)

    def _around(self, name: str) -> tuple[float, int]:
        """Bytes that depend on the way of one op, and the operands that are converted."""
        way, about = self.ways[name], self.graph.values[name]
        size = about.bytes(self.graph.batch_size)
        found = sum(map(self._cost, dict.fromkeys(self._values[name])))
        read = self.axes.ops[name].call.operands
        found += sum(self._of_table(one.name) for one in read if one.name in self._tables)
        if way.axis is None:
            found += UNDIVIDED * size
        elif way.after is not None:
            found += size * wire(SUM, way.after, self.parts, about.needs_gradient)
        pairs = zip(read, way.operands, strict=True)
        return round(found, 3), sum(w != self.given(o.name) for o, w in pairs if not o.of_model)

    def _improve(self) -> None:
        """Makes the way of each op the cheapest beside its neighbours, there and back."""
        names = [name for name, ways in self.open.items() if len(ways) > 1]
        for name in [*names, *reversed(names)]:
            costs: list[tuple[tuple[float, int], int, Way]] = []
            for way in (self.ways[name], *self.open[name]):
                self.ways[name] = way
                costs.append((self._around(name), len(costs), way))
            self.ways[name] = min(costs, key=lambda one: one[:2])[2]


def _added_to(way: Way, other: Way) -> Way:
    """A sum over parts, to whose share of the total is added as another way does."""
    pairs = enumerate(zip(way.operands, other.operands, strict=True))
    wants = tuple(two if i in way.added else one for i, (one, two) in pairs)
    return replace(way, operands=wants, after=other.result)


def _looks_up(op: OpAxes, way: Way) -> bool:
    """True if the rows of a table are divided that samples look up, not places in a sequence."""
    ids = op.dims[op.call.role(0, "input") or 0] if op.call.name == "embedding" else ()
    samples = any(atom.extent.power for run in ids for atom in leaves(run))
    return samples and way.axis is op.classes
