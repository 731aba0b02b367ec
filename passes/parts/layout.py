"""Layout: what each part of a stage has of one value.

I  whole, and so is its gradient          S  split along a dimension, or a factor of one
R  whole, its gradient a sum over parts   P  a sum over parts, its gradient whole
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Literal, NamedTuple

from pdcompile.ir.graph import Affine, Argument, Size


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


#: By the kinds of two layouts, the conversion between them, and the bytes that one part sends for
#: each byte of the whole value, times parts / (parts - 1): in its forward, and backward.
_CONVERSIONS = {
    ("I", "R"): ("spread", 0, 2), ("I", "S"): ("own", 0, 1), ("S", "I"): ("gather", 1, 0),
    ("S", "R"): ("gather", 1, 1), ("P", "I"): ("total", 2, 0), ("P", "R"): ("total", 2, 2),
    ("P", "S"): ("scatter", 1, 1),
}  # fmt: skip


NEVER = 1e9  # bytes: nothing is made a share of a sum


def wire(have: Layout, want: Layout, parts: int, gradient: bool) -> float:
    """Bytes that one part sends for each byte of the value, to convert it and its gradient."""
    if have == want:
        return 0.0
    if want == SUM:
        return NEVER
    swapped = "swap", 1 / parts, 1 / parts
    _, forward, backward = _CONVERSIONS.get((have.kind, want.kind), swapped)
    return (forward + backward * gradient) * (parts - 1) / parts


class Conversion(NamedTuple):
    """A conversion between two layouts: a function of `pdcompile.parts.conversions`."""

    name: str
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()


def conversion(have: Layout, want: Layout) -> Conversion | None:
    """The conversion from one layout to another; None where the value is used as it is."""
    if have == want or (have.kind, want.kind) in (("R", "I"), ("R", "R")):
        return None
    split = [one for one in (have, want) if one.kind == "S"]
    words = ("old_runs", "new_runs") if len(split) == 2 else ("runs",)
    name = _CONVERSIONS.get((have.kind, want.kind), ("swap" if have.kind == "S" else "own",))[0]
    runs = [(word, one.runs) for word, one in zip(words, split, strict=False) if one.runs != 1]
    spread = [("spread", True)] if name == "gather" and want == SPREAD else []
    return Conversion(name, tuple(one.dim for one in split), (*runs, *spread))
