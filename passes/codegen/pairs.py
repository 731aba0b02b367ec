"""Training and evaluation side by side: one body where they agree up to literals."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

from pdcompile.ir.graph import Attr, DictOf, ListOf, Op, Ref, Slice
from pdcompile.ir.targets import resolve
from pdcompile.passes.codegen.tree import Call, Item


@dataclass(frozen=True, slots=True)
class Pair:
    """An item of a body, with its twin in evaluation (None where a body is of one mode)."""

    item: Item
    twin: Item | None = None


def pair(train: Call, evaluation: Call) -> tuple[Pair, ...] | None:
    """The items of both calls in pairs; None when they need two bodies.

    They agree when op for op kind, target, module, region and data flow are the same; literals
    may differ.
    """
    if len(train.items) != len(evaluation.items) or not same_arity(train, evaluation):
        return None
    if train.tensors != evaluation.tensors:
        return None
    match = dict(zip(evaluation.inputs, train.inputs, strict=True))
    found = []
    for item, twin in zip(train.items, evaluation.items, strict=True):
        if isinstance(item, Op) and isinstance(twin, Op):
            item, twin = _same_keywords(item, twin)
        if not _alike(item, twin, match):
            return None
        match.update(zip(twin.outputs, item.outputs, strict=True))
        found.append(Pair(item, twin))
    if tuple(match.get(name) for name in evaluation.outputs) != train.outputs:
        return None
    return tuple(found)


def same_arity(one: Call, other: Call) -> bool:
    """Whether both take and return equally many values and tensors."""
    return (len(one.inputs), len(one.tensors), len(one.outputs)) == (
        len(other.inputs),
        len(other.tensors),
        len(other.outputs),
    )


def _alike(item: Item, twin: Item, match: dict[str, str]) -> bool:
    if isinstance(item, Call) and isinstance(twin, Call):
        return (
            item.path == twin.path
            and same_arity(item, twin)
            and item.tensors == twin.tensors
            and tuple(match.get(name) for name in twin.inputs) == item.inputs
        )
    if isinstance(item, Op) and isinstance(twin, Op):
        return _facts(item) == _facts(twin) and _same_shape(
            (item.args, item.kwargs), (twin.args, twin.kwargs), match
        )
    return False


def _same_keywords(op: Op, twin: Op) -> tuple[Op, Op]:
    """Both with the same keyword arguments: one given in one mode only is its default elsewhere."""
    ours, theirs = dict(op.kwargs), dict(twin.kwargs)
    if ours.keys() == theirs.keys() or op.target != twin.target or op.kind != "function":
        return op, twin
    try:
        parameters = inspect.signature(resolve(op.target)).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        return op, twin
    for one, other in ((ours, theirs), (theirs, ours)):
        for key in other.keys() - one.keys():
            default = parameters[key].default if key in parameters else inspect.Parameter.empty
            if default is inspect.Parameter.empty:
                return op, twin
            one[key] = default
    order = tuple(dict.fromkeys((*dict(op.kwargs), *dict(twin.kwargs))))
    return (
        replace(op, kwargs=tuple((key, ours[key]) for key in order)),
        replace(twin, kwargs=tuple((key, theirs[key]) for key in order)),
    )


def _facts(op: Op) -> tuple[Any, ...]:
    return (
        op.kind, op.target, op.module_path, op.draw, op.grad_enabled, op.enables_grad, op.autocast,
        op.region,
        repr(op.constructor), tuple(key for key, _ in op.kwargs),
    )  # fmt: skip


def _same_shape(a: Any, b: Any, match: dict[str, str]) -> bool:
    """Whether two arguments have the same structure and data flow; literals may differ."""
    if isinstance(a, Ref) or isinstance(b, Ref):
        return isinstance(a, Ref) and isinstance(b, Ref) and match.get(b.name) == a.name
    if isinstance(a, Attr) or isinstance(b, Attr):
        return bool(a == b)
    if type(a) is not type(b):
        return not _is_container(a) and not _is_container(b)
    if isinstance(a, Slice):
        return _same_shape((a.start, a.stop, a.step), (b.start, b.stop, b.step), match)
    if isinstance(a, DictOf):
        keys = [key for key, _ in a.items] == [key for key, _ in b.items]
        return keys and _same_shape(
            tuple(v for _, v in a.items), tuple(v for _, v in b.items), match
        )
    items = a.items if isinstance(a, ListOf) else a
    others = b.items if isinstance(b, ListOf) else b
    if isinstance(items, tuple):
        return len(items) == len(others) and all(
            _same_shape(x, y, match) for x, y in zip(items, others, strict=True)
        )
    return True


def _is_container(value: Any) -> bool:
    return isinstance(value, tuple | ListOf | DictOf | Slice)
