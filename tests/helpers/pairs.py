"""A schedule that is in no registry: two forwards, then their two backwards, and so on.

Three stages, four microbatches, a backward twice as long as a forward:

    stage 0  F0 F1 .. .. .. .. .. .. B0 B0 B1 B1 F2 F3 .. .. .. .. .. .. B2 B2 B3 B3
    stage 1     F0 F1 .. .. .. B0 B0 B1 B1 .. .. .. F2 F3 .. .. .. B2 B2 B3 B3
    stage 2        F0 F1 B0 B0 B1 B1 .. .. .. .. .. .. F2 F3 B2 B2 B3 B3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdcompile.schedule import Action
from pdcompile.schedule.registry import StageWork, Task


def order(stages: Sequence[StageWork]) -> Iterator[Task]:
    """The tasks of one rank in one call."""
    (own,) = stages
    for first in range(0, len(own.microbatches), 2):
        pair = own.microbatches[first : first + 2]
        for action in (Action.FORWARD, Action.BACKWARD):
            for microbatch in pair:
                yield Task(own.stage, action, 0, microbatch)
