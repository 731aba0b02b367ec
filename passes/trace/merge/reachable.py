"""Removes unused ops, and marks the values that need a gradient, from the last op to the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from pdcompile.ir.graph import CHECK, Argument, Op, Ref, Value, walk

MAX_TRIED = 10  # decisions whose mixtures of outcomes are all tried


def with_gradients(
    ops: tuple[Op, ...], values: dict[str, Value], loss: str | None, output: Argument
) -> dict[str, Value]:
    """The values with `needs_gradient` and `conditional` filled in.

    Without a loss every output that requires grad is a root.  A value whose storage an op
    writes depends on that op too: after ``y = x[0]; y.add_(w)`` the gradient of x reaches w.
    """
    needed = _reached(ops, values, loss, output, {})
    always = needed
    for taken in _outcomes({decider for op in ops if (decider := _decider(op))}):
        always = always & _reached(ops, values, loss, output, taken)
    return {
        name: replace(
            value,
            needs_gradient=value.is_tensor and name in needed,
            conditional=value.is_tensor and name in needed and name not in always,
        )
        for name, value in values.items()
    }


def _reached(
    ops: tuple[Op, ...],
    values: dict[str, Value],
    loss: str | None,
    output: Argument,
    taken: Mapping[str, bool | None],
) -> set[str]:
    """Values that get a gradient with these outcomes of decisions.

    A choice passes it to both sides where its decision is not given, to neither where it is None.
    """
    roots = [loss] if loss is not None else [ref.name for ref in walk(output, Ref)]
    needed = {name for name in roots if _differentiable(values[name])}
    storages = {values[name].storage for name in needed if values[name].is_tensor}
    for op in reversed(ops):
        written = {values[name].storage for name in op.mutates if values[name].is_tensor}
        if not (op.name in needed or written & storages) or not op.grad_enabled:
            continue
        for name in _chosen(op, taken):
            if _differentiable(values[name]):
                needed.add(name)
                if values[name].is_tensor:
                    storages.add(values[name].storage)
    return needed


def _decider(op: Op) -> str:
    """The decision by which the op chooses between two values (`branches`), "" if it does not."""
    if op.target != "operator.getitem" or not isinstance(op.args[0], tuple):
        return ""
    return op.args[1].name if isinstance(op.args[1], Ref) else ""


def _chosen(op: Op, taken: Mapping[str, bool | None]) -> tuple[str, ...]:
    decider = _decider(op)
    if decider not in taken:
        return op.inputs
    outcome = taken[decider]
    if outcome is None:
        return ()
    part = op.args[0][outcome]  # type: ignore[index]
    return (part.name,) if isinstance(part, Ref) else ()


def _outcomes(deciding: set[str]) -> Iterator[dict[str, bool | None]]:
    """Every mixture of outcomes; for too many, the one in which no choice passes gradients."""
    if len(deciding) > MAX_TRIED:
        yield dict.fromkeys(deciding)
        return
    for outcomes in product((False, True), repeat=len(deciding)):
        yield dict(zip(sorted(deciding), outcomes, strict=True))


def _differentiable(value: Value) -> bool:
    return value.requires_grad or not value.is_tensor


def with_consumers(ops: tuple[Op, ...], values: dict[str, Value]) -> dict[str, Value]:
    """The values with the names of the ops that read them, in order."""
    readers: dict[str, list[str]] = {name: [] for name in values}
    for op in ops:
        for name in op.inputs:
            readers[name].append(op.name)
    return {name: replace(value, consumers=tuple(readers[name])) for name, value in values.items()}


def prune(ops: tuple[Op, ...], roots: Argument) -> tuple[Op, ...]:
    """Removes unused pure ops: those that draw, write or check remain."""
    used = {ref.name for ref in walk(roots, Ref)}
    kept: list[Op] = []
    for op in reversed(ops):
        impure = op.draw is not None or op.mutates or op.buffers_written or op.opaque
        if impure or op.target == CHECK or op.name in used:
            kept.append(op)
            used.update(op.inputs)
    return tuple(reversed(kept))
