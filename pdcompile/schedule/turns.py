"""The turns of a stage: the order in which its replicas take microbatches.

A pattern is numbers of replicas, over and over: (0, 1) is each in turn, (0, 0, 1) two for the first
one, then one for the second.  A replica that is not in it takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import lcm

Pattern = tuple[int, ...]


@cache
def in_turn(count: int) -> Pattern:
    """Each of so many replicas once."""
    return tuple(range(count))


def uneven(turns: Pattern) -> bool:
    """True if a replica takes more microbatches than another, or takes them more densely."""
    return sorted(turns) != [*in_turn(len(turns))]


@lru_cache(maxsize=4096)
def share_of(turns: Pattern, replica: int, count: int, first: int = 0) -> Sequence[int]:
    """The microbatches of so many that a replica takes; `first`: the turn of the first one."""
    period = len(turns)
    if turns == in_turn(period) and replica < period:
        return range((replica - first) % period, count, period)
    return tuple(i for i in range(count) if turns[(first + i) % period] == replica)


def largest_share(turns: Pattern, count: int) -> int:
    """The most of so many microbatches that one replica takes."""
    return max(len(share_of(turns, replica, count)) for replica in set(turns))


@lru_cache(maxsize=4096)
def horizon(turns: Pattern, most: int) -> int:
    """The longest run of turns of which no replica ever has more than so many.

    A stage whose replicas each hold at most `most` microbatches holds those of such a run: with
    every replica in turn it is as many for each of them.
    """
    found = []
    for replica in set(turns):
        own = [k for k, one in enumerate(turns) if one == replica]
        for n, k in enumerate(own):
            rounds, place = divmod(n + most, len(own))
            found.append(rounds * len(turns) + own[place] - k)
    return min(found)


def longest_gap(turns: Pattern) -> int:
    """The most turns from one of a replica's to its next."""
    twice = turns * 2
    return max(twice.index(one, k + 1) - k for k, one in enumerate(turns))


def ahead(turns: Pattern, microbatches: Sequence[int], warmup: int) -> tuple[int, ...]:
    """Count the forwards of a replica before each of its backwards, where replicas take unlike
    turns; empty: its warm-up and one, then one more each time.

    All replicas of a stage follow one order of its microbatches, each as far as it takes them:
    the backward of a microbatch comes before the forwards of those that are more than a `horizon`
    behind it.  So no replica of a stage waits for a forward that those before hold back.
    """
    if not uneven(turns):
        return ()
    run = horizon(turns, warmup + 1)
    return tuple(sum(other < one + run for other in microbatches) for one in microbatches)


def window(first: tuple[int, int], last: tuple[int, int]) -> int:
    """Sends in flight on one channel between two stages, each (warm-up, replicas), in order.

    The first stage runs w_first·r_first − w_last·r_last microbatches ahead; a send that much
    older plus one is known to have been received, so that waiting for it does not block in
    steady state.
    """
    (w, a), (v, b) = first, last
    return max(2, 1 + -(-(w * a - v * b) // lcm(a, b)))
