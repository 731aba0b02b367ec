"""Which values need a gradient: reverse reachability from the loss."""

from __future__ import annotations

from dataclasses import replace

from pdcompile.graph import Argument, Op, Ref, Value, walk


def with_gradients(
    ops: tuple[Op, ...], values: dict[str, Value], loss: str | None, output: Argument
) -> dict[str, Value]:
    """The values with `needs_gradient` filled in.

    Without a loss every output that requires grad is a root.  A value whose storage an op
    writes depends on that op too: after ``y = x[0]; y.add_(w)`` the gradient of x reaches w.
    """
    roots = [loss] if loss is not None else [ref.name for ref in walk(output, Ref)]
    needed = {name for name in roots if _differentiable(values[name])}
    storages = {values[name].storage for name in needed if values[name].is_tensor}
    for op in reversed(ops):
        written = {values[name].storage for name in op.mutates if values[name].is_tensor}
        if not (op.name in needed or written & storages) or not op.grad_enabled:
            continue
        for name in op.inputs:
            if _differentiable(values[name]):
                needed.add(name)
                if values[name].is_tensor:
                    storages.add(values[name].storage)
    return {
        name: replace(value, needs_gradient=value.is_tensor and name in needed)
        for name, value in values.items()
    }


def _differentiable(value: Value) -> bool:
    return value.requires_grad or not value.is_tensor


def with_consumers(ops: tuple[Op, ...], values: dict[str, Value]) -> dict[str, Value]:
    """The values with the names of the ops that read them, in order."""
    readers: dict[str, list[str]] = {name: [] for name in values}
    for op in ops:
        for name in op.inputs:
            readers[name].append(op.name)
    return {name: replace(value, consumers=tuple(readers[name])) for name, value in values.items()}
