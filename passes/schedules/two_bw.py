"""2BW: 1F1B that never drains, on double-buffered weights (Narayanan et al., 2021, 2006.09503).

Minibatch t runs forward and backward on the weights of minibatch t − 1, so that the next
minibatch starts while this one is still in flight.  Two stages, two microbatches a minibatch,
warm-up 1 0; letters are minibatches, | is the end of a call of step, ^ an update:

    stage 0  Fa0 Fa1 .......|Ba0 Fb0 Ba1^Fb1|Bb0 Fc0 Bb1^Fc1|Bc0 Bc1^
    stage 1      Fa0 Ba0 Fa1|Ba1^Fb0 Bb0 Fb1|Bb1^Fc0 Bc0 Fc1|Bc1^

A call ends after its last forward (with replicas, some backwards that the stage before needs
may follow), so that at most warmup + 1 microbatches are left for the
next call, which begins with a backward: the receive for its first forward is posted before
that backward and the transfer is hidden.

The forward of minibatch t needs the weights that the update of t − 2 makes, hence all of its
backwards.  With at least `warmup` microbatches a minibatch this is so anyway; after a shorter
one the stage drains as far as necessary.

Other streams are this order with another lag, and every minibatch in one piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from pdcompile.schedule import Action
from pdcompile.schedule.registry import StageWork, Task


def order(stages: Sequence[StageWork]) -> Iterator[Task]:
    """The tasks of one rank in one call; without replicas and with depths that do not grow the
    limits never bind."""
    (own,) = stages
    waiting, late = deque(own.pending), deque(own.unstepped if own.late else ())
    while waiting and (own.flush or waiting[0][0] < -own.lag):
        yield from _backward(own, waiting, late)
    # Only what comes before every forward of the call on all ranks may come before an update
    # that waits for other ranks; halfway, what comes before that forward.
    has_first = bool(own.microbatches) and own.microbatches[0] == 0
    while (has_first and len(waiting) > own.warmup) or _is_due(own, waiting, 0):
        yield from _backward(own, waiting, late)
    yield from _updates(own, late, before=0 if own.flush else -own.lag)
    for microbatch in own.microbatches:
        while len(waiting) > own.warmup or _is_due(own, waiting, microbatch):
            yield from _backward(own, waiting, late)
        if own.halfway is not None and microbatch >= own.halfway:
            yield from _updates(own, late, before=0)
        yield Task(own.stage, Action.FORWARD, 0, microbatch)
        waiting.append((0, microbatch))
    if own.halfway is not None:  # also of replicas whose last forward was before it
        yield from _updates(own, late, before=0)
    while any(one in own.limits for one in waiting):
        yield from _backward(own, waiting, late)


def _is_due(own: StageWork, waiting: deque[tuple[int, int]], forward: int) -> bool:
    """True if a backward must come before this forward.  Backwards are in order: any counts."""
    limits = own.limits
    return bool(limits) and any(limits.get(one, forward) < forward for one in waiting)


def _backward(own: StageWork, waiting: deque[tuple[int, int]], late: deque[int]) -> Iterator[Task]:
    minibatch, microbatch = waiting.popleft()
    yield from _updates(own, late, before=minibatch + 1 - own.buffers)  # frees a gradient buffer
    yield Task(own.stage, Action.BACKWARD, minibatch, microbatch)
    # A minibatch of this call (0) is not complete: its last forward ends the call.
    is_last = minibatch < 0 and (not waiting or waiting[0][0] != minibatch)
    if is_last and not own.late:
        yield Task(own.stage, Action.STEP, minibatch, -1)


def _updates(own: StageWork, late: deque[int], before: int) -> Iterator[Task]:
    """Updates that were put off, of the minibatches before this one."""
    while late and late[0] < before:
        yield Task(own.stage, Action.STEP, late.popleft(), -1)
