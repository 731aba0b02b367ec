"""Exact polynomials in b and s through integer samples, or the answer that there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

Point = tuple[int, ...]  # (b,) or (b, s)
DEGREES = (1, 2)  # affine in b, at most quadratic in s


def symbols(count: int) -> tuple[Any, ...]:
    """``b``, or ``b`` and ``s``: positive integers."""
    import sympy  # type: ignore[import-untyped]

    return tuple(sympy.Symbol(name, positive=True, integer=True) for name in ("b", "s")[:count])


def fit(samples: Mapping[Point, int]) -> Any | None:
    """The sympy polynomial that goes through all samples; None where none of low degree does.

    Args:
        samples: integers on a grid; at least one more value of each symbol than its degree
            needs, so that a wrong form is noticed.

    Raises:
        ValueError: the points are no such grid.
    """
    import sympy

    axes = [sorted({point[i] for point in samples}) for i in range(len(next(iter(samples))))]
    size = 1
    for axis, degree in zip(axes, DEGREES, strict=False):
        size *= len(axis)
        if len(axis) < degree + 2:
            raise ValueError(f"a fit of degree {degree} needs {degree + 2} sizes, not {axis}")
    if size != len(samples):
        raise ValueError("the samples are not on a grid")
    coefficients = _coefficients(samples, axes)
    if any(_value(coefficients, point) != number for point, number in samples.items()):
        return None
    b_and_s = symbols(len(axes))
    return sympy.Add(
        *(
            sympy.Rational(c.numerator, c.denominator)
            * sympy.Mul(*(x**n for x, n in zip(b_and_s, powers, strict=True)))
            for powers, c in coefficients.items()
        )
    )


def _coefficients(
    samples: Mapping[Point, int], axes: Sequence[Sequence[int]]
) -> dict[Point, Fraction]:
    """By exponents of (b,) or (b, s), from the first values of each axis that suffice."""
    found = {point: Fraction(number) for point, number in samples.items()}
    for i, axis in enumerate(axes):
        used = axis[: DEGREES[i] + 1]
        lines: dict[Point, list[Fraction]] = {}
        for point in found:
            rest = (*point[:i], 0, *point[i + 1 :])
            if rest not in lines:
                values = [found[(*point[:i], x, *point[i + 1 :])] for x in used]
                lines[rest] = _line(used, values)
        found = {
            (*rest[:i], n, *rest[i + 1 :]): coefficient
            for rest, line in lines.items()
            for n, coefficient in enumerate(line)
        }
    return {powers: c for powers, c in found.items() if c}


def _line(xs: Sequence[int], ys: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients, constant first, of the polynomial through the points (Newton's form)."""
    differences = list(ys)
    for level in range(1, len(xs)):
        for i in range(len(xs) - 1, level - 1, -1):
            differences[i] = (differences[i] - differences[i - 1]) / (xs[i] - xs[i - level])
    result = [Fraction(0)] * len(xs)
    for i in range(len(xs) - 1, -1, -1):
        shifted = [Fraction(0), *result[:-1]]
        result = [shift - xs[i] * old for shift, old in zip(shifted, result, strict=True)]
        result[0] += differences[i]
    return result


def _value(coefficients: Mapping[Point, Fraction], point: Point) -> Fraction:
    total = Fraction(0)
    for powers, c in coefficients.items():
        for x, n in zip(point, powers, strict=True):
            c *= x**n
        total += c
    return total
