"""Gradients as torch.autograd leaves them: dense, or sparse where an embedding asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


def memory_of(gradient: Tensor) -> int:
    """The address of the memory that holds the gradient's numbers."""
    numbers = gradient._values() if gradient.is_sparse else gradient
    return numbers.untyped_storage().data_ptr()


def norm_of(gradient: Tensor) -> Tensor:
    """The 2-norm, for a sparse gradient that of the dense one: repeated rows are summed first."""
    numbers = gradient.detach()
    if numbers.is_sparse:
        numbers = numbers.coalesce().values()
    norm: Tensor = torch.linalg.vector_norm(numbers, 2.0)
    return norm


def clip(gradients: Iterable[Tensor], total: Tensor, max_norm: float) -> None:
    """Multiplies gradients in place so that the total norm is at most `max_norm`."""
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    with torch.no_grad():
        for gradient in gradients:
            gradient.mul_(coefficient)


def added(own: Tensor | None, other: Tensor) -> Tensor:
    """The sum of two gradients, in the memory of the first where that can hold it."""
    if own is None:
        return other
    return other + own if own.is_sparse and not other.is_sparse else own.add_(other)


class GradientHook(NamedTuple):
    """A hook of the user's on a parameter's gradient; `after`: on what was accumulated."""

    after: bool
    function: Any

    def run(self, slot: Tensor, master: Tensor) -> None:
        """Runs it on the gradient of `slot`.  A hook on what was accumulated gets the parameter
        that the user knows, with the slot's tensors."""
        if not self.after:
            changed = self.function(slot.grad)
            slot.grad = slot.grad if changed is None else changed
            return
        newest, gradient = master.data, master.grad
        master.data, master.grad = slot.data, slot.grad
        try:
            self.function(master)
            slot.grad = master.grad
        finally:
            master.data, master.grad = newest, gradient

    def follow(self, slot: Tensor, master: Tensor) -> Any:
        """Has autograd run it on `slot`; returns the handle."""
        if not self.after:
            return slot.register_hook(self.function)  # type: ignore[no-untyped-call]
        accumulated = lambda _: self.run(slot, master)  # noqa: E731
        return slot.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]


def gradient_hooks(parameter: Tensor) -> list[GradientHook]:
    """The hooks of a parameter's gradient, in the order in which autograd runs them."""
    each: Mapping[int, Any] = parameter._backward_hooks or {}
    summed: Mapping[int, Any] = parameter._post_accumulate_grad_hooks or {}
    return [
        *(GradientHook(False, hook) for hook in each.values()),
        *(GradientHook(True, hook) for hook in summed.values()),
    ]
