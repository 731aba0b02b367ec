"""The sizes at which costs are sampled, and exact polynomials in b and s through the samples.

The sequence length s is found in the dims of a call, which is made again at other lengths.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.hardware import devices

Dims = dict[str, tuple[int, ...]]  # path of an input -> its dims that are the length
COUNT = 4  # lengths to capture at: three for a quadratic form, one that checks it


def sequence_dims(flat: FlatCall, layout: BatchLayout) -> tuple[Dims, str]:
    """Dims of the call's tensors that are the sequence length; ({}, why not) where none is.

    That is the first dim behind the samples of the first integer or boolean input that has one, and
    every dim of the same size in integer and boolean tensors and in tensors of two dims.
    """
    tensors = {path: leaf for path, leaf in flat.leaves.items() if isinstance(leaf, Tensor)}

    def rest(path: str) -> list[int]:
        return [dim for dim in range(tensors[path].ndim) if dim != layout.dims.get(path)]

    discrete = [path for path, leaf in tensors.items() if not leaf.dtype.is_floating_point]
    first = next((path for path in discrete if rest(path)), None)
    if first is None:
        return {}, "no integer or boolean input has a dim besides the samples"
    length = tensors[first].shape[rest(first)[0]]
    if length < 2:
        return {}, f"{first} has length {length}"
    found = {
        path: tuple(dim for dim in rest(path) if leaf.shape[dim] == length)
        for path, leaf in tensors.items()
        if path in discrete or leaf.ndim == 2
    }
    return {path: dims for path, dims in found.items() if dims}, ""


def probe_lengths(own: int, taken: Collection[int]) -> tuple[int, ...]:
    """The length of the example and three others, shorter ones where there are several.

    A model may have a longest length, seldom a shortest one.  Even numbers and other sizes of the
    call are avoided, so that a size tells which dimension it is.
    """
    odd = [n for n in range(max(3, own // 4), own) if n % 2 and n not in taken]
    if len(odd) < COUNT - 1:
        odd = [n for n in range(2, 2 * own + 2 * COUNT) if n != own and n not in taken]
    return (own, odd[0], odd[len(odd) // 2], odd[-1])


def with_length(flat: FlatCall, dims: Dims, length: int) -> FlatCall:
    """The same call at another length: entries repeated cyclically, or cut."""
    leaves = dict(flat.leaves)
    for path, which in dims.items():
        for dim in which:
            leaf = leaves[path]
            places = torch.arange(length, device=_device(leaf)) % leaf.shape[dim]
            leaves[path] = _taken(leaf, dim, places)
    return FlatCall(leaves, flat.spec)


def _device(leaf: Tensor) -> torch.device:
    return devices.HOST if leaf.is_meta else leaf.device


def _taken(leaf: Tensor, dim: int, places: Tensor) -> Tensor:
    if leaf.is_meta:
        shape: Sequence[int] = [*leaf.shape[:dim], len(places), *leaf.shape[dim + 1 :]]
        return leaf.new_empty(shape)
    return leaf.detach().index_select(dim, places).requires_grad_(leaf.requires_grad)


Point = tuple[int, ...]  # (b,) or (b, s)
DEGREES = (1, 2)  # affine in b, at most quadratic in s


def symbols(count: int) -> tuple[Any, ...]:
    """``b``, or ``b`` and ``s``: positive integers."""
    import sympy  # type: ignore[import-untyped]

    return tuple(sympy.Symbol(name, positive=True, integer=True) for name in ("b", "s")[:count])


def polynomial_through(samples: Mapping[Point, int]) -> Any | None:
    """The sympy polynomial through all samples; None where no polynomial of low degree fits.

    Args:
        samples: integers on a grid; at least one more value of each symbol than its degree
            needs, so that a wrong form is noticed.

    Raises:
        ValueError: there are fewer.
    """
    import sympy

    axes = [sorted(set(axis)) for axis in zip(*samples, strict=True)]
    for axis, degree in zip(axes, DEGREES, strict=False):
        if len(axis) < degree + 2:
            raise ValueError(f"a fit of degree {degree} needs {degree + 2} sizes, not {axis}")
    nodes = tuple(product(*(axis[: n + 1] for axis, n in zip(axes, DEGREES, strict=False))))
    found = _solver(nodes) * sympy.Matrix([samples[node] for node in nodes])
    if any(found.dot(_monomials(point)) != number for point, number in samples.items()):
        return None
    return found.dot(_monomials(symbols(len(axes))))


@cache
def _solver(nodes: tuple[Point, ...]) -> Any:
    """The matrix that makes coefficients of values at these points."""
    import sympy

    return sympy.Matrix([_monomials(point) for point in nodes]).inv()


def _monomials(at: Sequence[Any]) -> list[Any]:
    powers = product(*(range(degree + 1) for degree in DEGREES[: len(at)]))
    return [prod(x**n for x, n in zip(at, each, strict=True)) for each in powers]
