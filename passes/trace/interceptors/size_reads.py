"""SizeReads: sizes in the hands of the model's Python, which note the answers that it gets."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from pdcompile.passes.trace.assumptions import Made
from pdcompile.passes.trace.tape.interceptor import Interceptor, Proceed, patched

MOST_PARTS = 16  # of a computation with sizes; beyond, what it reads is noted as a hash is
MOST_ANSWERS = 500


class TracedSize(int):
    """A size, or an integer that Python made of sizes; `answers` gets comparisons and hashes.

    `parts`: how many numbers it was made of.
    """

    made: Made
    answers: dict[Made, Any]
    parts: int
    __class__ = int  # type: ignore[assignment]

    def __new__(cls, size: int, made: Made, answers: dict[Made, Any], parts: int = 1) -> TracedSize:
        found = super().__new__(cls, size)
        found.made, found.answers, found.parts = made, answers, parts
        return found

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (self.read(),)

    def read(self) -> int:
        """The plain number, noted as one that a table by sizes may have been asked for."""
        self.answers[int.__hash__, self.made] = int.__hash__(self)
        return int.__add__(self, 0)


def _noted(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: TracedSize, *others: Any) -> Any:
        result = plain(self, *others)
        if type(result) not in (int, bool):
            return result
        parts = sum(getattr(each, "parts", 1) for each in (self, *others))
        if parts > MOST_PARTS or len(self.answers) > MOST_ANSWERS:
            for each in (self, *others):
                if type(each) is TracedSize:
                    each.read()
            return result
        made = plain, *(getattr(each, "made", each) for each in (self, *others))
        if type(result) is int and name != "__hash__":
            return TracedSize(result, made, self.answers, parts)
        self.answers[made] = result
        return result

    return method


_OF_TWO = ("add", "sub", "mul", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
for _name in ("lt", "le", "eq", "ne", "gt", "ge", "bool", "hash", "neg", "abs", *_OF_TWO):
    setattr(TracedSize, f"__{_name}__", _noted(f"__{_name}__"))
for _name in _OF_TWO:
    setattr(TracedSize, f"__r{_name}__", _noted(f"__r{_name}__"))


def computed(made: Made, leaf: Callable[[Made], Any]) -> Any:
    """The computation with what `leaf` gives for its numbers and sizes: its result if they are
    all integers for which it has one."""
    if type(made) is not tuple or type(made[0]) is str:
        return leaf(made)
    function, parts = made[0], [computed(part, leaf) for part in made[1:]]
    with suppress(ArithmeticError, ValueError):
        if all(isinstance(part, int) for part in parts):
            return function(*parts)
    return function, *parts


class SizeReads(Interceptor):
    """Hands out ``x.shape``, ``x.size()``, ``x.numel()`` and ``len(x)`` as `TracedSize`."""

    def call(self, func: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        if func is Tensor.size and (len(args) > 1 or kwargs):
            sizes = self.call(func, args[:1], {}, proceed)
            return sizes[args[1] if len(args) > 1 else kwargs["dim"]]
        if func in (Tensor.numel, Tensor.nelement, torch.numel):
            return math.prod(self.call(Tensor.size, args[:1], {}, proceed))
        result, fakes = proceed(func, args, kwargs), self.tape.fakes
        if type(result) is not torch.Size or not args:
            return result
        name = fakes.value_names.get(id(fakes.faked(args[0])))
        answers = fakes.findings.answers
        sizes = enumerate(result)
        return torch.Size(TracedSize(n, (name, i), answers) if name else n for i, n in sizes)

    def around(self) -> AbstractContextManager[None]:
        plain = len

        def length(value: Any) -> int:
            found = plain(value)
            return value.shape[0] if isinstance(value, Tensor) else found

        return patched((builtins, "len", length))
