"""StepValues: what one step of a model leaves behind, and where two of them differ."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepValues:
    """Copies of everything that one step of one mode leaves behind, by name.

    `cast_to`: the dtype of the autocast region in which it was computed.
    """

    outputs: dict[str, Any]
    loss: Tensor | None
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    cast_to: torch.dtype | None = None


def differing(
    expected: StepValues, got: StepValues, *, exact: bool = True, held: Collection[str] = ()
) -> Iterator[tuple[str, str, float]]:
    """(kind, name, largest difference) of each output, loss, gradient and buffer that differs.

    Args:
        held: buffers that must be in `got`; others may be missing, as forward makes them anew.
    """
    rows = [
        *(
            ("output", name, one, got.outputs.get(name))
            for name, one in expected.outputs.items()
            if isinstance(one, Tensor) or name in got.outputs
        ),
        ("loss", "loss", expected.loss, got.loss),
        *(("gradient", name, g, got.gradients.get(name)) for name, g in expected.gradients.items()),
        *(
            ("buffer", name, one, got.buffers.get(name))
            for name, one in expected.buffers.items()
            if name in held or name in got.buffers
        ),
    ]
    sizes = {name: _size(one) for name, one in expected.gradients.items()}
    largest = max((size for size in sizes.values() if isfinite(size)), default=0.0)
    for kind, name, one, other in rows:
        if kind == "gradient" and not exact and isinstance(one, Tensor):
            noise = NOISE * rounding(expected.cast_to or one.dtype)[0] * largest
            if isinstance(other, Tensor) and max(sizes[name], _size(other)) < noise:
                continue  # sums that cancel, as of a bias that a norm takes away
        apart = distance(one, other, exact=exact, cast_to=expected.cast_to)
        if apart is not None:
            yield kind, name, apart


NOISE = 0.1  # of the rounding of a step's largest gradient: a smaller one may be rounding alone
CASTS = 4  # times the rounding of one number: a region casts between all ops of a model
_ROUNDING = {torch.bfloat16: (1.6e-2, 1e-5), torch.float16: (1e-3, 1e-5)}


def rounding(dtype: torch.dtype) -> tuple[float, float]:
    """Differences that kernels make which add in no fixed order: relative to a number or to the
    largest one in its tensor that differs, and absolute."""
    return _ROUNDING.get(dtype, (1e-5, 1e-8))


def distance(
    one: Any, other: Any, *, exact: bool = True, cast_to: torch.dtype | None = None
) -> float | None:
    """The largest absolute difference, infinite where there is no number for it; None if equal.

    Unless `exact` up to rounding, which is that of `cast_to` where that is coarser.

    A parameter that got no gradient and one that got zeros update alike in most optimizers, but
    not in all: these differ.
    """
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        equal = type(one) is type(other) and bool(one == other or (one != one and other != other))
        return None if equal else float("inf")
    one, other = (t.to_dense() if t.layout != torch.strided else t for t in (one, other))
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if one.numel() == 0 or torch.equal(one, other):
        return None
    if not (one.is_floating_point() or one.is_complex()):
        return float((one.to(torch.float64) - other.to(torch.float64)).abs().max())
    equal = (one == other) | ((one != one) & (other != other))
    if bool(equal.all()) or not (exact or _far(one[~equal], other[~equal], cast_to)):
        return None
    gap = (one - other).abs()
    return float(gap.max()) if bool(torch.isfinite(gap).all()) else float("inf")


def _size(gradient: Tensor | None) -> float:
    """The largest number of a gradient; infinite where nobody knows."""
    if gradient is None or not gradient.numel():
        return 0.0
    known = gradient.layout == torch.strided and bool(torch.isfinite(gradient).all())
    return float(gradient.abs().max()) if known else float("inf")


def _far(one: Tensor, other: Tensor, cast_to: torch.dtype | None) -> bool:
    """True if numbers that differ do so by more than rounding.

    Those that are equal say nothing of what the others sum: masks are filled with 1e9 and more.
    """
    relative, absolute = rounding(one.dtype)
    if cast_to is not None:
        region = rounding(cast_to)
        relative, absolute = max(relative, CASTS * region[0]), max(absolute, region[1])
    largest = one[torch.isfinite(one)].abs().max() if bool(torch.isfinite(one).any()) else 0.0
    allowed = max(absolute, relative * float(largest))
    return not torch.allclose(one, other, relative, allowed, equal_nan=True)


def same(one: Any, other: Any) -> bool:
    """True if two values are equal to the last bit; NaN equals NaN."""
    return distance(one, other) is None
