"""Interleaved 1F1B: several stages a rank, in turn (Narayanan et al., 2021, arXiv 2104.04473).

Of R ranks, rank r holds the stages r, R + r, 2R + r, …: a microbatch comes by each rank several
times, so that the pipeline is filled after R short stages.  Microbatches go in rounds of R: a rank
runs a round through its first stage, then the same round through its next one, and backwards from
its last stage to its first.  With k stages a rank it begins with 2 (R - 1 - r) + (k - 1) R
forwards; then one forward and one backward take turns.  Two ranks with two stages each, four
microbatches, a backward twice as long as a forward:

    stage 0  F0 F1 .. .. F2 .. .. .. F3 .. .. .. B0 B0 .. B1 B1 .. .. .. .. .. .. B2 B2 B3 B3
    stage 1     F0 F1 .. .. .. .. .. .. F2 B0 B0 F3 B1 B1 .. .. .. .. .. .. B2 B2 B3 B3
    stage 2        F0 F1 .. .. B0 B0 .. B1 B1 F2 .. .. F3 .. .. .. B2 B2 .. B3 B3
    stage 3           F0 B0 B0 F1 B1 B1 .. .. .. .. .. .. F2 B2 B2 F3 B3 B3

Without transfers devices idle for (R - 1) / (k m + R - 1) of the time when m is a multiple of R:
the bubble of 1F1B, divided by k.  Twice the ranks that follow, as against 1F1B's once, hides the
transfers, of which there are more.

An extra warm-up of e ("interleaved+e": Kimi K2, arXiv 2507.20534, section 2.4) puts e forwards more
before every rank's first backward, so that a send has e turns of compute more to overlap with, and
holds e microbatches more.  Between alike stages transfers are hidden without it; where the layers
do not divide and some stages are longer than others, it makes room for these.

A minibatch that is no multiple of R ends with a round that is not full: the order is that of full
rounds without what is not there.  What is left of an order that cannot deadlock cannot either, and
a stage holds no more than under a longer minibatch.  With one stage a rank this is 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdcompile.passes.schedules import one_f_one_b
from pdcompile.schedule import Action
from pdcompile.schedule.registry import StageWork, Task


def order(stages: Sequence[StageWork], extra: int = 0) -> Iterator[Task]:
    """The tasks of one rank in one call, with so many forwards more before its first backward."""
    if len(stages) == 1:
        yield from one_f_one_b.order(stages)
        return
    rank, ranks = stages[0].stage, stages[0].num_stages // len(stages)
    forwards, backwards = _rounds(stages, ranks), _rounds(stages[::-1], ranks)
    ahead = 2 * (ranks - 1 - rank) + (len(stages) - 1) * ranks + extra
    for turn in range(len(forwards) + ahead):
        both = ((Action.FORWARD, forwards, turn), (Action.BACKWARD, backwards, turn - ahead))
        for action, listed, place in both:
            if 0 <= place < len(listed):
                own, n = listed[place]
                if n < len(own.microbatches):
                    yield Task(own.stage, action, 0, own.microbatches[n])


def _rounds(stages: Sequence[StageWork], ranks: int) -> list[tuple[StageWork, int]]:
    """Full rounds of microbatches by their number, each through one stage after the other."""
    count = max(len(own.microbatches) for own in stages)
    return [
        (own, first + n) for first in range(0, count, ranks) for own in stages for n in range(ranks)
    ]
