"""Layout: what each part of a stage has of one value.

I  whole, and so is its gradient          S  split along a dimension, or a factor of one
R  whole, its gradient a sum over parts   P  a sum over parts, its gradient whole
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Literal

from pdcompile.ir.graph import Affine, Size


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of one value: the piece that each part holds.

    For S: dimension `dim` is the product of `sizes`, and part p has the p-th of equal runs of the
    factor `which`, as in `pdcompile.parts.Shard`.
    """

    kind: Literal["I", "R", "S", "P"]
    dim: int = 0
    sizes: tuple[Size, ...] = ()
    which: int = 0

    @property
    def runs(self) -> Size:
        """Equal runs of the dimension of which each part has its share."""
        return product(self.sizes[: self.which])

    def local(self, shape: Sequence[Size], parts: int) -> tuple[Size, ...]:
        """The shape of what one part has."""
        if self.kind != "S":
            return tuple(shape)
        return (*shape[: self.dim], share(shape[self.dim], parts), *shape[self.dim + 1 :])

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        if len(self.sizes) == 1:
            return f"S({self.dim})"
        factors = [str(size) for size in self.sizes]
        factors[self.which] = f"[{factors[self.which]}]"
        return f"S({self.dim}: {' x '.join(factors)})"


WHOLE, SPREAD, SUM = Layout("I"), Layout("R"), Layout("P")


def share(size: Size, parts: int) -> Size:
    """A part's share of a size."""
    if not isinstance(size, Affine):
        return size // parts
    shared = gcd(size.scale, parts)
    return Affine(size.scale // shared, over=parts // shared)


def product(sizes: Sequence[Size]) -> Size:
    """The product of sizes of which at most one depends on the microbatch."""
    scale = prod(size.scale if isinstance(size, Affine) else size for size in sizes)
    return Affine(scale) if any(isinstance(size, Affine) for size in sizes) else scale


#: Bytes that one part sends for each byte of the whole value, times parts / (parts - 1): of the
#: conversion between two kinds of layouts, forward and backward.
_WIRE = {
    ("I", "R"): (0, 2), ("I", "S"): (0, 1), ("S", "I"): (1, 0), ("S", "R"): (1, 1),
    ("P", "I"): (2, 0), ("P", "R"): (2, 2), ("P", "S"): (1, 1),
}  # fmt: skip


def wire(have: Layout, want: Layout, parts: int, gradient: bool) -> float:
    """Bytes that one part sends for each byte of the value, to convert it and its gradient."""
    if have == want:
        return 0.0
    forward, backward = _WIRE.get((have.kind, want.kind), (1 / parts, 1 / parts))
    return (forward + backward * gradient) * (parts - 1) / parts
