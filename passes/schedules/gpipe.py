"""GPipe (Huang et al., 2019, arXiv 1811.06965): all forwards, then all backwards.

Four stages, four microbatches, a backward twice as long as a forward:

    stage 0  F0 F1 F2 F3 .. .. .. .. .. .. .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
    stage 1     F0 F1 F2 F3 .. .. .. .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
    stage 2        F0 F1 F2 F3 .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
    stage 3           F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3

Backward is in ascending order, as eager gradient accumulation is, so that sums are bitwise
equal.  Every microbatch is in flight at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdcompile.schedule import Action


def order(microbatches: Sequence[int]) -> Iterator[tuple[Action, int]]:
    """Compute of one replica for one minibatch, without communication and update."""
    for microbatch in microbatches:
        yield Action.FORWARD, microbatch
    for microbatch in microbatches:
        yield Action.BACKWARD, microbatch
