"""ZB-V (Zero Bubble: Qi et al., 2023, arXiv 2401.10241): two stages a rank in a V, backward split.

Of R ranks, rank r holds the stages r and 2 R - 1 - r: a microbatch goes out over the ranks and back
again, so that its last stage is where its first one is.  As under ZB-H1, the gradients of a
stage's inputs (I) are what others wait for, and those of its weights (W) fill the time.  Two
ranks, four microbatches, all parts of equal length:

    stage 0  F0 F1 F2 .. .. .. .. .. .. F3 I0 W0 .. .. .. I1 W1 .. .. .. I2 W2 I3 W3
    stage 1     F0 .. F1 .. .. .. F2 I0 W0 .. .. .. F3 I1 W1 .. .. I2 .. .. I3 W2 .. W3
    stage 2        F0 .. F1 I0 W0 .. .. .. F2 I1 W1 .. .. .. F3 I2 .. W2 I3 .. .. W3
    stage 3           F0 I0 W0 F1 I1 W1 .. .. .. F2 I2 W2 .. .. F3 I3 W3

With all parts equal and 2 R - 1 microbatches or more a rank never idles once it has begun: of the
6 m + R - 1 parts that m of them take, the last rank waits R - 1 for the first one to come by.
Fewer take 4 (R + m) - 2 parts where that is more (one less up to m = R).

Rank r begins with 2 (R - r) - 1 forwards out, as many as come by before the first microbatch is
back; then r pairs of forwards, back and out; then R - r microbatches end their way back.  From then
on F I W of the stage out and F I W of the stage back take turns, until only gradients of inputs
are waited for: r gradients of weights of each stage come last.  A rank holds 2 R microbatches of
its two stages together at most (of the stage out 2 R - r, of the stage back r + 1), as much memory
as R microbatches of stages twice as long, which the first rank holds under 1F1B.

Fewer microbatches than fill the pipeline follow the order of 2 R - 1 without what is not there,
which cannot deadlock if the whole does not.  Both parts come in ascending order of microbatches:
sums are eager's, bit for bit.  With one stage a rank this is 1F1B with its backward split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pdcompile.passes.schedules import zero_bubble
from pdcompile.schedule import Action
from pdcompile.schedule.registry import StageWork, Task

OUT, BACK = 0, 1  # the rank's stage on the way out, and the one on the way back
FORWARD, INPUT, WEIGHT = Action.FORWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT
Turn = tuple[int, Action]


def order(stages: Sequence[StageWork]) -> Iterator[Task]:
    """The tasks of one rank in one call."""
    if len(stages) == 1:
        yield from zero_bubble.order(stages)
        return
    rank, ranks = stages[OUT].stage, stages[OUT].num_stages // len(stages)
    done = Counter[Turn]()
    tasks: list[Task] = []
    for leg, action in _turns(rank, ranks, max(len(stages[OUT].microbatches), 2 * ranks - 1)):
        own, n = stages[leg], done[leg, action]
        done[leg, action] += 1
        if n >= len(own.microbatches):
            continue
        tasks.append(Task(own.stage, action, 0, own.microbatches[n]))
        waited_for = rank == ranks - 1 and (leg, action) == (OUT, INPUT)
        if waited_for and tasks[-2][:2] == (stages[BACK].stage, WEIGHT):
            tasks[-2:] = tasks[:-3:-1]  # the ranks before wait for what the last one turns around
    yield from tasks


def _turns(rank: int, ranks: int, count: int) -> list[Turn]:
    """Turns of the rank with so many microbatches that the pipeline is filled."""
    ahead = ranks - rank
    out, back = ([(leg, action) for action in (FORWARD, INPUT, WEIGHT)] for leg in (OUT, BACK))
    fresh = count - (2 * ahead - 1) - rank  # that set out while others end
    return [
        *out[:1] * (2 * ahead - 1),
        *(back[:1] + out[:1]) * rank,
        *back * ahead,
        *(out + back) * fresh,
        *(out[1:] + back) * (count - ranks - fresh),
        *(out[1:2] + back[1:2]) * rank,
        *out[1:] * ahead,
        *back[2:] * rank,
        *out[2:] * rank,
    ]
