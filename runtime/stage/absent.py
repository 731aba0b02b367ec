"""Absent gradients: how a message says that autograd had none for a value.

A stage sends a gradient for every value that it got, of a shape that is known before.  Where the
backward of an autograd.Function returned None there is none, and zeros in its place would be
another training: optimizers decay and move a parameter whose gradient is zero, and leave one alone
that has no gradient.  What is sent then begins with a NaN that no arithmetic makes: of those that
processors make the lower bits are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdcompile.hardware import devices

_LOWEST, _MIDDLE, _HIGHEST = 0xD3, 0xFF, 0x7F  # bytes of a NaN in every dtype, little-endian


def absent(like: Tensor) -> Tensor:
    """What is sent in place of a gradient of this tensor: from host memory, where whoever gets it
    within this process sees at once that it is none."""
    found = torch.zeros_like(like, memory_format=torch.contiguous_format, device=devices.HOST)
    memory = found.untyped_storage()
    for n, byte in enumerate(_bytes(found) if found.numel() else ()):
        memory[n] = byte
    return found


def is_absent(gradient: Tensor) -> bool:
    """Whether a gradient that came in says that there was none."""
    if gradient.layout != torch.strided or not gradient.numel():
        return False
    start, memory = gradient.storage_offset() * gradient.itemsize, gradient.untyped_storage()
    if memory[start] != _LOWEST:
        return False
    return all(memory[start + n] == byte for n, byte in enumerate(_bytes(gradient)))


def _bytes(tensor: Tensor) -> list[int]:
    """Of the first number, of a complex one its real part."""
    size = tensor.itemsize // (2 if tensor.is_complex() else 1)
    return [_LOWEST, *[_MIDDLE] * (size - 2), _HIGHEST]
