"""Digests of tensors, to notice writes.

A version counter misses writes through ``.data`` or numpy, so the bits themselves are compared, by
XXH3 (a fast hash of all bytes, some 10 GB/s).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
import xxhash
from torch import Tensor

from pdcompile.hardware import devices

_SAMPLE_BYTES = 64  # at the beginning, and as many at the end

WriteState = tuple[int, int, int]  # version counter, address, digest


def flat_bytes(tensor: Tensor) -> Tensor:
    """The values of a dense tensor as a flat run of bytes, a copy unless they are one."""
    dense = tensor.detach().contiguous()
    # a dimension of size 1 may have any stride and still count as contiguous
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def digest(tensor: Tensor) -> int:
    """A 64-bit hash of all values; equal for equal bits in equal memory order."""
    if tensor.is_meta or not tensor.numel():
        return 0
    if tensor.layout is not torch.strided:  # of a sparse one the entries that it has, and where
        entries = tensor.detach().to_sparse(layout=torch.sparse_coo)
        return digest(entries._indices()) ^ digest(entries._values())
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not plain.is_contiguous():  # no copy where all lies side by side
        plain = plain.permute(sorted(range(plain.dim()), key=plain.stride, reverse=True))
    held = devices.to_host(plain.contiguous())
    return xxhash.xxh3_64_intdigest((ctypes.c_char * held.nbytes).from_address(held.data_ptr()))


def digest_here(tensor: Tensor) -> int:
    """`digest` of what is in host memory; 0 for what is not, and would have to be waited for."""
    return digest(tensor) if devices.on_host(tensor) else 0


def digest_of_ends(tensor: Tensor) -> int:
    """A hash of the first and last bytes, which is quick; 0 where they are not side by side."""
    start, length = address(tensor), tensor.numel() * tensor.element_size()
    if not start or not devices.on_host(tensor) or not tensor.is_contiguous():
        return 0
    taken = min(length, _SAMPLE_BYTES)
    ends = ctypes.string_at(start, taken) + ctypes.string_at(start + length - taken, taken)
    return xxhash.xxh3_64_intdigest(ends)


def write_state(tensor: Tensor, hashed: Callable[[Tensor], int] = digest_here) -> WriteState:
    """Version counter, address and hash of all values: equal unless the tensor was written.

    `hashed`: `digest_of_ends`, to check many tensors.  Of a tensor on a GPU the hash is 0: there
    the version counter alone notices writes.
    """
    return tensor._version, address(tensor), hashed(tensor)


def address(tensor: Tensor) -> int:
    """The address of the values; 0 for a tensor without memory of its own."""
    return 0 if tensor.is_meta or tensor.layout is not torch.strided else tensor.data_ptr()
