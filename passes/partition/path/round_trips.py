"""Round trips between stages of a path, one after the other, as 1F1B has them.

A stage s does a microbatch's backward before the forward of the one w_s + 1 later, w its warm-up; a
stage t behind it that forward before the backward of the one w_t earlier, which comes back to s.
So such a trip, over all stages with the path from s to t, takes the schedule w_s − w_t + 1
microbatches on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.path.beside import Array

Counts = NDArray[np.intp]
TRIED = 16  # numbers of trips between two stages, from the largest on
NONE = 1e9  # times the pace, less than nothing: no trip has begun


class Least(NamedTuple):
    """Seconds at least, by stage: with whatever of the path it may have."""

    once: float  # of all the path
    rest: Array  # from the stage to the path's end and back; infinite where it has none of it
    last: Array  # the same from that stage or, without the path, the next one that has some
    own: tuple[Array, Array]  # forward and backward, with some of the path
    always: NDArray[np.bool_]  # it surely has some


class Limits(NamedTuple):
    """A trip from s to t, of n microbatches, takes at most n times the `pace` and what `most` of t
    is above `start` of s."""

    pace: float
    start: Array
    most: Array


@dataclass(frozen=True)
class RoundTrips:
    """Ways through a schedule, one in every column of `ways`.

    They follow the first microbatch over all of the path; after its backward on stage s, q times to
    stage t and back, x times to the end of the path and back, and once more to its end from stage r
    (the number of stages: not at all); and then a backward to where the path begins.  Instead of x
    and r, this may wait on s or before it for all that is still to be done there.
    """

    microbatches: int
    warmup: tuple[int, ...]
    ways: Counts  # s, t, q, x, r
    ahead: Counts  # [s, t]: microbatches that one trip takes the schedule on

    @staticmethod
    @lru_cache(maxsize=64)
    def of(warmup: tuple[int, ...], m: int) -> RoundTrips:
        """All of `m` microbatches; no stage's warm-up is above that of the one before."""
        count, found = len(warmup), []
        for s, here in enumerate(warmup):
            for t in range(s, count):
                ahead = here - warmup[t] + 1
                most = (m - 2 - here) // ahead + 1
                for q in range(max(1, most - TRIED + 1), most + 1):
                    whole, left = divmod(m - 1 - q * ahead, here + 1)
                    last = next((r for r in range(s, count) if warmup[r] < left), count)
                    found.append((s, t, q, whole, last if whole or last <= t else count))
        table = np.array(found, dtype=np.intp).reshape(-1, 5).T
        return RoundTrips(m, warmup, table, np.subtract.outer(warmup, warmup) + 1)

    def limits(self, makespan: float, least: Least) -> Limits | None:
        """Of trips, if all is done in so many seconds; None where there are no trips."""
        s, t, times, whole, r = self.ways
        possible = np.isfinite(least.rest)
        rest, last = (np.where(np.isfinite(one), one, 0.0) for one in (least.rest, least.last))
        tails = np.maximum(whole * rest[s] + np.append(last, 0.0)[r], self._waits(least))
        room = np.full(self.ahead.shape, np.inf)
        np.minimum.at(room, (s, t), (makespan - least.once - tails) / times)
        here = np.isfinite(room) & possible[:, None]
        if not here.any():
            return None
        pace = float((room[here] / self.ahead[here]).min())
        over = np.where(here, room - self.ahead * pace, -np.inf)
        most = np.where(here.any(0), over.max(0), np.inf)
        start = np.where(here, most[None, :] - np.where(here, over, 0.0), np.inf).min(1)
        return Limits(pace, np.where(here.any(1), start, -NONE * pace), most)

    def _waits(self, least: Least) -> Array:
        """By way: the most that it waits on some stage up to s, which surely has some of the path,
        for what is to be done there."""
        s, t, times, *_ = self.ways
        left = (self.microbatches - 1 - times * self.ahead[s, t])[:, None]
        forward, backward = least.own
        waits = left * backward + np.maximum(left - self.warmup, 0) * forward
        stages = np.arange(len(self.warmup))
        there = (stages <= s[:, None]) & (least.always | (stages == s[:, None]))
        found: Array = np.where(there, waits, 0.0).max(1, initial=0.0)
        return found

    def drop(
        self,
        states: list[NDArray[np.bool_]],
        limits: Limits,
        own: list[Array],
        work: Array,
        first: tuple[int, int],
        over: Callable[[int, int, Array], Array | None],
    ) -> None:
        """Drop intervals [j, k] with which some trip takes longer than within the limits.

        By interval: of all trips that may end with a stage the longest, less what they may take, as
        little as that can be.  A stage's `own` seconds count, and of two stages in a row the `work`
        that surely is on the one or the other; `over` adds what is sent from a stage to a later
        one, None where that is never the next one with some of the path.  This begins on one of the
        `first` stages, and the last of them.
        """
        numbers, trips = np.arange(len(work)), list[Array]()
        for t, mask in enumerate(states):
            before = np.full(mask.shape, np.inf)
            if first[0] <= t <= first[1]:
                before[0] = limits.start[t] - limits.pace
            for s, trip in enumerate(trips):
                if t == s + 1:
                    ends = np.where(mask.any(1), mask.argmax(1), numbers)  # of t, at the earliest
                    trip = trip + (work[:, ends] - work - work[numbers, ends])
                found = over(s, t, trip)
                if found is not None:
                    found = found - limits.pace * (self.warmup[s] - self.warmup[t])
                    np.minimum(before, found, out=before)
            trip = np.maximum(before, limits.start[t] - limits.pace) + own[t]
            mask &= trip <= limits.most[t]
            trips.append(np.where(mask, trip, np.inf))
