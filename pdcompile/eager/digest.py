"""Digests of tensors, to notice writes.

A version counter misses writes through ``.data`` or numpy, so the bits themselves are compared, by
XXH3 (a fast hash of all bytes, some 10 GB/s).
"""

from __future__ import annotations

import ctypes

import torch
import xxhash
from torch import Tensor

_SAMPLE_BYTES = 64  # at the beginning, and as many at the end

WriteState = tuple[int, int, int]  # version counter, address, digest


def digest(tensor: Tensor) -> int:
    """A 64-bit hash of all values; equal for equal bits in equal memory order."""
    if tensor.is_meta or not tensor.numel():
        return 0
    plain = tensor.detach().resolve_conj().resolve_neg()
    order = sorted(range(plain.dim()), key=plain.stride, reverse=True)
    flat = plain.permute(order).contiguous().reshape(-1)  # no copy where all lies side by side
    return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).cpu().numpy().data)


def write_state(tensor: Tensor) -> WriteState:
    """Version counter, address and hash of all values: equal unless the tensor was written."""
    return tensor._version, address(tensor), digest(tensor)


def write_state_sample(tensor: Tensor) -> WriteState:
    """`write_state` with a hash of the first and last bytes alone, to check many tensors."""
    start, length = address(tensor), tensor.numel() * tensor.element_size()
    if not start or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return tensor._version, start, 0
    taken = min(length, _SAMPLE_BYTES)
    ends = ctypes.string_at(start, taken), ctypes.string_at(start + length - taken, taken)
    return tensor._version, start, hash(ends)


def address(tensor: Tensor) -> int:
    """The address of the values; 0 for a tensor without memory of its own."""
    return 0 if tensor.is_meta or tensor.layout is not torch.strided else tensor.data_ptr()
