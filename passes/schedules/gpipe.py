"""GPipe (Huang et al., 2019, arXiv 1811.06965): all forwards, then all backwards.

Four stages, four microbatches, a backward twice as long as a forward:

    stage 0  F0 F1 F2 F3 .. .. .. .. .. .. .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
    stage 1     F0 F1 F2 F3 .. .. .. .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
    stage 2        F0 F1 F2 F3 .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
    stage 3           F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3

Backward is in ascending order, as eager gradient accumulation is, so that sums are bitwise
equal.  Every microbatch is in flight at once.  A rank with several stages runs them one after the
other, forward from the first and backward from the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdcompile.schedule import Action
from pdcompile.schedule.registry import StageWork, Task


def order(stages: Sequence[StageWork]) -> Iterator[Task]:
    """The tasks of one rank in one call."""
    for own in stages:
        for microbatch in own.microbatches:
            yield Task(own.stage, Action.FORWARD, 0, microbatch)
    for own in reversed(stages):
        for microbatch in own.microbatches:
            yield Task(own.stage, Action.BACKWARD, 0, microbatch)
