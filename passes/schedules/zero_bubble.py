"""ZB-H1 (Zero Bubble: Qi et al., 2023, arXiv 2401.10241): 1F1B with its backward split.

The stage before waits for the gradients of a stage's inputs (I), nobody for those of its weights
(W): they fill the time in which the stage would wait.  Four stages, seven microbatches, warm-up
3 2 1 0, all parts of equal length:

    stage 0  F0 F1 F2 F3 .. .. .. I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 I4 W4 I5 W5 I6 W6
    stage 1     F0 F1 F2 .. .. I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 I5 W4 I6 W5 W6
    stage 2        F0 F1 .. I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 I6 W4 W5 W6
    stage 3           F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 W4 W5 W6

Stage s puts its weights off by w_0 − w_s microbatches, so that each stage holds as many
activations as the first one does anyway.  With all parts equal and 2N − 1 microbatches or more
each of N stages idles for N − 1 parts, where 1F1B idles for 3 (N − 1).  Both parts come in
ascending order of microbatches: sums are eager's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdcompile.schedule import Action
from pdcompile.schedule.registry import StageWork, Task


def order(stages: Sequence[StageWork]) -> Iterator[Task]:
    """The tasks of one rank in one call."""
    (own,) = stages
    microbatches = own.microbatches
    for count, microbatch in enumerate(microbatches):
        for forward in own.forwards(count):
            yield Task(own.stage, Action.FORWARD, 0, forward)
        yield Task(own.stage, Action.BACKWARD_INPUT, 0, microbatch)
        if count >= own.delay:
            yield Task(own.stage, Action.BACKWARD_WEIGHT, 0, microbatches[count - own.delay])
    for microbatch in microbatches[max(0, len(microbatches) - own.delay) :]:
        yield Task(own.stage, Action.BACKWARD_WEIGHT, 0, microbatch)
