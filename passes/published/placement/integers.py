"""Times and sizes as integers that never promise more than the file's numbers allow.

Every time is multiplied by one power of two, which is exact, and rounded down.  The integer load
of a placement is then at most its true load times that power, whatever the placement: minimal
integer loads are lower bounds, without a tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdcompile.passes.published.placement_file import LoadProblem

Ints = npt.NDArray[np.int64]
BITS = 52  # sums stay exact in 64-bit integers and in 64-bit floats alike
NEVER = 1 << 60  # more than any sum, twice of it does not overflow


@dataclass(frozen=True, slots=True)
class Integers:
    seconds: tuple[Ints, ...]  # [class][group]; 0 where not supported
    supported: tuple[npt.NDArray[np.bool_], ...]
    costs: Ints
    sizes: Ints
    limits: tuple[int | None, ...]  # [class]; None where everything fits
    shift: int  # integer time = time · 2^shift, rounded down
    exact_sizes: bool

    def units(self, value: float) -> int:
        return math.floor(math.ldexp(value, self.shift))

    def time(self, value: int) -> float:
        return math.ldexp(value, -self.shift)


def integers(problem: LoadProblem, *, sizes_up: bool = True) -> Integers:
    """`sizes_up`: sizes that are no whole numbers round up, so that what fits fits exactly;
    otherwise down, so that what does not fit does not fit exactly."""
    finite = [
        [row[c] if math.isfinite(row[c]) else 0.0 for row in problem.seconds]
        for c in range(len(problem.classes))
    ]
    largest = max((math.fsum(row) for row in finite), default=0.0) + math.fsum(problem.costs)
    shift = BITS - math.frexp(largest)[1]
    sizes, limits, exact = _sizes(problem, sizes_up)
    return Integers(
        tuple(_floored(row, shift) for row in finite),
        tuple(
            np.array([math.isfinite(row[c]) for row in problem.seconds], dtype=np.bool_)
            for c in range(len(problem.classes))
        ),
        _floored(list(problem.costs), shift),
        sizes,
        limits,
        shift,
        exact,
    )


def _floored(values: list[float], shift: int) -> Ints:
    return np.array([math.floor(math.ldexp(value, shift)) for value in values], dtype=np.int64)


def _sizes(problem: LoadProblem, up: bool) -> tuple[Ints, tuple[int | None, ...], bool]:
    total = math.fsum(problem.sizes)
    shift = 0
    exact = total < 2**BITS and all(size.is_integer() for size in problem.sizes)
    if not exact:
        shift = BITS - math.frexp(total)[1] - 1
    turn = math.ceil if up else math.floor
    scaled = [turn(math.ldexp(size, shift)) for size in problem.sizes]
    limits = tuple(
        None if kind.memory >= total else math.floor(math.ldexp(kind.memory, shift))
        for kind in problem.classes
    )
    return np.array(scaled, dtype=np.int64), limits, exact
