"""Shard: the slice of a tensor that each part of a stage holds.

A split dimension is a product of sizes, of which one is divided: the rows of a fused qkv with 4
heads are 3 x 4 x 16, and a part of two has 2 heads of each of q, k and v.  Its slice is then three
runs of rows, not one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Literal, TypeAlias

from pdcompile.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

#: what may be divided between parts, by the names of the option; "": nothing
Split: TypeAlias = Literal[
    "", "auto", "width", "width+sequence", "sequence", "context", "samples", "experts",
    "experts+samples", "weights+samples",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shard:
    """Part p of `parts` has the p-th of equal runs of the factor `which` of a dimension.

    `dim` is the dimension, and `sizes` are its factors, the outermost first.
    """

    fqn: str
    dim: int
    sizes: tuple[int, ...]
    which: int
    parts: int

    def __post_init__(self) -> None:
        positive = self.parts > 0 and self.dim >= 0 and all(size > 0 for size in self.sizes)
        if not (positive and 0 <= self.which < len(self.sizes)):
            self._refuse("is not a dimension of sizes above 0, of which one is divided")
        if self.sizes[self.which] % self.parts:
            self._refuse(f"does not divide: {self.sizes[self.which]} in {self.parts} parts")

    def __str__(self) -> str:
        factors = [str(size) for size in self.sizes]
        factors[self.which] = f"({factors[self.which]} in {self.parts} parts)"
        return f"{self.fqn}: dimension {self.dim} = {' x '.join(factors)}"

    @property
    def runs(self) -> int:
        """Runs of the dimension that a part's slice consists of."""
        return prod(self.sizes[: self.which])

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a part's slice of a tensor of this shape."""
        shape = tuple(shape)
        if len(shape) <= self.dim or shape[self.dim] != prod(self.sizes):
            self._refuse(f"is not of a tensor of shape {shape}")
        return (*shape[: self.dim], shape[self.dim] // self.parts, *shape[self.dim + 1 :])

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The shape of the tensor of which a part's slice has this one."""
        dim = self.dim
        return (*local[:dim], local[dim] * self.parts, *local[dim + 1 :])

    def own(self, whole: Tensor, part: int) -> Tensor:
        """A part's slice, in memory of its own."""
        import torch

        self.local_shape(whole.shape)
        runs = torch.unflatten(whole, self.dim, (self.runs, self.parts, -1))
        own = runs.select(self.dim + 1, part)
        return own.clone(memory_format=torch.contiguous_format).flatten(self.dim, self.dim + 1)

    def joined(self, slices: Sequence[Tensor]) -> Tensor:
        """The whole tensor, from the slices of all parts in order."""
        import torch

        if len(slices) != self.parts:
            self._refuse(f"has not {len(slices)} slices")
        runs = [torch.unflatten(one, self.dim, (self.runs, -1)) for one in slices]
        return torch.stack(runs, self.dim + 1).flatten(self.dim, self.dim + 2)

    def _refuse(self, why: str) -> None:
        raise PlanError(
            f"the slice {self.dim}, {self.sizes}, {self.which} in {self.parts} parts {why}",
            where=self.fqn,
            remedy="make the plan again, for this model",
        )


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a model between the parts of a stage.

    `shards` are the tensors of which each part has a slice, by FQN; every other one is whole on all
    parts.  `summed` of these have a share of their gradient on each.  `outputs` are those of
    training of which each part has its slice, as nobody but the loss reads them.  `stage_of`: where
    some stages are whole, the stage for which each op of training was written.
    """

    parts: int = 1
    split: Split = ""
    shards: Mapping[str, Shard] = field(default_factory=dict)
    summed: frozenset[str] = frozenset()
    outputs: Mapping[str, Shard] = field(default_factory=dict)
    stage_of: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)

    def own(self, fqn: str, whole: Tensor, part: int) -> Tensor:
        """Return what a part holds of a tensor."""
        shard = self.shards.get(fqn)
        return whole if shard is None else shard.own(whole, part)
