"""Python's garbage collector while much is built and little is dropped."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATIONS = 50_000  # objects made and still there, after which the newest are looked through


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Look for garbage less often than Python does by itself; afterwards as before.

    Graphs, schedules and plans are a million small objects that stay: looking through them
    every 700 took a fifth of the time of planning a large model.  Not for passes that run real
    tensors, of which a circle of references may hold many bytes.
    """
    first, *later = gc.get_threshold()
    if 0 < first < ALLOCATIONS:
        gc.set_threshold(ALLOCATIONS, *later)
    try:
        yield
    finally:
        gc.set_threshold(first, *later)
