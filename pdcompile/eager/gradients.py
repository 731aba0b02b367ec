"""Gradients as torch.autograd leaves them: dense, or sparse where an embedding asked for it."""

from __future__ import annotations

from collections.abc import Iterable

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
