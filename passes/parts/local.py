"""One op as a part computes it: sizes among its arguments are those of the part.

What an op that is split gets wrong if it is run on its operands' parts as it is: sizes that views
are given, sections, groups, what a module is built with, and a bias that every part would add.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from pdcompile.ir.graph import Argument, Attr, Op, OpGraph, Ref, rewritten
from pdcompile.ir.records import PARTS
from pdcompile.passes.costs.costed_op import plain_name
from pdcompile.passes.parts.axes import Way
from pdcompile.passes.parts.calls import Call, Operand, operands, whole_numbers
from pdcompile.passes.parts.layout import SUM, WHOLE, share
from pdcompile.passes.parts.shares import GROUPED

Kwargs = tuple[tuple[str, Argument], ...]

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
#: The function of each kind of module, and what it takes of what the module is built with.
_FUNCTIONS = {
    "linear": ("linear", ""),
    "embedding": ("embedding", "padding_idx"),
    "layernorm": ("layer_norm", "normalized_shape eps"),
    "rmsnorm": ("rms_norm", "normalized_shape eps"),
    "groupnorm": ("group_norm", "num_groups eps"),
    **{f"conv{n}d": (f"conv{n}d", "stride padding dilation groups") for n in (1, 2, 3)},
    **{f"convtranspose{n}d": (f"conv_transpose{n}d",
                              "stride padding dilation groups output_padding")
       for n in (1, 2, 3)},
}  # fmt: skip
#: What the functions of parts take of an op's arguments: position, name and default.
_SHARED: dict[str, tuple[tuple[int, str, Any], ...]] = {
    "embedding": ((2, "padding_idx", None),),
    "crossentropy": (
        (4, "ignore_index", -100), (6, "reduction", "mean"), (7, "label_smoothing", 0.0),
    ),
    GROUPED: ((2, "offs", None), (4, "out_dtype", None)),
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
    mine = {"embedding": SUM, "crossentropy": WHOLE}.get(call.name)
    if layout.result == mine or _by_experts(call, layout):
        return _shared(op, call, layout)
    if op.mutates:
        op = _anew(op)
    if layout.added:
        op = _without(op, call, layout.added)
    if op.kind == "module":
        op = replace(op, constructor=_changed(op.constructor, **_built(call, layout, parts)))
    if call.name in _GROUPS:
        return _with_fewer_groups(op, call, layout, parts)
    if call.name in _VIEWS:
        return _resized(op, call, layout, parts)
    return _of_sections(op, call, layout, parts) if "split" in call.name else op


def has_function(op: Op) -> bool:
    """True if `as_function` knows the module."""
    padding = dict(op.constructor).get("padding_mode", "zeros")
    return plain_name(op) in _FUNCTIONS and padding == "zeros"


def as_function(op: Op, added: Collection[int] = ()) -> Op:
    """A module's op as a call of the function that it calls, on tensors of its own.

    For modules whose tensors another layout is needed of, or without operands that are added later.
    """
    (function, words), known = _FUNCTIONS[plain_name(op)], dict(op.constructor)
    sizes = known.get("normalized_shape")
    known |= {"normalized_shape": (sizes,)} if isinstance(sizes, int) else {}
    kwargs = [(word, known[word]) for word in words.split() if known.get(word) is not None]
    own = {str(one.slot): Attr(one.name) for i, one in enumerate(operands(op))
           if one.of_model and i not in added}  # fmt: skip
    if function.endswith("norm"):
        return _function(op, f"torch.nn.functional.{function}", op.args, (*own.items(), *kwargs))
    args = (*op.args, *own.values())
    return _function(op, f"torch.nn.functional.{function}", args, tuple(kwargs))


def _function(op: Op, target: str, args: tuple[Argument, ...], kwargs: Kwargs = ()) -> Op:
    return replace(op, kind="function", target=target, args=args, kwargs=kwargs,
                   module_path=op.scope, parameters=(), constructor=())  # fmt: skip


def _shared(op: Op, call: Call, layout: Way) -> Op:
    """The function by which parts share a vocabulary, experts, or the mean over rows."""
    names = {"embedding": ("input", "weight"), "crossentropy": ("input", "target"),
             GROUPED: ("mat_a", "mat_b")}[call.name]  # fmt: skip
    numbers = [n for i, name in enumerate(names) if (n := call.role(i, name)) is not None]
    by_rows = all(layout.operands[number].kind == "S" for number in numbers)
    function = {
        "embedding": "vocabulary_embedding", GROUPED: "own_grouped_mm",
        "crossentropy": f"{'mean' if by_rows else 'vocabulary'}_cross_entropy",
    }[call.name]  # fmt: skip
    read = [call.operands[number] for number in numbers]
    kwargs = tuple(
        (word, found) for position, word, default in _SHARED[call.name]
        if (found := call.argument(position, word, default)) != default
    )  # fmt: skip
    return _function(op, f"{PARTS}.{function}", tuple(map(given, read)), kwargs)


def _by_experts(call: Call, layout: Way) -> bool:
    """True if each part has the matrices of its own experts."""
    return call.name == GROUPED and any(one.kind == "S" and one.dim == 0 for one in layout.operands)


def given(one: Operand) -> Ref | Attr:
    """Give the operand as an argument."""
    return Attr(one.name) if one.of_model else Ref(one.name)


def _anew(op: Op) -> Op:
    """The op that makes a new tensor where this one writes its operand."""
    last = op.target.rpartition(".")[2]
    kwargs, built = (
        tuple((name, value) for name, value in pairs if name != "inplace")
        for pairs in (op.kwargs, op.constructor)
    )
    target, args = op.target, op.args
    if target.startswith("operator.i"):
        target = f"operator.{last[1:]}"
    elif last.endswith("_"):
        target = target[:-1]
    if op.kind == "function" and target.startswith("torch.nn.functional."):
        args = tuple(False if value is True else value for value in args)
    return replace(op, target=target, args=args, kwargs=kwargs, constructor=built, mutates=())


def _without(op: Op, call: Call, added: tuple[int, ...]) -> Op:
    """The op without the operands that are added to its sum."""
    if op.kind == "module":
        return as_function(op, added)
    slots, names = zip(
        *((call.operands[i].slot, call.operands[i].name) for i in added), strict=True
    )
    op = replace(op, parameters=tuple(fqn for fqn in op.parameters if fqn not in names))
    if call.name == "addmm":
        factors = tuple(given(one) for one in call.operands if one.slot not in slots)
        return replace(op, kind="function", target="torch.mm", args=factors, kwargs=())
    args = tuple(None if i in slots else value for i, value in enumerate(op.args))
    kwargs = tuple((name, None if name in slots else value) for name, value in op.kwargs)
    return replace(op, args=args, kwargs=kwargs)


def _resized(op: Op, call: Call, layout: Way, parts: int) -> Op:
    """A view to sizes of the part; -1 where the user says it."""
    alike = call.name.endswith("as") or (call.name == "squeeze" and len(op.args) == 1)
    if layout.result.kind != "S" and not alike:
        return op
    local = layout.result.local(call.graph.values[op.name].shape, parts)
    sizes = whole_numbers(call.argument(1, "size"), op.args[2:])
    if len(sizes) == len(local) and call.name in ("view", "reshape", "expand"):
        local = tuple(-1 if old == -1 else new for old, new in zip(sizes, local, strict=True))
    return replace(op, kind="method", target=_VIEWS[call.name], args=(op.args[0], *local),
                   kwargs=())  # fmt: skip


def _of_sections(op: Op, call: Call, layout: Way, parts: int) -> Op:
    """Sizes of sections, where the split is inside of them."""
    dim = call.argument(2, "dim", 0) % call.rank(0)
    own = layout.operands[0]
    if call.name == "tensorsplit" or own.kind != "S" or own.dim != dim or len(op.args) < 2:
        return op
    return _given(op, 1, "", rewritten(op.args[1], lambda size: share(size, parts)))


def _with_fewer_groups(op: Op, call: Call, layout: Way, parts: int) -> Op:
    """Fewer groups, where groups are what is split."""
    (position, word), data = _GROUPS[call.name], layout.operands[0]
    groups = call.argument(position, word, 1)
    if data.kind != "S" or data.dim != 1 or layout.result.kind != "S" or groups == 1:
        return op
    return _given(op, position, word, groups // parts)


def _given(op: Op, position: int, name: str, value: Argument) -> Op:
    """The op with another value for an argument."""
    if op.kind == "module":
        return replace(op, constructor=_changed(op.constructor, **{name: value}))
    if position < len(op.args):
        return replace(op, args=(*op.args[:position], value, *op.args[position + 1 :]))
    return replace(op, kwargs=_changed(op.kwargs, **{name: value}))


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


def _changed(pairs: Kwargs, **changes: Any) -> Kwargs:
    return tuple((dict(pairs) | changes).items())
