"""One op as a part computes it: sizes among its arguments are those of the part.

What an op that is split gets wrong if it is run on its operands' parts as it is: sizes that views
are given, sections, groups, what a module is built with, and a bias that every part would add.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pdcompile.ir.graph import Affine, Argument, ListOf, Op, OpGraph, Size, rewritten
from pdcompile.passes.costs.costed_op import plain_name
from pdcompile.passes.parts.calls import Call
from pdcompile.passes.parts.layouts import OpLayout

#: Arguments of modules that are a size of a tensor of theirs: its name and dimension.
_BUILT: dict[str, dict[str, tuple[str, int]]] = {
    "linear": {"out_features": ("weight", 0), "in_features": ("weight", 1)},
    "embedding": {"embedding_dim": ("weight", 1)},
    **{f"batchnorm{n}d": {"num_features": ("weight", 0)} for n in (1, 2, 3)},
}


def local_op(graph: OpGraph, op: Op, layout: OpLayout, parts: int) -> Op:
    """The op of one part; what is added to a sum (`layout.added`) is left out of it."""
    if not layout.axis:
        return op
    call = Call(op, graph)
    if op.mutates:
        op = _anew(op)
    if layout.added:
        op = _without(op, call, layout.added)
    change = _CHANGES.get(plain_name(op))
    return op if change is None else change(op, call, layout, parts)


def _anew(op: Op) -> Op:
    """The op that makes a new tensor where this one writes its operand."""
    last = op.target.rpartition(".")[2]
    kwargs = tuple((name, value) for name, value in op.kwargs if name != "inplace")
    built = tuple((name, value) for name, value in op.constructor if name != "inplace")
    target = op.target
    if target.startswith("operator.i"):
        target = f"operator.{last[1:]}"
    elif last.endswith("_"):
        target = target[:-1]
    args = op.args
    if op.kind == "function" and target.startswith("torch.nn.functional."):
        args = tuple(False if value is True else value for value in args)
    return replace(op, target=target, args=args, kwargs=kwargs, constructor=built, mutates=())


def _without(op: Op, call: Call, added: tuple[int, ...]) -> Op:
    """The op without the operands that are added to its sum."""
    if call.name == "addmm":
        first, second = (call.role(i, name) for i, name in ((1, "mat1"), (2, "mat2")))
        slots = [call.operands[i].slot for i in (first, second) if i is not None]
        named = dict(op.kwargs)
        read = [op.args[slot] if isinstance(slot, int) else named[slot] for slot in slots]
        return replace(op, kind="function", target="torch.mm", args=tuple(read), kwargs=())
    slots = [call.operands[i].slot for i in added]
    names = {call.operands[i].name for i in added}
    if op.kind == "module":
        built = tuple((name, value) for name, value in op.constructor if name != "bias")
        kept = tuple(fqn for fqn in op.parameters if fqn not in names)
        return replace(op, constructor=(*built, ("bias", False)), parameters=kept)
    args = tuple(None if i in slots else value for i, value in enumerate(op.args))
    kwargs = tuple((name, None if name in slots else value) for name, value in op.kwargs)
    kept = tuple(fqn for fqn in op.parameters if fqn not in names)
    return replace(op, args=args, kwargs=kwargs, parameters=kept)


def _resized(op: Op, call: Call, layout: OpLayout, parts: int) -> Op:
    """Sizes of a view: the part's, where a dimension is split."""
    shape = call.graph.values[op.name].shape
    local, dim = layout.result.local(shape, parts), layout.result.dim
    name = plain_name(op)
    if name in ("viewas", "reshapeas", "expandas") or (name == "squeeze" and len(op.args) == 1):
        target = {"viewas": "view", "expandas": "expand"}.get(name, "reshape")
        return replace(op, kind="method", target=target, args=(op.args[0], local), kwargs=())
    if layout.result.kind != "S":
        return op
    start = 0
    if name == "unflatten":
        start = int(call.argument(1, "dim")) % call.rank(0)
    first = 2 if name == "unflatten" else 1

    def sizes(given: tuple[Any, ...]) -> tuple[Any, ...]:
        at = dim - start
        if not 0 <= at < len(given) or given[at] == -1:
            return given
        return (*given[:at], local[dim], *given[at + 1 :])

    if len(op.args) <= first:
        return replace(op, kwargs=tuple((n, _listed(v, sizes)) for n, v in op.kwargs))
    one = op.args[first]
    if isinstance(one, tuple | ListOf):
        return replace(op, args=(*op.args[:first], _listed(one, sizes), *op.args[first + 1 :]))
    return replace(op, args=(*op.args[:first], *sizes(op.args[first:])))


def _listed(given: Argument, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Argument:
    if isinstance(given, ListOf):
        return ListOf(change(given.items))
    return change(given) if isinstance(given, tuple) else given


def _sections(op: Op, call: Call, layout: OpLayout, parts: int) -> Op:
    """Sizes of sections, where the split is inside of them."""
    dim = call.argument(2, "dim", 0) % call.rank(0)
    if layout.operands[0].dim != dim or len(op.args) < 2:
        return op
    part = rewritten(op.args[1], lambda size: _share(size, parts))
    return replace(op, args=(op.args[0], part, *op.args[2:]))


def _share(size: Size, parts: int) -> Size:
    return Affine(size.scale // parts) if isinstance(size, Affine) else size // parts


def _grouped(position: int, name: str) -> Callable[[Op, Call, OpLayout, int], Op]:
    """Fewer groups, where groups are what is split."""

    def change(op: Op, call: Call, layout: OpLayout, parts: int) -> Op:
        data = layout.operands[0]
        groups = call.argument(position, name, 1)
        split = data.kind == "S" and data.dim == 1 and layout.result.kind == "S" and groups > 1
        if op.kind == "module":
            sizes = {"num_channels": ("weight", 0)} if name == "num_groups" else {}
            built: dict[str, Any] = dict(op.constructor)
            built.update(_built(call, layout, parts, sizes))
            for key, place in (("in_channels", 0), ("out_channels", 1)):
                if key in built:
                    has = data if place == 0 else layout.result
                    whole = has.kind == "S" and has.dim == 1
                    built[key] = built[key] // parts if whole else built[key]
            if split:
                built[name] = groups // parts
            return replace(op, constructor=tuple(built.items()))
        if not split:
            return op
        if position < len(op.args):
            return replace(
                op, args=(*op.args[:position], groups // parts, *op.args[position + 1 :])
            )
        kwargs = dict(op.kwargs) | {name: groups // parts}
        return replace(op, kwargs=tuple(kwargs.items()))

    return change


def _rebuilt(op: Op, call: Call, layout: OpLayout, parts: int) -> Op:
    """What a module is built with: sizes of its tensors."""
    if op.kind != "module":
        return op
    sizes = _built(call, layout, parts, _BUILT[plain_name(op)])
    return replace(op, constructor=tuple((dict(op.constructor) | sizes).items()))


def _built(
    call: Call, layout: OpLayout, parts: int, sizes: dict[str, tuple[str, int]]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (tensor, dim) in sizes.items():
        number = call.role(1, tensor)
        if number is not None:
            found[name] = layout.operands[number].local(call.shape(number), parts)[dim]
    return found


_CHANGES: dict[str, Callable[[Op, Call, OpLayout, int], Op]] = {
    **dict.fromkeys(
        ("view", "viewas", "reshape", "reshapeas", "expand", "expandas", "broadcastto",
         "unflatten", "squeeze"), _resized,
    ),
    "split": _sections,
    "splitwithsizes": _sections,
    **{f"conv{n}d": _grouped(6, "groups") for n in (1, 2, 3)},
    **{f"convtranspose{n}d": _grouped(7, "groups") for n in (1, 2, 3)},
    "groupnorm": _grouped(1, "num_groups"),
    **dict.fromkeys(_BUILT, _rebuilt),
}  # fmt: skip
