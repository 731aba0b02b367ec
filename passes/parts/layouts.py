"""Layouts: the axis that each op is split along, and what each part then has of every value.

An op that is split wants operands with the axis as S and all others as R, and gives S, or P where
the axis is summed over.  An op that stays whole wants I and gives I: the same bits on all parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from pdcompile.errors import ConfigError, some
from pdcompile.ir.graph import OpGraph, Ref, walk
from pdcompile.parts.shard import Shard, Split
from pdcompile.passes.parts.asked import Asked, asked
from pdcompile.passes.parts.atoms import Atom, leaves
from pdcompile.passes.parts.axes import ATTENTION, WHOLE_STAGE, Axes, OpAxes, Way
from pdcompile.passes.parts.choice import Choice
from pdcompile.passes.parts.families import AT_REST, FAMILIES, divides
from pdcompile.passes.parts.layout import SPREAD, WHOLE, Layout
from pdcompile.passes.parts.local import has_function
from pdcompile.passes.stages.held_tensors import users
from pdcompile.problem.constraints import Split as Wished

GROUPED_EXPERTS = "experts_implementation='grouped_mm' of a model of transformers"


@dataclass(frozen=True, slots=True)
class Cut:
    """Stages of which some are whole: values that cross between stages are whole then, and so are
    tensors that several stages hold.

    `stage_of` each op; `parts` of each stage.
    """

    stage_of: Mapping[str, int] = field(default_factory=dict)
    parts: Sequence[int] = ()

    def crossing(self, graph: OpGraph) -> frozenset[str]:
        """Values that are read on another stage than they are made on."""
        places = self.stage_of
        return frozenset(
            name for op in graph.ops for name in op.inputs
            if name in places and places[name] != places[op.name]
        )  # fmt: skip

    def shared(self, graph: OpGraph) -> set[str]:
        """Tensors that several stages use."""
        found = users(graph, self.stage_of) if self.stage_of else {}
        return {fqn for fqn, stages in found.items() if len(stages) > 1}


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

    `held` are those of tensors of the model.  An op that wants one otherwise converts it, as it
    does with a value.  `axes` are the names of what ops are split along, `shown` values that the
    caller reads, or that cross between stages of a `Cut`, whose stages are `stage_of`.
    """

    family: Split
    parts: int
    ops: dict[str, Way]
    axes: dict[str, str]
    shown: frozenset[str]
    held: dict[str, Layout]
    stays: tuple[Stays, ...]
    graph: OpGraph = field(repr=False, compare=False)
    stage_of: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    notes: tuple[str, ...] = ()
    of_samples: bool = False  # some ops are divided by samples

    def of(self, name: str) -> Layout:
        """The layout of a value; graph inputs are whole."""
        found = self.ops.get(name)
        return WHOLE if found is None else found.gives

    def tensor(self, fqn: str) -> Layout:
        """The layout of a tensor of the model."""
        return self.held.get(fqn, WHOLE)

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """The slices of tensors that each part holds."""
        split = {f: one for f, one in self.held.items() if one.kind == "S"}
        return {fqn: shard_of(fqn, one, self.parts) for fqn, one in split.items()}

    @property
    def summed(self) -> frozenset[str]:
        """Tensors that are whole, and whose gradients are sums over parts."""
        return frozenset(fqn for fqn, one in self.held.items() if one == SPREAD)

    def __str__(self) -> str:
        return "\n".join(_lines(self)) + "\n"


def lay_out(
    graph: OpGraph, family: Split, parts: int, *, outputs: bool = True, cut: Cut | None = None,
    splits: Sequence[Wished] = (),
) -> Layouts:  # fmt: skip
    """Chooses the layouts of a graph.

    Args:
        outputs: the caller reads the model's outputs.  Where not, those that the loss reads may
            stay split, as logits do along the vocabulary.
        cut: stages of which some are whole; None: all are divided.
        splits: modules that are divided otherwise.

    Raises:
        ConfigError: nothing of it divides in this way, or not what is to be divided.
    """
    if splits and family == AT_REST:
        raise ConfigError(
            f"split={family!r} holds slices of all weights, and {splits[0]} others",
            where="split",
            remedy="split='samples' or another one",
        )
    axes, cut = Axes.of(graph), cut or Cut()
    for name, stage in cut.stage_of.items():
        if cut.parts[stage] == 1:
            axes.ops[name] = replace(axes.ops[name], loops={}, reason=WHOLE_STAGE)
    wishes = asked(axes, splits, evaluates=not graph.training)
    shown = _shown(graph, outputs) | cut.crossing(graph)
    choice = _chosen(axes, family, parts, shown, cut.shared(graph), wishes)
    ops = choice.ways
    names = {name: choice.kinds.name(way.axis) for name, way in ops.items() if way.axis}
    products = {name: flops for name, flops in choice.flops.items() if not ops[name].axis}
    stays = [Stays(name, axes.ops[name].op.source, _why(choice, axes.ops[name]), flops)
             for name, flops in products.items() if flops]  # fmt: skip
    stays += _whole_vocabularies(choice)
    found = Layouts(
        family, parts, ops, names, shown, choice.held, tuple(stays), graph, cut.stage_of,
        tuple(_notes(choice)),
        any(way.axis and way.axis.extent.power for way in ops.values()),
    )  # fmt: skip
    _refuse_unmet(choice)
    _refuse(choice, found)
    return found


def _shown(graph: OpGraph, outputs: bool) -> frozenset[str]:
    """Values that the caller reads."""
    by_loss = {name for op in graph.ops if op.region == "loss" for name in op.inputs}
    found = {ref.name for ref in walk(graph.output, Ref)} - (set() if outputs else by_loss)
    return frozenset(found & {op.name for op in graph.ops} | {graph.loss or ""})


def _whole_vocabularies(choice: Choice) -> Iterator[Stays]:
    """Tables and losses that stay whole because their vocabulary is not to be divided."""
    for name, op in choice.axes.ops.items():
        known = op.call.name in ("embedding", "crossentropy") and op.reason != WHOLE_STAGE
        known &= choice.kinds.by_width(op)
        if not known or choice.ways[name].axis is not None:
            continue
        own, runs = op.classes, [run for dims in op.dims.values() for run in dims]
        uneven = own and own.extent.number > choice.parts and not divides(own, choice.parts)
        of_samples = any(atom.extent.power for run in runs for atom in leaves(run))
        if op.reason or (uneven and of_samples):
            why = op.reason or f"{_sized(choice, own)} does not divide by {choice.parts}"
            yield Stays(name, op.op.source, why, 0)


def _chosen(
    axes: Axes, family: Split, parts: int, shown: frozenset[str], shared: Collection[str],
    wishes: Sequence[Asked],
) -> Choice:  # fmt: skip
    """The ways of all ops; a module that only runs as it is built stays whole, if it would have to
    be called on other tensors than its own."""
    while True:
        choice = Choice(axes, family, parts, shown, shared, wishes)
        stuck = [op for op in axes.ops.values() if op.op.kind == "module" and choice.converts(op)
                 and not has_function(op.op)]  # fmt: skip
        if not stuck:
            return choice
        reason = "no function does what this module does, on tensors in another layout"
        for op in stuck:
            axes.ops[op.op.name] = replace(op, loops={}, reason=reason)


def shard_of(fqn: str, layout: Layout, parts: int) -> Shard:
    """The slice that each part has of a tensor in a split layout."""
    sizes = tuple(size if isinstance(size, int) else parts for size in layout.sizes)
    return Shard(fqn, layout.dim, sizes, layout.which, parts)


def _why(choice: Choice, op: OpAxes) -> str:
    """Reason why a product stays whole."""
    if op.reason:
        return op.reason
    ways = choice.kinds.allowed(op)
    if not ways:
        one = ", as microbatches have one size alone" * choice.graph.sizes.is_one
        return f"it has no axis of {choice.kinds.family_of(op)}{one}"
    names = dict.fromkeys(_sized(choice, way.axis) for way in ways)
    return f"{' and '.join(names)} do not divide by {choice.parts}"


def _refuse(choice: Choice, found: Layouts) -> None:
    """Refuses what divides nothing or less than half, a sequence with too few heads, no experts."""
    kinds, ops = choice.kinds, choice.axes.ops
    last = "parts=1" if found.family.endswith("samples") else "split='samples'"
    stays = [one for one in found.stays if one.flops]
    _refuse_statistics(choice)
    if "experts" in FAMILIES[found.family]:
        _refuse_experts(choice, found)
    for name in choice.flops:
        if kinds.family_of(ops[name]) == "sequence":
            _refuse_heads(choice, ops[name], found)
    uneven, axes = 0, dict[Atom | None, str]()
    for one in stays:
        ways = kinds.allowed(ops[one.op])
        uneven += one.flops if ways else 0
        for way in ways:
            axes.setdefault(way.axis, f"{_sized(choice, way.axis)} of {_place(ops[one.op])}")
    if stays and uneven > sum(choice.flops.values()) / 2:
        said = f"parts={found.parts}: {some([*dict.fromkeys(axes.values())])} do not divide"
        remedy = _other_parts(axes, last)
    elif stays and not found.axes.keys() & choice.flops.keys():
        said = f"split={found.family!r} divides nothing: {stays[0].reason}"
        remedy = f"use {last}"
    else:
        return
    raise ConfigError(said, where=stays[0].source, remedy=remedy)


def _refuse_unmet(choice: Choice) -> None:
    """Refuses a constraint one of whose ops stays whole, or that finds no experts."""
    for one, names in choice.asked:
        ops, text = [choice.axes.ops[name] for name in names], str(one)
        whole = [op for op in ops if choice.ways[op.op.name].axis is None]
        experts = any(choice.ways[name].axis in choice.kinds.experts for name in names)
        if not choice.flops.keys().isdisjoint(names):
            why = [f"{_place(op)} ({op.op.source}) stays whole: {_why(choice, op)}" for op in whole]
        else:  # ops beside the one that has the axis may be whole
            why = [f"nothing of it has an axis that {choice.parts} parts divide so"]
            why *= len(whole) == len(ops)
        if one.axis.startswith("experts") and not experts:
            why = ["it has no experts that are computed together, or not so many"]
        if why:
            raise ConfigError(f"{text}: {why[0]}", where=text, remedy=f"leave out {text}")


def _refuse_statistics(choice: Choice) -> None:
    """Refuses batch norm in training where samples are split."""
    for op in choice.axes.ops.values():
        family = choice.kinds.family_of(op)
        if not family.endswith("samples"):
            continue
        samples = [a for loop in op.loops.values() if loop.kind == "whole" for a in leaves(loop.run)
                   if a.extent.power]  # fmt: skip
        if samples and op.call.name.startswith("batchnorm"):
            raise ConfigError(
                f"split={family!r}: {_place(op)} normalises by statistics of all samples of a "
                "microbatch, of which each part has its share alone",
                where=op.op.source,
                remedy="use split='width', replicas of the stage, or group norm in the model",
            )


def _refuse_experts(choice: Choice, found: Layouts) -> None:
    """Refuses what has no experts that are computed together, or none that divide."""
    if any(choice.ways[name].axis in choice.kinds.experts for name in choice.flops):
        return
    uneven, apart = _uneven_experts(choice), _experts_apart(choice.axes.ops.values())
    whole = any(op.reason == WHOLE_STAGE for op in choice.axes.ops.values())
    why = f"no product{' of stages in parts' * whole} has a matrix for each of several experts"
    remedy = "use split='width'"
    if apart:
        why = f"{_place(apart[0])} computes them one by one, or looks up a matrix for each token"
        remedy = f"use {GROUPED_EXPERTS}, or split='width'"
    if choice.kinds.experts and choice.kinds.asked:
        why = "constraints divide otherwise what has them"
    if uneven:
        why = f"{some([*uneven.values()])} do not divide by {found.parts}"
        remedy = _other_parts(uneven, "split='width'")
    raise ConfigError(
        f"parts={found.parts}, split={found.family!r} divides no experts: {why}",
        where=apart[0].op.source if apart else "split",
        remedy=remedy,
    )


def _uneven_experts(choice: Choice) -> dict[Atom | None, str]:
    """Experts that the parts cannot share equally, in words."""
    kinds, ops = choice.kinds, choice.axes.ops
    return {
        way.axis: f"{_sized(choice, way.axis)} of {_place(ops[name])}"
        for name in choice.flops for way in kinds.allowed(ops[name])
        if way.axis in kinds.experts and not divides(way.axis, choice.parts)
    }  # fmt: skip


def _experts_apart(ops: Iterable[OpAxes]) -> list[OpAxes]:
    """Opaque modules of experts, and look-ups of their matrices."""
    return [
        op for op in ops
        if (op.op.opaque and "expert" in op.op.module_path)
        or (op.call.name in ("getitem", "indexselect") and len(op.call.operands) > 1
            and op.call.operands[0].of_model and op.call.rank(0) > 2)
    ]  # fmt: skip


def _notes(choice: Choice) -> Iterator[str]:
    """Notes on ops that stay whole, or are divided otherwise than the split says."""
    if choice.kinds.experts and (uneven := _uneven_experts(choice)):
        yield f"{some([*uneven.values()])} do not divide: as in split='{choice.kinds.other}'"
    opaque = [op for op in choice.axes.ops.values() if op.op.opaque and op.op.parameters
              and op.reason != WHOLE_STAGE]  # fmt: skip
    if opaque:
        apart = _experts_apart(opaque)
        hint = f"; {GROUPED_EXPERTS} gives parts their experts op by op" if apart else ""
        shown = some(list(dict.fromkeys(map(_place, opaque))), 3)
        yield f"opaque modules are computed whole by each part: {shown}{hint}"


def _refuse_heads(choice: Choice, op: OpAxes, found: Layouts) -> None:
    ways, names = choice.kinds.allowed(op), choice.kinds.names
    heads = [way.axis for way in ways if way.axis and names.get(way.axis) == "heads"]
    if heads and found.axes.get(op.op.name, "hidden") == "hidden" and op.call.name == ATTENTION:
        count = " x ".join(str(axis.extent) for axis in heads)  # that keys have too
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
