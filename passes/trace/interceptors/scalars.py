"""Scalar: a number that the model's Python gets from ``item()``, whose value is not known yet.

A comparison with another number is made on tensors, so that ``assert lengths.max().item() <= size``
reads a truth value.  Everything else needs the number itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pdcompile.passes.trace.tape.arguments import with_parts
from pdcompile.passes.trace.tape.interceptor import Interceptor, Proceed


class Scalar:
    """Stands for ``tensor.item()``.

    Args:
        number: returns the number, or raises where it is not known.
    """

    def __init__(self, tensor: Tensor, number: Callable[[], Any]) -> None:
        self._tensor = tensor
        self._number = number

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The type that item() returns, for isinstance()."""
        return float if self._tensor.dtype.is_floating_point else int

    def __bool__(self) -> bool:
        return bool(self._tensor)

    def __hash__(self) -> int:
        return hash(self._number())

    def __repr__(self) -> str:
        return repr(self._number())

    def __format__(self, form: str) -> str:
        return format(self._number(), form)


def _compared(compare: Callable[[Any, Any], Any]) -> Callable[[Scalar, Any], Any]:
    def method(self: Scalar, other: Any) -> Any:
        if type(other) not in (int, float, bool):
            return compare(self._number(), other)
        exact = torch.float64 if isinstance(other, float) else torch.int64
        if self._tensor.dtype.is_floating_point:
            exact = torch.float64
        tensor = self._tensor if self._tensor.dtype is exact else self._tensor.to(exact)
        return bool(compare(tensor, other))

    return method


def _computed(compute: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def method(self: Scalar, *others: Any) -> Any:
        number = self._number()
        return compute(*others, number) if swapped else compute(number, *others)

    return method


for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    setattr(Scalar, f"__{_name}__", _compared(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Scalar, f"__{_name}__", _computed(getattr(operator, _name)))
    setattr(Scalar, f"__r{_name}__", _computed(getattr(operator, _name), swapped=True))
for _name in ("neg", "pos", "abs", "index"):
    setattr(Scalar, f"__{_name}__", _computed(getattr(operator, _name)))
for _name, _function in (("int", int), ("float", float), ("round", round)):
    setattr(Scalar, f"__{_name}__", _computed(_function))


class HandedOutNumbers(Interceptor):
    """Replaces each `Scalar` among the arguments of operators by its number."""

    def call(self, func: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        if self.tape.handed_out is not None:
            args, kwargs = numbers(args), numbers(kwargs)
        return proceed(func, args, kwargs)


def numbers(argument: Any) -> Any:
    """An argument with numbers in place of `Scalar` objects."""
    if type(argument) is Scalar:
        return argument._number()
    return with_parts(argument, numbers)
