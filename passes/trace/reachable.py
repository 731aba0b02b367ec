"""Removes unused ops, and marks the values that need a gradient, from the last op to the first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pdcompile.ir.graph import CHECK, Argument, Op, Ref, Value, walk


def with_gradients(
    ops: tuple[Op, ...], values: dict[str, Value], loss: str | None, output: Argument
) -> dict[str, Value]:
    """The values with `needs_gradient` filled in.

    Without a loss every output that requires grad is a root.  A value whose storage an op
    writes depends on that op too: after ``y = x[0]; y.add_(w)`` the gradient of x reaches w.
    """

    def among(names: Iterable[str]) -> list[str]:
        return [n for n in names if values[n].requires_grad or not values[n].is_tensor]

    needed = set(among([loss] if loss is not None else [ref.name for ref in walk(output, Ref)]))
    storages = {values[name].storage for name in needed if values[name].is_tensor}
    for op in reversed(ops):
        written = {values[name].storage for name in op.mutates if values[name].is_tensor}
        if op.grad_enabled and (op.name in needed or not written.isdisjoint(storages)):
            into = among(op.inputs)
            needed.update(into)
            storages.update(values[name].storage for name in into if values[name].is_tensor)
    return {
        name: replace(value, needs_gradient=value.is_tensor and name in needed)
        for name, value in values.items()
    }


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
