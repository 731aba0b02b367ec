"""Atoms: the factors that dimensions are products of, joined where two dimensions are the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from pdcompile.ir.graph import Affine, Size


class Extent(NamedTuple):
    """A size as ``number * b**power``; `tag` names one that is no such product."""

    number: int
    power: int = 0
    tag: str = ""

    def divides(self, other: Extent) -> bool:
        """True if `other` is a whole multiple for every microbatch size."""
        if self.tag or other.tag or not self.number:
            return self == other
        return other.number % self.number == 0 and self.power <= other.power

    def over(self, other: Extent) -> Extent:
        """The quotient by an extent that divides it."""
        if self == other:
            return ONE
        return Extent(self.number // other.number, self.power - other.power)

    @property
    def size(self) -> Size | None:
        """The size as shapes have it; None where no shape can."""
        if self.tag or self.power > 1:
            return None
        return Affine(self.number) if self.power else self.number

    def __str__(self) -> str:
        powers = ["b"] * self.power
        number = [] if powers and self.number == 1 else [str(self.number)]
        return self.tag or "*".join(number + powers)


ONE = Extent(1)


def extent(size: Size, tag: str = "") -> Extent:
    """The extent of a dimension; `tag` is given where its size depends on values."""
    if tag or (isinstance(size, Affine) and size.offset):
        return Extent(0, 0, tag or str(size))
    return Extent(size.scale, 1) if isinstance(size, Affine) else Extent(size)


@dataclass(eq=False, slots=True)
class Atom:
    """A factor of dimensions, known by identity.

    `factors` is what it turned out to be: the atom that it was joined with, or several that it is
    the product of, the outermost first.
    """

    extent: Extent
    factors: tuple[Atom, ...] = ()
    number: int = field(default_factory=count().__next__)

    def __repr__(self) -> str:
        return f"<{self.number}: {self.extent}>"


Run = tuple[Atom, ...]  # a dimension, or a part of one: a product, the outermost factor first


def leaves(run: Iterable[Atom]) -> Run:
    """The atoms of a run as they are now: none that was divided or joined, none of size one."""
    found: list[Atom] = []
    waiting = [*run][::-1]
    while waiting:
        atom = waiting.pop()
        if atom.factors:
            while len(atom.factors) == 1 and len(atom.factors[0].factors) == 1:
                atom.factors = atom.factors[0].factors  # shorter paths for the next to ask
            waiting.extend(reversed(atom.factors))
        elif atom.extent != ONE:
            found.append(atom)
    return tuple(found)


def fresh(size: Extent) -> Run:
    """A dimension of which nothing is known but its size."""
    return () if size == ONE else (Atom(size),)


def join(one: Sequence[Atom], other: Sequence[Atom]) -> bool:
    """Makes two runs the same atoms from now on; False where their sizes do not allow it."""
    left, right = [*leaves(one)][::-1], [*leaves(other)][::-1]
    while left and right:
        x, y = left.pop(), right.pop()
        if x is y:
            continue
        if x.extent == y.extent:
            y.factors = (x,)
        elif x.extent.divides(y.extent):
            right.append(_divided(y, x))
        elif y.extent.divides(x.extent):
            left.append(_divided(x, y))
        else:
            return False
        left, right = [*leaves(left[::-1])][::-1], [*leaves(right[::-1])][::-1]
    return not left and not right


def _divided(atom: Atom, first: Atom) -> Atom:
    """The rest of an atom whose outermost factor is `first`."""
    rest = Atom(atom.extent.over(first.extent))
    atom.factors = (first, rest)
    return rest


def whole_extent(run: Iterable[Atom]) -> Extent:
    """The size of a dimension."""
    number, power = 1, 0
    for atom in leaves(run):
        if atom.extent.tag:
            return atom.extent
        number, power = number * atom.extent.number, power + atom.extent.power
    return Extent(number, power)
