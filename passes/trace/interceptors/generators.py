"""Random generators around a capture: draws outside of torch are refused, states are restored.

Numbers that `values.drawn` does not see, because `rand` was imported by itself, would become
constants of the graph.  Such calls do not pass torch, so the states of the generators are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from pdcompile.eager.own_draws import other_threads
from pdcompile.errors import TraceError
from pdcompile.ir import python_draws
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.interceptor import Interceptor, patched
from pdcompile.passes.trace.tape.observer import locate


class OutsideDraw(TraceError):
    """Random numbers were drawn or generators seeded outside of recorded ops."""


def _outside(generator: str, where: str | None) -> OutsideDraw:
    """The refusal; where other threads live, one of them may have drawn."""
    told = refusals.error(refusals.OUTSIDE_RANDOM, generator, where)
    if others := other_threads():
        message = f"{told.message}, or another thread does: {', '.join(others)} may draw meanwhile"
        remedy = f"call pipe.prepare before they draw, or, if none draws, {told.remedy}"
        return OutsideDraw(message, where=told.where, remedy=remedy)
    return refusals.as_kind(OutsideDraw, told)


class Sentinel:
    """The states of all generators that forward might use."""

    def __init__(self) -> None:
        self._first = self._now = python_draws.states()
        self._torch_seed = torch.default_generator.initial_seed()
        self._torch = torch.default_generator.get_state()

    def check(self, where: str | None) -> None:
        """Raises TraceError when Python's or numpy's generator was used, or torch's seeded."""
        python, numpy = python_draws.states()
        if python != self._now[0]:
            raise _outside("Python's random module", where)
        if numpy != self._now[1]:
            raise _outside("numpy.random", where)
        if torch.default_generator.initial_seed() != self._torch_seed:
            raise _outside("torch's default generator", where)

    def check_torch(self, where: str | None) -> None:
        """Raises TraceError for draws from torch's generator; outside of all modes only."""
        if not torch.equal(torch.default_generator.get_state(), self._torch):
            raise _outside("torch's default generator", where)

    def follow(self, _: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function of Python's or numpy's generator, which may draw."""
        self.check(None)
        result = function(*args, **kwargs)
        self._now = python_draws.states()
        return result

    def restore(self) -> None:
        """Restores all generators."""
        python_draws.restore(self._first)
        torch.default_generator.set_state(self._torch)


class Generators(Interceptor):
    """Refuses draws and seeds outside of recorded ops."""

    _sentinel: Sentinel | None = None

    @contextmanager
    def around(self) -> Iterator[None]:
        """Guards the generators, and restores them at the end.

        Inside, torch.initial_seed is refused: the seed would become a constant of the graph.
        """
        sentinel = self._sentinel = Sentinel()
        ops = self.tape.ops
        unseeded = Unseeded(lambda: sum(op.draw is not None for op in ops), self.tape.where)
        try:
            with patched(
                (torch, "initial_seed", _refuse_seed),
                (torch.random, "initial_seed", _refuse_seed),
                (torch.random, "default_generator", unseeded),
            ):
                yield
            sentinel.check("forward, after its last operator")
            sentinel.check_torch("forward")
        finally:
            sentinel.restore()

    def recorded(self, source: str) -> None:
        if self._sentinel is not None and self.tape.assumed.watched_draws:
            self._sentinel.check(source)


def _refuse_seed() -> NoReturn:
    raise refusals.as_kind(OutsideDraw, refusals.error(refusals.SEED, "", locate(None)[0]))


class Unseeded:
    """Torch's generator as the functions of torch.random see it, which may not seed it, or restore
    a state that was drawn from since.

    Both would make eager draw the same numbers again, while each draw of a graph has its own.

    Args:
        draws: returns the number of draws so far.
        where: returns the line of the model that is running.
    """

    def __init__(self, draws: Callable[[], int], where: Callable[[], str | None]) -> None:
        self._plain = torch.default_generator
        self._draws = draws
        self._where = where
        # What get_state returned, with the number of draws before it.
        self._states: list[tuple[torch.Tensor, int]] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed"):
            raise _outside(f"torch's default generator ({name})", self._where())
        return getattr(self._plain, name)

    def get_state(self) -> torch.Tensor:
        self._states.append((self._plain.get_state(), self._draws()))
        return self._states[-1][0]

    def set_state(self, state: torch.Tensor) -> None:
        if all(known is not state or at != self._draws() for known, at in self._states):
            raise _outside("torch's default generator (set_rng_state)", self._where())
