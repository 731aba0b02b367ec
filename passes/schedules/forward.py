"""Inference: forwards alone, each microbatch through all stages of a rank before the next one.

Four stages, five microbatches:

    stage 0  F0 F1 F2 F3 F4
    stage 1     F0 F1 F2 F3 F4
    stage 2        F0 F1 F2 F3 F4
    stage 3           F0 F1 F2 F3 F4

N stages idle (N − 1) / (m + N − 1) of the time.  Nothing waits for a backward, so that a rank
holds the microbatch that it computes, and receives the next one meanwhile.  Evaluation has this
order under every schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdcompile.schedule import Action
from pdcompile.schedule.registry import StageWork, Task


def order(stages: Sequence[StageWork]) -> Iterator[Task]:
    """The tasks of one rank in one call."""
    for microbatch in sorted({one for own in stages for one in own.microbatches}):
        for own in stages:
            if microbatch in own.microbatches:
                yield Task(own.stage, Action.FORWARD, 0, microbatch)
