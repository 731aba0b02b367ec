"""The order of a tensor's dimensions in memory, and copies in a given order."""

from __future__ import annotations

from torch import Tensor


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from largest to smallest stride; the natural order where elements coincide."""
    strides = tensor.stride()
    if any(not stride and size > 1 for stride, size in zip(strides, tensor.shape, strict=True)):
        return tuple(range(len(strides)))  # expanded
    return tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))


def dense(tensor: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
    """The tensor without gaps in memory, dimensions in this order (None: its own).

    Returns the tensor itself where it has this layout already, else a copy.
    """
    if order is None or len(order) != tensor.dim():
        if tensor.is_contiguous():
            return tensor
        order = memory_order(tensor)
    permuted = tensor.permute(order)
    if permuted.is_contiguous():
        return tensor
    return permuted.contiguous().permute([order.index(dim) for dim in range(len(order))])
