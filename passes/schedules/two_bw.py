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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from pdcompile.schedule import Action

Step = tuple[Action, int, int]  # action, minibatch relative to the call, microbatch or −1


def order(
    pending: Sequence[tuple[int, int]],
    unstepped: Sequence[int],
    microbatches: Sequence[int],
    warmup: int,
    late: bool,
    limits: Mapping[tuple[int, int], int] | None = None,
) -> Iterator[Step]:
    """Compute of one replica for one call of `step`.

    Args:
        pending: (minibatch, microbatch) that went forward in earlier calls but not backward.
        unstepped: earlier minibatches whose update has not run.
        late: the update waits for other ranks; it is placed as late as legal, which is just
            before the first forward of the minibatch after the next.
        limits: of each microbatch whose backward the stage before runs in this call, the last
            forward of this call that may come before its backward here (−1: none).  A stage
            that waits for no forward which the stage before holds back cannot deadlock,
            whatever the depths, replicas and sizes of minibatches; without replicas and with
            depths that do not grow the limits never bind.
    """
    waiting = deque(pending)
    limits = limits or {}
    while waiting and waiting[0][0] <= -2:
        yield from _backward(waiting, late)
    # Only what comes before every forward of the call on all ranks may come before an update
    # that waits for other ranks.
    has_first = bool(microbatches) and microbatches[0] == 0
    while (has_first and len(waiting) > warmup) or _is_due(waiting, limits, 0):
        yield from _backward(waiting, late)
    if late:
        for minibatch in unstepped:
            if minibatch <= -2:
                yield Action.STEP, minibatch, -1
    for microbatch in microbatches:
        while len(waiting) > warmup or _is_due(waiting, limits, microbatch):
            yield from _backward(waiting, late)
        yield Action.FORWARD, 0, microbatch
        waiting.append((0, microbatch))
    while any(one in limits for one in waiting):
        yield from _backward(waiting, late)


def limits_for_the_next(
    steps: Sequence[Step], limits: Mapping[tuple[int, int], int], num_microbatches: int
) -> dict[tuple[int, int], int]:
    """What one replica's call means for the stage after it: the `limits` of its backwards."""
    found, next_forward = {}, num_microbatches
    for action, minibatch, microbatch in reversed(steps):
        if action is Action.FORWARD:
            next_forward = microbatch
        elif action is Action.BACKWARD:
            one = (minibatch, microbatch)
            found[one] = min(next_forward - 1, limits.get(one, num_microbatches))
    return found


def drain(
    pending: Sequence[tuple[int, int]], unstepped: Sequence[int], late: bool
) -> Iterator[Step]:
    """What is left after the last call: the remaining backwards, then the remaining updates."""
    waiting = deque(pending)
    while waiting:
        yield from _backward(waiting, late)
    if late:
        for minibatch in unstepped:
            yield Action.STEP, minibatch, -1


def _is_due(
    waiting: deque[tuple[int, int]], limits: Mapping[tuple[int, int], int], forward: int
) -> bool:
    """Must a backward come before this forward?  Backwards are in order: any one counts."""
    return bool(limits) and any(limits.get(one, forward) < forward for one in waiting)


def _backward(waiting: deque[tuple[int, int]], late: bool) -> Iterator[Step]:
    minibatch, microbatch = waiting.popleft()
    yield Action.BACKWARD, minibatch, microbatch
    # A minibatch of this call (0) is not complete: its last forward ends the call.
    is_last = minibatch < 0 and (not waiting or waiting[0][0] != minibatch)
    if is_last and not late:
        yield Action.STEP, minibatch, -1
