"""1F1B with a flush (PipeDream-Flush, Narayanan et al., 2021, arXiv 2006.09503).

Four stages, five microbatches, warm-up 3 2 1 0, a backward twice as long as a forward:

    stage 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 B0 F4 B1 B1 .. B2 B2 .. B3 B3 .. B4 B4
    stage 1     F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 F4 B2 B2 .. B3 B3 .. B4 B4
    stage 2        F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 .. B4 B4
    stage 3           F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4

The same time as GPipe when nothing is sent, but only warmup + 1 microbatches in flight.
A deeper warm-up hides transfers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdcompile.schedule import Action
from pdcompile.schedule.registry import StageWork, Task


def order(stages: Sequence[StageWork]) -> Iterator[Task]:
    """The tasks of one rank in one call."""
    (own,) = stages
    for count, microbatch in enumerate(own.microbatches):
        for forward in own.forwards(count):
            yield Task(own.stage, Action.FORWARD, 0, forward)
        yield Task(own.stage, Action.BACKWARD, 0, microbatch)
