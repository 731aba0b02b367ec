"""RoundPipe: ranks that take what comes next in turn (Luo et al., 2026, arXiv 2604.27085).

No stage has a rank of its own: of S stages and R ranks of one host, stage s of microbatch i is on
rank (i S + s) mod R.  So a stage that is much longer than the others, such as a head with a large
vocabulary, keeps all ranks busy in turn, and how many stages there are is free.

It is a case of equal replicas of stages in turn (`interleaved`): with g = gcd(S, R) stage s has the
R / g ranks r = s mod g, and takes them in another order than the stage before.  Microbatches come
by a rank as they do there, one stage after the other, and from its first backward on one forward
and one backward take turns, so that what is sent has one of these to travel in.  Where g is 1 all
ranks are always busy with the same stage: devices idle at the end alone, where the microbatches are
no multiple of R.  Three stages on two ranks, four microbatches; stage.microbatch, a backward twice
as long as a forward:

    stage 0  is on the ranks 0 1 0 1
    stage 1  is on the ranks 1 0 1 0
    stage 2  is on the ranks 0 1 0 1

    rank 0 F0.0 F1.1 F2.0 B2.0 B2.0 F0.2 B1.1 B1.1 F1.3 B0.0 B0.0 F2.2 B2.2 B2.2 B1.3 B1.3 B0.2 B0.2
    rank 1 F0.1 F1.0 F2.1 B2.1 B2.1 F0.3 B1.0 B1.0 F1.2 B0.1 B0.1 F2.3 B2.3 B2.3 B1.2 B1.2 B0.3 B0.3

A rank holds as many microbatches as it has stages: with recomputation their inputs alone.

Where weights may be old, an update that waits for other ranks comes as late as is legal, before the
first forward that needs it: gradients are summed while the next minibatch runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdcompile.passes.schedules import interleaved
from pdcompile.schedule import Action
from pdcompile.schedule.registry import StageWork, Task


def order(stages: Sequence[StageWork]) -> Iterator[Task]:
    """The tasks of one rank in one call."""
    late = [(t, own) for own in stages if own.late for t in own.unstepped]
    due = [(t, own.stage) for t, own in late if own.flush or t < -own.lag]
    for minibatch, stage in sorted(due):  # all stages make one before any makes the next
        yield Task(stage, Action.STEP, minibatch, -1)
    yield from interleaved.order(stages)
