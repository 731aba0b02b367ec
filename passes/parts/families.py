"""Families of splits: which kinds of axes an op may be split along, and which it prefers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pdcompile.parts.shard import Split
from pdcompile.passes.costs.costed_op import costed_ops
from pdcompile.passes.costs.flops import rule_of
from pdcompile.passes.parts.atoms import Atom, Extent, leaves
from pdcompile.passes.parts.axes import ATTENTION, Axes, OpAxes, Way
from pdcompile.passes.parts.layout import SUM
from pdcompile.passes.parts.shares import GROUPED

Kind = Literal["width", "sequence", "samples", "experts"]

AT_REST: Split = "weights+samples"  # slices of weights, which are gathered before use
#: Kinds of axes by split, the one that is preferred first.
FAMILIES: dict[Split, tuple[Kind, ...]] = {
    "width": ("width",),
    "width+sequence": ("width", "sequence"),
    "sequence": ("sequence", "width"),
    "context": ("sequence",),
    "samples": ("samples",),
    AT_REST: ("samples",),
    "experts": ("experts", "width"),
    "experts+samples": ("experts", "samples"),
}


@dataclass(frozen=True)
class Kinds:
    """Kind of the axis of an atom: samples, experts, weights of products, or else a sequence.

    Experts are what several matrices of a weight are for, each for its rows of the other factor.
    `asked`: families of ops, by name, that are divided otherwise than by `family`.
    """

    family: Split
    width: frozenset[Atom | None]
    names: dict[Atom, str]
    experts: frozenset[Atom | None] = frozenset()  # where the family divides by them
    weights: frozenset[str] = frozenset()  # values that are made of the model's tensors alone
    asked: Mapping[str, Split] = field(default_factory=dict)

    @staticmethod
    def of(axes: Axes, family: Split, asked: Mapping[str, Split]) -> Kinds:
        found: set[Atom | None] = set()
        experts: set[Atom | None] = set()
        names: dict[Atom, str] = {}
        weights: set[str] = set()  # such as a transposed one
        tensors = axes.graph.tensors
        calls = costed_ops(axes.graph, axes.graph.batch_size)
        for call, op in zip(calls, axes.ops.values(), strict=True):
            read = op.call.operands
            if read and all(tensors[one.name].kind == "parameter" if one.of_model
                            else one.name in weights for one in read):  # fmt: skip
                weights.add(op.op.name)
            if op.classes is not None and op.call.name != GROUPED:
                names.setdefault(op.classes, "vocabulary")
            if not rule_of(call).product and op.call.name != "embedding":
                continue
            _name(op, weights, names)
            if any("experts" in FAMILIES[one] for one in {family, *asked.values()}):
                experts.update(_experts(op, weights))
            for number, dims in op.dims.items():
                operand = read[number]
                rows = op.call.name == "embedding" and number == op.call.role(0, "input")
                if not rows and (operand.of_model or operand.name in weights):
                    found.update(atom for run in dims for atom in leaves(run))
        names |= {axis: "experts" for axis in experts if axis and names.get(axis) != "heads"}
        return Kinds(
            family, frozenset(found), names, frozenset(experts - {None}), frozenset(weights), asked
        )

    def family_of(self, op: OpAxes) -> Split:
        """The family that an op is divided by."""
        return self.asked.get(op.op.name, self.family)

    def by_width(self, op: OpAxes) -> bool:
        """True if weights of an op are divided first."""
        family = self.family_of(op)
        return "width" in FAMILIES[family] and family != "sequence"

    @property
    def other(self) -> Kind:
        """Kind of the axes that the rest is divided along."""
        return FAMILIES[self.family][-1]

    def name(self, axis: Atom) -> str:
        """Name of the axis in messages."""
        return self.names.get(axis, "hidden") if axis in self.width else self.kind(axis)

    def kind(self, axis: Atom, family: Split = "experts") -> Kind:
        if axis.extent.power:
            return "samples"
        if axis in self.experts and "experts" in FAMILIES[family]:
            return "experts"
        return "width" if axis in self.width else "sequence"

    def allowed(self, op: OpAxes) -> list[Way]:
        """The ways of an op along axes of the family."""
        family = self.family_of(op)
        kinds = {way: self.kind(way.axis, family) for way in op.ways if way.axis}
        numbered = op.classes if op.call.name == GROUPED or not self.by_width(op) else None
        return [
            way for way, kind in kinds.items() if kind in FAMILIES[family]
            and (kind == "experts" or (way.axis is not numbered and SUM not in way.operands))
        ]  # fmt: skip

    def preferred(self, op: OpAxes, ways: Sequence[Way]) -> list[Way]:
        """The ways that a product is to be split along: those of the first kind that it has.

        A sequence that the op also has elsewhere, as the keys of an attention, comes last; after it
        the width of an attention's values, along which scores are not divided.
        """
        ranks = [self._rank(op, way) for way in ways]
        return [way for way, rank in zip(ways, ranks, strict=True) if rank == min(ranks)]

    def _rank(self, op: OpAxes, way: Way) -> int:
        assert way.axis is not None
        family = self.family_of(op)
        kinds, kind = FAMILIES[family], self.kind(way.axis, family)
        apart = kind == "sequence" and family != "context" and not _alone(op, way)
        if kind == "experts" and not self.by_width(op) and not _matrices(op, way, self.weights):
            return len(kinds)  # a router, which is not worth that its tokens are exchanged
        if (family, op.call.name, self.name(way.axis)) == ("sequence", ATTENTION, "hidden"):
            return len(kinds) + 1
        return len(kinds) if apart else kinds.index(kind)


def divides(axis: Atom | None, parts: int) -> bool:
    """True if every part gets an equal share of an axis; of samples, wherever b divides."""
    if axis is None or axis.extent.power:
        return axis is not None and axis.extent == Extent(1, 1)
    return not axis.extent.tag and axis.extent.number > 0 and axis.extent.number % parts == 0


def _name(op: OpAxes, weights: set[str], names: dict[Atom, str]) -> None:
    """Notes heads: what both factors of a product of activations have, and its result too."""
    read = op.call.operands
    made = {i for i, one in enumerate(read) if not one.of_model and one.name not in weights}
    for way in op.ways:
        split = {i for i in made if way.operands[i].kind == "S"}
        if way.axis and not way.axis.extent.power and len(split) > 1 and way.result != SUM:
            names.setdefault(way.axis, "heads")


def _experts(op: OpAxes, weights: Collection[str]) -> Iterator[Atom | None]:
    """Axes along which the rows of an op have a matrix each."""
    if op.call.name == GROUPED:
        yield op.classes
    for way in op.ways:
        split = {i for i, one in enumerate(way.operands) if one.kind == "S"}
        matrices = _matrices(op, way, weights)
        if matrices and split - matrices and way.result.kind == "S" and "conv" not in op.call.name:
            yield way.axis


def _matrices(op: OpAxes, way: Way, weights: Collection[str]) -> set[int]:
    """Weights that a way splits, of which each part then has whole matrices."""
    return {i for i, one in enumerate(op.call.operands) if one.of_model or one.name in weights
            if way.operands[i].kind == "S" and len(op.dims[i]) > 2}  # fmt: skip


def _alone(op: OpAxes, way: Way) -> bool:
    """True if the op has the axis in no other place than where the way splits it."""
    places = {i: sum(atom is way.axis for run in dims for atom in leaves(run))
              for i, dims in op.dims.items()}  # fmt: skip
    return all(many == (way.operands[i].kind == "S") for i, many in places.items())
