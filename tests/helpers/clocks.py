"""A clock for searches whose outcome must not tell how busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pdcompile.passes.costs.forecast import Rehearsals, rehearsals

TICK = 0.001  # seconds from one look at the clock to the next


def ticking(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """A clock that goes on only when somebody looks at it.

    What rehearsals took by another clock, in tests before, is forgotten: a search tells by it how
    long making a plan will take.
    """
    now = [0.0]

    def monotonic() -> float:
        now[0] += TICK
        return now[0]

    monkeypatch.setattr(time, "monotonic", monotonic)
    monkeypatch.setattr(rehearsals, "rates", Rehearsals().rates)
    return lambda: now[0]
