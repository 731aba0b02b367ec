"""One op as a part computes it: sizes among its arguments are those of the part.

What an op that is split gets wrong if it is run on its operands' parts as it is: sizes that views
are given, sections, groups, what a module is built with, and a bias that every part would add.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pdcompile.ir.graph import Argument, Attr, Op, OpGraph, Ref, rewritten
from pdcompile.ir.records import PARTS
from pdcompile.passes.costs.costed_op import plain_name
from pdcompile.passes.parts.axes import Way
from pdcompile.passes.parts.calls import Call, whole_numbers
from pdcompile.passes.parts.layout import SUM, WHOLE, share

_CONVOLUTION = {"in_channels": ("input", 1), "out_channels": ("", 1)}
#: Arguments of modules that are a size of an operand, or of the result (""): of which dimension.
_BUILT: dict[str, dict[str, tuple[str, int]]] = {
    "linear": {"out_features": ("weight", 0), "in_features": ("weight", 1)},
    "embedding": {"embedding_dim": ("weight", 1)},
    "groupnorm": {"num_channels": ("weight", 0)},
    **{f"batchnorm{n}d": {"num_features": ("weight", 0)} for n in (1, 2, 3)},
    **{f"conv{kind}{n}d": _CONVOLUTION for kind in ("", "transpose") for n in (1, 2, 3)},
}
#: Where the number of groups stands among the arguments.
_GROUPS = {
    "groupnorm": (1, "num_groups"),
    **{f"conv{n}d": (6, "groups") for n in (1, 2, 3)},
    **{f"convtranspose{n}d": (7, "groups") for n in (1, 2, 3)},
}
#: What the functions of parts take of an op's arguments: position, name and default.
_SHARED: dict[str, tuple[tuple[int, str, Any], ...]] = {
    "embedding": ((2, "padding_idx", None),),
    "crossentropy": (
        (4, "ignore_index", -100), (6, "reduction", "mean"), (7, "label_smoothing", 0.0),
    ),
}  # fmt: skip
_VIEWS = {
    "view": "view", "viewas": "view", "reshape": "reshape", "reshapeas": "reshape",
    "expand": "expand", "expandas": "expand", "broadcastto": "expand", "unflatten": "reshape",
    "squeeze": "reshape",
}  # fmt: skip


def local_op(graph: OpGraph, op: Op, layout: Way, parts: int) -> Op:
    """The op of one part; what is added to a sum (`layout.added`) is left out of it."""
    if layout.axis is None:
        return op
    call = Call(op, graph)
    if layout.result == {"embedding": SUM, "crossentropy": WHOLE}.get(call.name):
        return _shared(op, call, layout)
    if op.mutates:
        op = _anew(op)
    if layout.added:
        op = _without(op, call, layout.added)
    name = plain_name(op)
    if op.kind == "module":
        op = replace(op, constructor=_changed(op.constructor, _built(call, layout, parts)))
    if name in _GROUPS:
        return _with_fewer_groups(op, call, layout, parts)
    if name in _VIEWS:
        return _resized(op, call, layout, parts)
    return _of_sections(op, call, layout, parts) if name in ("split", "splitwithsizes") else op


def _shared(op: Op, call: Call, layout: Way) -> Op:
    """The function by which parts share a vocabulary, or the mean over rows."""
    numbers = [call.role(i, name) for i, name in enumerate(("input", "target"))]
    if call.name == "embedding":
        function, numbers[1] = "vocabulary_embedding", call.role(1, "weight")
    else:
        by_rows = all(
            number is not None and layout.operands[number].kind == "S" for number in numbers
        )
        function = "mean_cross_entropy" if by_rows else "vocabulary_cross_entropy"
    read = [call.operands[number] for number in numbers if number is not None]
    given = tuple(Attr(one.name) if one.of_model else Ref(one.name) for one in read)
    kwargs = tuple(
        (word, found) for position, word, default in _SHARED[call.name]
        if (found := call.argument(position, word, default)) != default
    )  # fmt: skip
    return replace(op, kind="function", target=f"{PARTS}.{function}", args=given, kwargs=kwargs,
                   parameters=(), constructor=())  # fmt: skip


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


def _resized(op: Op, call: Call, layout: Way, parts: int) -> Op:
    """A view to sizes of the part; -1 where the user says it."""
    name = plain_name(op)
    alike = name.endswith("as") or (name == "squeeze" and len(op.args) == 1)
    if layout.result.kind != "S" and not alike:
        return op
    local = layout.result.local(call.graph.values[op.name].shape, parts)
    sizes = whole_numbers(call.argument(1, "size"), op.args[2:])
    if len(sizes) == len(local) and name in ("view", "reshape", "expand"):
        local = tuple(-1 if old == -1 else new for old, new in zip(sizes, local, strict=True))
    return replace(op, kind="method", target=_VIEWS[name], args=(op.args[0], *local), kwargs=())


def _of_sections(op: Op, call: Call, layout: Way, parts: int) -> Op:
    """Sizes of sections, where the split is inside of them."""
    dim = call.argument(2, "dim", 0) % call.rank(0)
    if layout.operands[0].dim != dim or len(op.args) < 2:
        return op
    part = rewritten(op.args[1], lambda size: share(size, parts))
    return replace(op, args=(op.args[0], part, *op.args[2:]))


def _with_fewer_groups(op: Op, call: Call, layout: Way, parts: int) -> Op:
    """Fewer groups, where groups are what is split."""
    (position, word), data = _GROUPS[plain_name(op)], layout.operands[0]
    groups = call.argument(position, word, 1)
    if data.kind != "S" or data.dim != 1 or layout.result.kind != "S" or groups == 1:
        return op
    fewer = {word: groups // parts}
    if op.kind == "module":
        return replace(op, constructor=_changed(op.constructor, fewer))
    if position < len(op.args):
        args = (*op.args[:position], groups // parts, *op.args[position + 1 :])
        return replace(op, args=args)
    return replace(op, kwargs=_changed(op.kwargs, fewer))


def _built(call: Call, layout: Way, parts: int) -> dict[str, Any]:
    """Sizes that the module of one part reads and makes, to build it with."""
    found: dict[str, Any] = {}
    for word, (role, dim) in _BUILT.get(call.name, {}).items():
        number = call.role(0 if role == "input" else 1, role)
        if not role:
            shape = call.graph.values[call.op.name].shape
            found[word] = layout.result.local(shape, parts)[dim]
        elif number is not None:
            found[word] = layout.operands[number].local(call.about(number).shape, parts)[dim]
    return found


def _changed(
    pairs: tuple[tuple[str, Argument], ...], changes: dict[str, Any]
) -> tuple[tuple[str, Argument], ...]:
    return tuple((dict(pairs) | changes).items())
