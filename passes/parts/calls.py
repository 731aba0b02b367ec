"""Ops as the rules see them: a plain name, operands in order, arguments by position or name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pdcompile.ir.graph import Affine, Attr, ListOf, Op, OpGraph, Ref, TensorInfo, Value, walk
from pdcompile.passes.costs.costed_op import plain_name
from pdcompile.passes.parts.atoms import Extent, extent


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an op reads: `name` is a value, or an FQN of the model's (`of_model`).

    `slot` is the argument that it is (`alone`) or is in: position, keyword, a module's name for it.
    """

    name: str
    slot: int | str
    of_model: bool = False
    alone: bool = True


def operands(op: Op) -> tuple[Operand, ...]:
    """The tensors among an op's arguments in order of appearance, then those of its module."""
    found: list[Operand] = []
    given: list[tuple[int | str, Any]] = [*enumerate(op.args), *op.kwargs]
    for slot, argument in given:
        for part in walk(argument, (Ref, Attr)):
            name = part.name if isinstance(part, Ref) else part.fqn
            found.append(Operand(name, slot, isinstance(part, Attr), part is argument))
    if op.kind in ("module", "opaque"):
        own = dict.fromkeys((*op.parameters, *op.buffers_read, *op.buffers_written))
        found += [Operand(fqn, fqn.rpartition(".")[2], of_model=True) for fqn in own]
    return tuple(found)


@dataclass(frozen=True)
class Call:
    """One op of a graph."""

    op: Op
    graph: OpGraph

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        return operands(self.op)

    @cached_property
    def name(self) -> str:
        return plain_name(self.op)

    def role(self, position: int, name: str) -> int | None:
        """Number of the operand that is this argument; None where it is not given, or no tensor."""
        return next((i for i in self.inside(position, name) if self.operands[i].alone), None)

    def inside(self, position: int, name: str) -> tuple[int, ...]:
        """Numbers of the operands inside an argument."""
        found = enumerate(self.operands)
        return tuple(i for i, operand in found if operand.slot in (position, name))

    def argument(self, position: int, names: str, default: Any = None) -> Any:
        """An argument, or one that the module was made with, by ``name|name``; lists are tuples."""
        known = dict(self.op.constructor) | dict(self.op.kwargs)
        args = () if self.op.kind == "module" else self.op.args
        by_name = (known[name] for name in names.split("|") if name in known)
        given = args[position] if position < len(args) else next(by_name, default)
        return given.items if isinstance(given, ListOf) else given

    def about(self, number: int) -> Value | TensorInfo:
        """An operand as it stands in the model."""
        operand = self.operands[number]
        known = self.graph.tensors if operand.of_model else self.graph.values
        return known[operand.name]

    def rank(self, number: int) -> int:
        return len(self.about(number).shape)

    def extents(self, number: int) -> tuple[Extent, ...]:
        """Sizes of an operand, as extents."""
        return extents(self.about(number))

    @property
    def out(self) -> tuple[Extent, ...]:
        return extents(self.graph.values[self.op.name])


def extents(about: Value | TensorInfo) -> tuple[Extent, ...]:
    """The sizes of a value or tensor of the model."""
    if isinstance(about, TensorInfo):
        return tuple(map(extent, about.shape))
    return tuple(
        extent(size, f"?{about.name}.{i}" if i in about.varies else "")
        for i, size in enumerate(about.shape)
    )


def whole_numbers(given: Any, rest: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Sizes or dimensions, given as one tuple or one after the other."""
    first = given.items if isinstance(given, ListOf) else given
    found = first if isinstance(first, tuple) else (first, *rest)
    return tuple(one for one in found if isinstance(one, int | Affine))
