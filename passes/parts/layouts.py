"""Layouts: the axis that each op is split along, and what each part then has of every value.

An op that is split wants operands with the axis as S and all others as R, and gives S, or P where
the axis is summed over.  An op that stays whole wants I and gives I: the same bits on all parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pdcompile.errors import ConfigError, some
from pdcompile.ir.graph import Attr, OpGraph, Ref, walk
from pdcompile.parts.shard import Shard, Split
from pdcompile.passes.parts.atoms import Atom, leaves
from pdcompile.passes.parts.axes import ATTENTION, WHOLE_STAGE, Axes, OpAxes, Way
from pdcompile.passes.parts.choice import Choice
from pdcompile.passes.parts.families import divides
from pdcompile.passes.parts.layout import SPREAD, WHOLE, Layout
from pdcompile.passes.parts.local import has_function


@dataclass(frozen=True, slots=True)
class Cut:
    """Stages of which some are whole: values that cross between stages are whole then, and so are
    tensors that several stages hold.

    `stage_of` each op; `whole_ops` are those of whole stages.
    """

    stage_of: Mapping[str, int] = field(default_factory=dict)
    whole_ops: frozenset[str] = frozenset()

    @classmethod
    def of(cls, stage_of: Mapping[str, int], parts: Sequence[int]) -> Cut:
        """The cut of stages with these numbers of parts."""
        return cls(stage_of, frozenset(op for op, s in stage_of.items() if parts[s] == 1))

    def crossing(self, graph: OpGraph) -> frozenset[str]:
        """Values that are read on another stage than they are made on."""
        places = self.stage_of
        return frozenset(
            name for op in graph.ops for name in op.inputs
            if name in places and places[name] != places[op.name]
        )  # fmt: skip

    def shared(self, graph: OpGraph) -> set[str]:
        """Tensors that several stages use."""
        users: dict[str, set[int]] = {}
        for op in graph.ops if self.stage_of else ():
            for fqn in op.used_tensors:
                users.setdefault(fqn, set()).add(self.stage_of[op.name])
        return {fqn for fqn, stages in users.items() if len(stages) > 1}


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
    it otherwise converts it, as it does with a value.  `axes` are the names of what ops are split
    along, `shown` values that the caller reads, or that cross between stages of a `Cut`, whose
    stages are `stage_of`.
    """

    family: Split
    parts: int
    ops: dict[str, Way]
    axes: dict[str, str]
    shown: frozenset[str]
    shards: dict[str, Shard]
    summed: frozenset[str]
    stays: tuple[Stays, ...]
    graph: OpGraph = field(repr=False, compare=False)
    stage_of: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)

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


def lay_out(
    graph: OpGraph, family: Split, parts: int, *, outputs: bool = True, cut: Cut | None = None
) -> Layouts:
    """Chooses the layouts of a graph.

    Args:
        outputs: the caller reads the model's outputs.  Where not, those that the loss reads may
            stay split, as logits do along the vocabulary.
        cut: stages of which some are whole; None: all are divided.

    Raises:
        ConfigError: nothing of it divides in this way.
    """
    axes, cut = Axes(graph), cut or Cut()
    for name in cut.whole_ops:
        axes.ops[name] = replace(axes.ops[name], loops={}, reason=WHOLE_STAGE)
    shown = _shown(graph, outputs) | cut.crossing(graph)
    shared = cut.shared(graph)
    choice, ops = _chosen(axes, family, parts, shown, shared)
    names = {name: choice.kinds.name(way.axis) for name, way in ops.items() if way.axis}
    held = _held(axes, ops, shared)
    shards = {f: shard_of(f, one, parts) for f, one in held.items() if one.kind == "S"}
    summed = frozenset(fqn for fqn, one in held.items() if one == SPREAD)
    stays = tuple(
        Stays(name, axes.ops[name].op.source, _why(choice, axes.ops[name]), flops)
        for name, flops in choice.flops.items()
        if flops and ops[name].axis is None
    )
    stays += tuple(_whole_vocabularies(choice, ops))
    found = Layouts(family, parts, ops, names, shown, shards, summed, stays, graph, cut.stage_of)
    _refuse(choice, found)
    return found


def _shown(graph: OpGraph, outputs: bool) -> frozenset[str]:
    """Values that the caller reads."""
    by_loss = {name for op in graph.ops if op.region == "loss" for name in op.inputs}
    found = {ref.name for ref in walk(graph.output, Ref)} - (set() if outputs else by_loss)
    return frozenset(found & {op.name for op in graph.ops} | {graph.loss or ""})


def _whole_vocabularies(choice: Choice, ops: Mapping[str, Way]) -> Iterator[Stays]:
    """Tables and losses that stay whole because their vocabulary is not to be divided."""
    for name, op in choice.axes.ops.items():
        if op.call.name not in ("embedding", "crossentropy") or ops[name].axis is not None:
            continue
        own, runs = op.classes, [run for dims in op.dims.values() for run in dims]
        uneven = own and own.extent.number > choice.parts and not divides(own, choice.parts)
        of_samples = any(atom.extent.power for run in runs for atom in leaves(run))
        if (
            op.reason != WHOLE_STAGE
            and choice.kinds.by_width
            and (op.reason or (uneven and of_samples))
        ):
            why = op.reason or f"{_sized(choice, own)} does not divide by {choice.parts}"
            yield Stays(name, op.op.source, why, 0)


def _chosen(
    axes: Axes, family: Split, parts: int, shown: frozenset[str], shared: Collection[str]
) -> tuple[Choice, dict[str, Way]]:
    """The way of each op; a module that only runs as it is built stays whole, if it would have to
    be called on other tensors than its own."""
    while True:
        choice = Choice(axes, family, parts, shown)
        ops = {name: choice.way(name) for name in axes.ops}
        held = _held(axes, ops, shared)
        modules = [op for op in axes.ops.values() if op.op.kind == "module"]
        stuck = [op for op in modules if _has_others(op, ops[op.op.name], held)]
        if not stuck:
            return choice, ops
        reason = "no function does what this module does, on tensors in another layout"
        for op in stuck:
            axes.ops[op.op.name] = replace(op, loops={}, reason=reason)


def _has_others(op: OpAxes, way: Way, held: dict[str, Layout]) -> bool:
    """True if a module without a function wants a tensor in another layout than it is held in."""
    pairs = zip(op.call.operands, way.operands, strict=True)
    others = bool(way.added) or any(o.of_model and held[o.name] != want for o, want in pairs)
    return others and not has_function(op.op)


def _held(axes: Axes, ops: dict[str, Way], shared: Collection[str]) -> dict[str, Layout]:
    """The layouts of tensors: that which all ops want; whole where they differ, in outputs, and
    where they are shared."""
    returned = [one.fqn for one in walk(axes.graph.output, Attr)]
    wanted: dict[str, set[Layout]] = {fqn: {WHOLE} for fqn in (*returned, *shared)}
    for name, op in axes.ops.items():
        for operand, layout in zip(op.call.operands, ops[name].operands, strict=True):
            if operand.of_model:
                wanted.setdefault(operand.name, set()).add(layout)
    return {fqn: found.pop() if len(found) == 1 else WHOLE for fqn, found in wanted.items()}


def shard_of(fqn: str, layout: Layout, parts: int) -> Shard:
    """The slice that each part has of a tensor in a split layout."""
    sizes = tuple(size if isinstance(size, int) else parts for size in layout.sizes)
    return Shard(fqn, layout.dim, sizes, layout.which, parts)


def _why(choice: Choice, op: OpAxes) -> str:
    """Why a product stays whole."""
    if op.reason:
        return op.reason
    ways = choice.kinds.allowed(op)
    if not ways:
        return f"it has no axis of {choice.kinds.family}"
    names = dict.fromkeys(_sized(choice, way.axis) for way in ways)
    return f"{' and '.join(names)} do not divide by {choice.parts}"


def _refuse(choice: Choice, found: Layouts) -> None:
    """Refuses what divides nothing or less than half, and a sequence with too few heads."""
    kinds, ops = choice.kinds, choice.axes.ops
    last = "parts=1" if found.family == "samples" else "split='samples'"
    stays = [one for one in found.stays if one.flops]
    if found.family == "samples":
        _refuse_statistics(ops.values())
    if found.family == "sequence":
        for name in choice.flops:
            _refuse_heads(choice, ops[name], found)
    uneven, axes = 0, dict[Atom | None, str]()
    for one in stays:
        ways = kinds.allowed(ops[one.op])
        uneven += one.flops if ways else 0
        for way in ways:
            axes.setdefault(way.axis, f"{_sized(choice, way.axis)} of {_place(ops[one.op])}")
    if stays and uneven > sum(choice.flops.values()) / 2:
        raise ConfigError(
            f"parts={found.parts}: {some([*dict.fromkeys(axes.values())])} do not divide",
            where=stays[0].source,
            remedy=_other_parts(axes, last),
        )
    if stays and not found.axes.keys() & choice.flops.keys():
        first = stays[0]
        raise ConfigError(
            f"split={found.family!r} divides nothing: {first.reason}",
            where=first.source,
            remedy=f"use {last}",
        )


def _refuse_statistics(ops: Iterable[OpAxes]) -> None:
    """Refuses batch norm in training where samples are split."""
    for op in ops:
        samples = [a for loop in op.loops.values() if loop.kind == "whole" for a in leaves(loop.run)
                   if a.extent.power]  # fmt: skip
        if samples and op.call.name.startswith("batchnorm"):
            raise ConfigError(
                f"split='samples': {_place(op)} normalises by statistics of all samples of a "
                "microbatch, of which each part has its share alone",
                where=op.op.source,
                remedy="use split='width', replicas of the stage, or group norm in the model",
            )


def _refuse_heads(choice: Choice, op: OpAxes, found: Layouts) -> None:
    heads = [way.axis for way in choice.kinds.allowed(op) if choice.kinds.is_heads(way.axis)]
    if heads and found.axes.get(op.op.name, "hidden") == "hidden" and op.call.name == ATTENTION:
        count = " x ".join(str(axis.extent) for axis in heads if axis)  # that keys have too
        raise ConfigError(
            f"split='sequence': attention at {op.op.source} has {count} heads, which "
            f"{found.parts} parts cannot share",
            where=op.op.source,
            remedy=_other_parts(heads, "split='context'"),
        )


def _other_parts(axes: Iterable[Atom | None], split: str) -> str:
    """A remedy: numbers of parts that fit all of the axes, or else one; or another split."""
    known = [*axes]
    every, some_do = (
        [str(n) for n in range(2, 9) if of(divides(axis, n) for axis in known)] for of in (all, any)
    )
    fits = every or some_do
    parts = [f"parts={' or '.join(fits)}"] if fits else []
    return f"use {', or '.join([*parts, split])}"


def _sized(choice: Choice, axis: Atom | None) -> str:
    assert axis is not None
    return f"{choice.kinds.name(axis)} ({axis.extent})"


def _place(op: OpAxes) -> str:
    return op.op.module_path or op.op.source


def _lines(layouts: Layouts) -> Iterator[str]:
    """``split by width in 2 parts``, then an op a line, tensors, and what stays whole."""
    yield f"split by {layouts.family} in {layouts.parts} parts"
    for name, axis in layouts.axes.items():
        way = layouts.ops[name]
        wants = ", ".join(map(str, way.operands))
        gives = ", ".join(f"[{i}] {one}" for i, one in sorted(way.results.items()))
        if layouts.graph.values[name].is_tensor:
            gives = str(way.result) if way.after is None else f"{way.result}, total {way.after}"
        yield f"  {name}: {axis}: ({wants}) -> {gives}"
    for fqn, shard in layouts.shards.items():
        yield f"  {shard}" if fqn == shard.fqn else f"  {fqn}: as {shard}"
    if layouts.summed:
        yield f"  gradients summed over parts: {', '.join(sorted(layouts.summed))}"
    for one in layouts.stays:
        yield f"  whole: {one.op} ({one.source}): {one.reason}"
