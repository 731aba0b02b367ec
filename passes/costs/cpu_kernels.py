"""Memory that kernels of the CPU take while they run, beside operands and results.

For convolutions, oneDNN works on copies in a layout of its own, unless the channels come last
already.  Torch's own kernels, which take what oneDNN does not (float64, half precision on many
CPUs, single samples), write the columns of a matrix product first.  What else counts here takes at
least as much as an operand: read off the allocations of every op that vision and language models
and their losses are made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pdcompile.releases.torch_internals import convolution_kernel

_ATEN = torch.ops.aten


def inside(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes of a kernel by op, arguments and result, real or fake; 0 for what takes nothing."""
    return _TAKEN[func](args, result) if func in _TAKEN else 0


def _convolution(args: tuple[Any, ...], result: Any) -> int:
    given, weights, bias, *how = args
    return _convolved(given, weights, bias, how, (result, None, None))


def _convolution_backward(args: tuple[Any, ...], _: Any) -> int:
    out, given, weights, sizes, *how, wanted = args
    return _convolved(given, weights, None, how, (out, sizes, wanted))


def _convolved(
    given: Tensor, weights: Tensor, bias: Tensor | None, how: list[Any], rest: tuple[Any, ...]
) -> int:
    """`rest`: the result or its gradient; of a backward the bias's sizes, and what is wanted."""
    out, sizes, wanted = rest
    name, layout = convolution_kernel(given, weights, bias, how, sizes)
    if name.startswith("Slow"):
        return _columns(name, given, weights, out, how, wanted)
    x, w, y = (int(one.nbytes) for one in (given, weights, out))
    if layout is not torch.contiguous_format:  # only weights are copied, and what is laid out else
        copied = [one for one in (given, weights) if not one.is_contiguous(memory_format=layout)]
        again = sum(int(one.nbytes) for one in copied)
        return again + (2 * w if wanted is not None and wanted[1] else w)
    # The gradient of what a strided window has read is copied twice; so is a transposed result.
    strided = 2 if max(how[0]) > 1 and how[5] == 1 else 1
    if wanted is None:
        return max(x + w, y * (strided if how[3] else 1))
    made = x * (1 if how[3] else strided)
    if not wanted[1]:
        return max(y + w, made)
    return max(x + y, w, made - w if wanted[0] else 0)


def _columns(
    name: str, given: Tensor, weights: Tensor, out: Tensor, how: list[Any], wanted: Any
) -> int:
    """Bytes of torch's own kernels: columns, and pieces of the result where there are groups."""
    stride, padding, _, transposed, _, groups = how
    plain = set(stride) == {1} and set(padding) == {0} and math.prod(weights.shape[2:]) == 1
    inner = given if transposed else out
    by_sample = "Dilated" in name or (transposed and wanted is not None)
    samples = 1 if by_sample else int(given.shape[0])
    columns = int(weights[0].numel()) * math.prod(inner.shape[2:]) * samples * given.itemsize
    if plain or (name == "Slow2d" and wanted is not None and not wanted[1]):
        columns = 0
    pieces = 0
    if groups > 1:
        pieces = int(out.nbytes) if wanted is None else int(given.nbytes) * wanted[0]
    # Half precision is summed in float32.
    halves = wanted is not None and wanted[2] and out.itemsize == 2
    summed = 2 * int(out.nbytes) - int(weights.nbytes) if halves else 0
    return max(columns, pieces, summed)


def _operand(position: int, wanted: int | None = None) -> Callable[[tuple[Any, ...], Any], int]:
    """The bytes of one of the arguments, if the gradient of this number is wanted."""

    def taken(args: tuple[Any, ...], _: Any) -> int:
        return int(args[position].nbytes) if wanted is None or args[-1][wanted] else 0

    return taken


def _upsample(args: tuple[Any, ...], result: Tensor) -> int:
    """Operand and result with the channels last."""
    last = args[0].is_contiguous(memory_format=torch.channels_last)
    return 0 if last or args[0].shape[1] == 1 else int(args[0].nbytes) + int(result.nbytes)


_TAKEN: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    _ATEN.convolution.default: _convolution,
    _ATEN.convolution_backward.default: _convolution_backward,
    _ATEN.native_batch_norm_backward.default: _operand(1, wanted=0),
    _ATEN.upsample_nearest2d.default: _upsample,
    _ATEN._upsample_nearest_exact2d.default: _upsample,
    _ATEN.upsample_bilinear2d.default: _upsample,
    _ATEN.binary_cross_entropy_with_logits.default: lambda args, result: (
        2 * int(args[0].nbytes) - int(result.nbytes)
    ),
    _ATEN.huber_loss.default: _operand(0),
    _ATEN.logsumexp.default: _operand(0),
}
