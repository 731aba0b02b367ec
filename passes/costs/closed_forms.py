"""The sizes at which costs are sampled, and exact polynomials in b and s through the samples.

The sequence length s is found in the dims of a call, which is made again at other lengths.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.errors import ConfigError, InputError
from pdcompile.hardware import devices

Dims = dict[str, tuple[int, ...]]  # path of an input -> its dims that are the length
COUNT = 4  # lengths to capture at: three for a quadratic form, one that checks it


def sequence_dims(flat: FlatCall, layout: BatchLayout, asked: Any) -> tuple[Dims, str]:
    """Dims of the call's tensors that are the sequence length; ({}, why not) where none is.

    Args:
        asked: "auto": the first dim behind the samples of the first integer or boolean input that
            has one, and every dim of the same size in integer and boolean tensors and in
            tensors of two dims; None: no sequence; a dict from paths to a dim or several.

    Raises:
        ConfigError: `asked` is none of these, or names another path or dim.
        InputError: the named dims have different sizes.
    """
    tensors = {path: leaf for path, leaf in flat.leaves.items() if isinstance(leaf, Tensor)}
    if asked is None:
        return {}, "no sequence was asked for"
    if isinstance(asked, Mapping):
        return _asked(tensors, asked), ""
    if asked != "auto":
        raise ConfigError(
            f"sequence={asked!r} is not known",
            remedy="'auto', None, or a dict from the names of inputs to their length dims",
        )

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


def _asked(tensors: Mapping[str, Tensor], asked: Mapping[Any, Any]) -> Dims:
    found: Dims = {}
    for path, given in asked.items():
        dims = (given,) if isinstance(given, int) else tuple(given)
        if path not in tensors:
            raise ConfigError(
                f"no tensor of the call is named {path!r}",
                where="sequence",
                remedy=f"one of: {', '.join(tensors)}",
            )
        ndim = tensors[path].ndim
        if any(not -ndim <= dim < ndim for dim in dims):
            raise ConfigError(
                f"{path!r} has {ndim} dims, not {max(dims, key=abs)}",
                where="sequence",
                remedy=f"a number from {-ndim} to {ndim - 1}",
            )
        found[path] = tuple(dim % ndim for dim in dims)
    sizes = {tensors[path].shape[dim] for path, dims in found.items() for dim in dims}
    if len(sizes) > 1:
        raise InputError(
            f"the named dims have different sizes: {sorted(sizes)}",
            where="sequence",
            remedy="name dims that grow together",
        )
    return found


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
        ValueError: the points do not form such a grid.
    """

    axes = [sorted({point[i] for point in samples}) for i in range(len(next(iter(samples))))]
    size = 1
    for axis, degree in zip(axes, DEGREES, strict=False):
        size *= len(axis)
        if len(axis) < degree + 2:
            raise ValueError(f"a fit of degree {degree} needs {degree + 2} sizes, not {axis}")
    if size != len(samples):
        raise ValueError("the samples are not on a grid")
    nodes = tuple(tuple(axis[: n + 1]) for axis, n in zip(axes, DEGREES, strict=False))
    known = [samples[point] for point in product(*nodes)]
    for point, number in samples.items():
        if number != sum(w * n for w, n in zip(_weights(nodes, point), known, strict=True)):
            return None
    return _through(nodes, tuple(known))


@cache  # layers are equal
def _through(nodes: tuple[Point, ...], numbers: Point) -> Any:
    import sympy

    forms = _lagrange(nodes, symbols(len(nodes)))
    return sympy.expand(sympy.Add(*(n * form for n, form in zip(numbers, forms, strict=True))))


def _lagrange(nodes: tuple[Point, ...], at: Sequence[Any]) -> list[Any]:
    """Polynomials at `at`, for each point of the grid: 1 there and 0 at its other points."""
    import sympy

    def one(axis: Point, node: int, x: Any) -> Any:
        return prod(
            (x - other) * sympy.Rational(1, node - other) for other in axis if other != node
        )

    return [prod(map(one, nodes, point, at)) for point in product(*nodes)]


@cache
def _weights(nodes: tuple[Point, ...], point: Point) -> list[Fraction]:
    return [Fraction(str(weight)) for weight in _lagrange(nodes, point)]
