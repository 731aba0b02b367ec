"""Random generators around a capture: untouched afterwards, and nobody draws unnoticed.

A number from `random` or numpy would be written into the graph once and for all.  No such call
passes torch, so the states of the generators are compared at every op.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from pdcompile.errors import TraceError
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.interceptor import Interceptor
from pdcompile.passes.trace.tape.observer import locate


class OutsideDraw(TraceError):
    """Random numbers were drawn or generators seeded outside of recorded ops."""


def _outside(generator: str, where: str | None) -> OutsideDraw:
    message, remedy = refusals.OUTSIDE_RANDOM
    return OutsideDraw(message.format(generator), where=where, remedy=remedy)


class Sentinel:
    """Remembers the state of every generator that forward might touch."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()
        self._torch_seed = torch.default_generator.initial_seed()
        self._torch = torch.default_generator.get_state()

    def check(self, where: str | None) -> None:
        """Raise TraceError when a generator other than torch's ops' was used or seeded."""
        if random.getstate() != self._python:
            raise _outside("Python's random module", where)
        if _numpy_state() != self._numpy:
            raise _outside("numpy.random", where)
        if torch.default_generator.initial_seed() != self._torch_seed:
            raise _outside("torch's default generator", where)

    def check_torch(self, where: str | None) -> None:
        """The same for draws from torch's generator; outside of all modes only."""
        if not torch.equal(torch.default_generator.get_state(), self._torch):
            raise _outside("torch's default generator", where)

    def restore(self) -> None:
        """Put all generators back."""
        random.setstate(self._python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._numpy is not None:
            state = numpy.random.get_state(legacy=False)
            state["state"] = {
                "key": numpy.frombuffer(self._numpy[0], dtype=numpy.uint32),
                "pos": self._numpy[1],
            }
            numpy.random.set_state(state)
        torch.default_generator.set_state(self._torch)


class Generators(Interceptor):
    """Nobody draws unnoticed, or seeds."""

    _sentinel: Sentinel | None = None

    @contextmanager
    def around(self) -> Iterator[None]:
        """Generators are guarded, and put back at the end."""
        tape = self.tape
        with guarded() as self._sentinel, not_reseeded(self._draws, tape.where):
            yield

    def _draws(self) -> int:
        return sum(op.draw is not None for op in self.tape.ops)

    def recorded(self, source: str) -> None:
        if self._sentinel is not None and self.tape.assumed.watched_draws:
            self._sentinel.check(source)


@contextmanager
def guarded() -> Iterator[Sentinel]:
    """A sentinel whose generators are put back at the end; enter it outside of all modes.

    Nobody is told the seed inside: it would become a number of the graph.
    """
    sentinel = Sentinel()
    told = torch.random.initial_seed
    try:
        torch.initial_seed = torch.random.initial_seed = _untold
        yield sentinel
        sentinel.check("forward, after its last operator")
        sentinel.check_torch("forward")
    finally:
        torch.initial_seed = torch.random.initial_seed = told
        sentinel.restore()


def _untold() -> NoReturn:
    message, remedy = refusals.SEED
    raise OutsideDraw(message, where=locate(None)[0], remedy=remedy)


@contextmanager
def not_reseeded(draws: Callable[[], int], where: Callable[[], str | None]) -> Iterator[None]:
    """While this is open nobody may seed torch's generator, nor turn it back to draw again.

    Both would have eager draw the same numbers again, and every draw of a graph has its own.

    Args:
        draws: how many there were so far.
        where: the line of the model that is running.
    """
    functions: Any = torch.random
    plain = functions.default_generator
    functions.default_generator = _Unchanged(plain, draws, where)
    try:
        yield
    finally:
        functions.default_generator = plain


class _Unchanged:
    """torch's generator, for the functions of torch.random."""

    def __init__(
        self, plain: torch.Generator, draws: Callable[[], int], where: Callable[[], str | None]
    ) -> None:
        self._plain = plain
        self._draws = draws
        self._where = where
        self._states: list[tuple[torch.Tensor, int]] = []  # that were asked for, and when

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def get_state(self) -> torch.Tensor:
        self._states.append((self._plain.get_state(), self._draws()))
        return self._states[-1][0]

    def set_state(self, state: torch.Tensor) -> None:
        if all(known is not state or at != self._draws() for known, at in self._states):
            raise _outside("torch's default generator (set_rng_state)", self._where())

    def manual_seed(self, seed: int) -> Any:
        raise _outside("torch's default generator (manual_seed)", self._where())

    def seed(self) -> int:
        raise _outside("torch's default generator (seed)", self._where())


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    state = numpy.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return None
    return state["state"]["key"].tobytes(), int(state["state"]["pos"])
