"""Families of splits: which kinds of axes an op may be split along, and which it prefers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from pdcompile.passes.costs.costed_op import costed_ops
from pdcompile.passes.costs.flops import rule_of
from pdcompile.passes.parts.atoms import Atom, leaves
from pdcompile.passes.parts.axes import Axes, OpAxes, Way

Family = Literal["width", "width+sequence", "sequence", "context", "samples"]
FAMILIES: tuple[Family, ...] = get_args(Family)
Kind = Literal["width", "sequence", "samples"]

_ALLOWED: dict[Family, tuple[Kind, ...]] = {
    "width": ("width",),
    "width+sequence": ("width", "sequence"),
    "sequence": ("sequence", "width"),
    "context": ("sequence",),
    "samples": ("samples",),
}


@dataclass(frozen=True)
class Kinds:
    """What kind of axis an atom is: of samples, of weights of products, or else of a sequence."""

    width: frozenset[Atom]
    names: dict[Atom, str] = field(default_factory=dict)

    @staticmethod
    def of(axes: Axes) -> Kinds:
        found: set[Atom] = set()
        names: dict[Atom, str] = {}
        weights = _of_the_model(axes)
        calls = costed_ops(axes.graph, axes.graph.batch_size)
        for call, op in zip(calls, axes.ops.values(), strict=True):
            if not rule_of(call).product and op.call.name != "embedding":
                continue
            _name(op, weights, names)
            for number, dims in op.dims.items():
                operand = op.call.operands[number]
                rows = op.call.name == "embedding" and number == op.call.role(0, "input")
                if not rows and (operand.of_model or operand.name in weights):
                    found.update(atom for run in dims for atom in leaves(run))
        return Kinds(frozenset(found), names)

    def name(self, axis: Atom) -> str:
        """What people call the axis."""
        return self.names.get(axis, "hidden") if axis in self.width else self.kind(axis)

    def kind(self, axis: Atom) -> Kind:
        if axis.extent.power:
            return "samples"
        return "width" if axis in self.width else "sequence"

    def allowed(self, family: Family, ways: Iterable[Way]) -> list[Way]:
        """The ways along axes of the family."""
        return [way for way in ways if self.kind(way.axis) in _ALLOWED[family]]

    def preferred(self, family: Family, op: OpAxes, ways: Sequence[Way]) -> list[Way]:
        """The ways that a product is to be split along: those of the first kind that it has.

        A sequence that the op also has elsewhere, as the keys of an attention, comes last.
        """
        ways = self.allowed(family, ways)
        ranks = {id(way): self._rank(family, op, way) for way in ways}
        best = min(ranks.values(), default=0)
        return [way for way in ways if ranks[id(way)] == best]

    def _rank(self, family: Family, op: OpAxes, way: Way) -> int:
        kind = self.kind(way.axis)
        apart = kind == "sequence" and family != "context" and not _alone(op, way)
        return len(_ALLOWED[family]) if apart else _ALLOWED[family].index(kind)


def _name(op: OpAxes, weights: set[str], names: dict[Atom, str]) -> None:
    """Notes heads, which both factors of a product of activations have, and the vocabulary."""
    read = op.call.operands
    activations = {i for i, one in enumerate(read) if not one.of_model and one.name not in weights}
    for way in op.ways():
        if (
            not way.axis.extent.power
            and len(activations & way.operands.keys()) > 1
            and not way.summed
        ):
            names.setdefault(way.axis, "heads")


def _alone(op: OpAxes, way: Way) -> bool:
    """True if the op has the axis in no other place than where the way splits it."""
    for number, dims in op.dims.items():
        places = [atom for run in dims for atom in leaves(run)].count(way.axis)
        if places != (number in way.operands):
            return False
    return True


def _of_the_model(axes: Axes) -> set[str]:
    """Values that are made of the model's tensors alone: a transposed weight."""
    found: set[str] = set()
    for name, op in axes.ops.items():
        read = op.call.operands
        if read and all(
            axes.graph.tensors[one.name].kind == "parameter" if one.of_model else one.name in found
            for one in read
        ):
            found.add(name)
    return found
