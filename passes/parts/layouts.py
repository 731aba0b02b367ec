"""Layouts: the axis that each op is split along, and what each part then has of every value.

An op that is split wants operands with the axis as S and all others as R, and gives S, or P where
the axis is summed over.  An op that stays whole wants I and gives I: the same bits on all parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pdcompile.errors import ConfigError, some
from pdcompile.ir.graph import Attr, OpGraph, walk
from pdcompile.parts.shard import Shard
from pdcompile.passes.parts.atoms import Atom
from pdcompile.passes.parts.axes import Axes, OpAxes
from pdcompile.passes.parts.choice import Choice, divides
from pdcompile.passes.parts.families import Family
from pdcompile.passes.parts.layout import SPREAD, SUM, WHOLE, Layout


@dataclass(frozen=True, slots=True)
class OpLayout:
    """How one op is computed by parts.

    `operands` are the layouts that it wants, in the order of `calls.operands(op)`.  `result` is
    what it gives, of a container what its items are.  `added`: numbers of operands that are left
    out of the product and added to its total (the bias of a row-split linear): `result` is then
    P turned into `after`, to which they are added in the layouts that `operands` says.
    `draws`: it takes its own part of the draw for the whole value.
    `reason`: why it stays whole; "" for an op that is split, or that has nothing to split.
    """

    name: str
    axis: str
    operands: tuple[Layout, ...]
    result: Layout
    added: tuple[int, ...] = ()
    after: Layout | None = None
    items: Mapping[int, Layout] = field(default_factory=dict)
    draws: bool = False
    reason: str = ""

    @property
    def gives(self) -> Layout:
        """The layout of its value, once what is added is added."""
        return self.result if self.after is None else self.after


@dataclass(frozen=True, slots=True)
class Stays:
    """An op that costs something and stays whole."""

    op: str
    source: str
    reason: str
    flops: int


@dataclass(frozen=True)
class Layouts:
    """The layouts of one graph for a family of splits and a number of parts.

    `shards` are the tensors of the model of which each part holds a slice, `summed` those that are
    whole but whose gradients are sums over parts (R).  Every other tensor is I: an op that wants
    it otherwise converts it, as it does with a value.
    """

    family: Family
    parts: int
    ops: dict[str, OpLayout]
    shards: dict[str, Shard]
    summed: frozenset[str]
    stays: tuple[Stays, ...]
    graph: OpGraph = field(repr=False, compare=False)

    def of(self, name: str) -> Layout:
        """The layout of a value; graph inputs are whole."""
        found = self.ops.get(name)
        return WHOLE if found is None else found.gives

    def tensor(self, fqn: str) -> Layout:
        """The layout of a tensor of the model."""
        shard = self.shards.get(fqn)
        if shard is not None:
            return Layout("S", shard.dim, shard.sizes, shard.which)
        return SPREAD if fqn in self.summed else WHOLE

    def __str__(self) -> str:
        return "\n".join(_lines(self)) + "\n"


def lay_out(graph: OpGraph, family: Family, parts: int) -> Layouts:
    """Chooses the layouts of a graph.

    Raises:
        ConfigError: nothing of it divides in this way.
    """
    axes = Axes(graph)
    choice = Choice(axes, family, parts)
    ops = {name: _op_layout(choice, op) for name, op in axes.ops.items()}
    shards, summed = _tensors(axes, ops, parts)
    stays = tuple(
        Stays(name, axes.ops[name].op.source, _why(choice, axes.ops[name]), flops)
        for name, flops in choice.flops.items()
        if flops and not ops[name].axis
    )
    found = Layouts(family, parts, ops, shards, summed, stays, graph)
    _refuse(choice, found)
    return found


def _op_layout(choice: Choice, op: OpAxes) -> OpLayout:
    name = op.op.name
    label = choice.label(name)
    wants = tuple(choice.wanted(name, i) for i in range(len(op.call.operands)))
    if label.way is None:
        return OpLayout(name, "", wants, WHOLE, reason=op.reason)
    given = choice.given(name)
    added = op.added if label.way.summed else ()
    return OpLayout(
        name,
        choice.kinds.name(label.way.axis),
        wants,
        SUM if added else given,
        added=added,
        after=given if added else None,
        items=choice.items(name),
        draws=op.op.draw is not None,
    )


def _tensors(
    axes: Axes, ops: dict[str, OpLayout], parts: int
) -> tuple[dict[str, Shard], frozenset[str]]:
    """Tensors that all ops want split alike, and those whose gradients are all sums."""
    wanted: dict[str, set[Layout]] = {}
    for name, op in axes.ops.items():
        for operand, layout in zip(op.call.operands, ops[name].operands, strict=True):
            if operand.of_model:
                wanted.setdefault(operand.name, set()).add(layout)
    shards, summed = {}, set()
    for fqn, layouts in wanted.items():
        (layout, *others) = layouts
        if others or any(one.fqn == fqn for one in _shown_tensors(axes.graph)):
            continue
        if layout.kind == "S":
            sizes = tuple(size for size in layout.sizes if isinstance(size, int))
            shards[fqn] = Shard(fqn, layout.dim, sizes, layout.which, parts)
        elif layout.kind == "R":
            summed.add(fqn)
    return shards, frozenset(summed)


def _shown_tensors(graph: OpGraph) -> list[Attr]:
    """Tensors of the model that are output as they are."""
    return walk(graph.output, Attr)


def _why(choice: Choice, op: OpAxes) -> str:
    """Why a product stays whole."""
    if op.reason:
        return op.reason
    ways = choice.kinds.allowed(choice.family, op.ways())
    if not ways:
        return f"it has no axis of {choice.family}"
    names = dict.fromkeys(_sized(choice, way.axis) for way in ways)
    return f"{' and '.join(names)} do not divide by {choice.parts}"


def _refuse(choice: Choice, found: Layouts) -> None:
    """Refuses what divides nothing, and a sequence whose attention has too few heads."""
    stays = {one.op: one for one in found.stays}
    products = [name for name, flops in choice.flops.items() if flops]
    if len(stays) < len(products) or not products:
        return
    open_ways = {n: choice.kinds.allowed(found.family, choice.axes.ops[n].ways()) for n in products}
    axes = {
        way.axis: f"{_sized(choice, way.axis)} of {_place(choice.axes.ops[n])}"
        for n, ways in open_ways.items()
        for way in ways
    }
    remedy = "use split='samples'" if found.family != "samples" else "use parts=1"
    if not axes:
        first = found.stays[0]
        raise ConfigError(
            f"split={found.family!r} divides nothing: {first.reason}",
            where=first.source,
            remedy=remedy,
        )
    fits = [str(n) for n in range(2, 9) if any(divides(axis, n) for axis in axes)]
    raise ConfigError(
        f"parts={found.parts}: {some([*dict.fromkeys(axes.values())])} do not divide",
        where=found.stays[0].source,
        remedy=f"use parts={' or '.join(fits)}, or split='samples'" if fits else remedy,
    )


def _sized(choice: Choice, axis: Atom) -> str:
    return f"{choice.kinds.name(axis)} ({axis.extent})"


def _place(op: OpAxes) -> str:
    return op.op.module_path or op.op.source


def _lines(layouts: Layouts) -> Iterator[str]:
    """``split by width in 2 parts``, then an op a line, tensors, and what stays whole."""
    yield f"split by {layouts.family} in {layouts.parts} parts"
    for name, op in layouts.ops.items():
        if not op.axis:
            continue
        wants = ", ".join(map(str, op.operands))
        gives = op.result if op.after is None else f"{op.result}, total {op.after}"
        if op.items:
            gives = ", ".join(f"[{i}] {one}" for i, one in sorted(op.items.items()))
        draws = ", own part of the whole draw" if op.draws else ""
        yield f"  {name}: {op.axis}: ({wants}) -> {gives}{draws}"
    for fqn, shard in layouts.shards.items():
        yield f"  {shard}" if fqn == shard.fqn else f"  {fqn}: as {shard}"
    if layouts.summed:
        yield f"  gradients summed over parts: {', '.join(sorted(layouts.summed))}"
    for one in layouts.stays:
        yield f"  whole: {one.op} ({one.source}): {one.reason}"
