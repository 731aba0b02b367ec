"""Work beside a path that other stages may do at the same time as those with the path.

Every way through the pipeline that follows the path visits all stages with some of it.  A stage
without the path, between two that have some, is on such a way too where it has a group that is
joined to the one of them and a group that is joined to the other; of several stages between the
same two, the one with most work may be.  It is on no way where all of its groups are joined only to
what lies before the stage before it, or all only to what lies behind the stage behind it: then it
works at the same time as what its groups span.  Gradients join more groups than values do: those of
a value with several readers go from reader to reader.  So ways down and up differ.

A branch is on one stage.  Along a way, what is out of the way at one boundary is not again at a
later one where all that may be there may have been at the earlier one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.path.beside import Array, Beside, with_gradients

NEAR = 3  # stages without the path between two others: so many or more are counted as any number
NARROW = 0.3, math.inf  # average stages: groups beside less are told apart


@dataclass(frozen=True)
class Side:
    """Of what may be at an end of an interval, what may be on no way if that is what it spans.

    Seconds forward, backward, and of both together, by how many stages are there.  One has what
    spans the interval; of several, a group that does not is on one that is on a way, or elsewhere.
    """

    of_stages: dict[float, tuple[Array, Array, Array]]

    @staticmethod
    def of(there: Array, spans: Array, largest: Array) -> Side:
        """Forward and backward each: all that is there, what spans the interval, and the largest
        group that does not."""
        found = {1.0: (spans[0], spans[1], spans[0] + spans[1])}
        for number in (*range(2, NEAR), math.inf):
            f, w = np.minimum(there - largest, there - (there - spans) / number)
            found[number] = f, w, f + w
        return Side(found)

    @property
    def turned(self) -> Side:
        """By the ends of intervals first."""
        return Side({
            n: (f.T.copy(), w.T.copy(), both.T.copy()) for n, (f, w, both) in self.of_stages.items()
        })  # fmt: skip


class Sides(NamedTuple):
    """What spans the stage on either side of a boundary k, by the way that one goes.

    `ahead` [j, k] is of the interval that the way comes from, `behind` [k, l] of the one it goes
    to; `old`: all that is at k surely is at j too.
    """

    ahead: Side
    behind: Side
    old: NDArray[np.bool_]


@dataclass(frozen=True)
class Parallel:
    """At most so much work is on no way, by the boundary where stages without the path lie.

    Of wide groups (what all layers of a decoder read of its encoder) they may have all that may be
    `before` and `beyond` a boundary, but only once.  Of the others, `there` has all that may be at
    a boundary, forward and backward, and `Sides` what spans the stage before it or after it.  A
    stage there is on no way only if it holds nothing but the one or nothing but the other, which on
    the way up may be another than on the way down, but not where the groups are `nested`: then the
    one has all of the other.  Of several stages, each may be another.

    What has been out of the way at one end of an interval is not again at the other (`Sides.old`).
    """

    wide: NDArray[np.bool_]
    before: Array
    beyond: Array
    there: tuple[Array, Array]
    onward: Sides
    back: Sides
    nested: NDArray[np.bool_]
    most: Array  # so many stages may be there, each with something
    wide_seconds: float

    @property
    def all_nested(self) -> bool:
        return bool(self.nested.all())

    def apart(self) -> tuple[float, Array, Array]:
        """All wide work, and what of it is before and beyond boundary j of an interval [j, k]."""
        return self.wide_seconds, self.before[:, None], self.beyond[:, None]


def parallels(
    beside: Beside,
    forward: Array,
    backward: Array,
    *,
    filled: bool,
) -> list[Parallel]:
    """With more and more groups that are told apart; `filled`: every stage holds something."""
    work = forward + backward
    loose = np.flatnonzero(beside.low < beside.high)
    inner = (beside.low[loose] > 0) & (beside.high[loose] <= beside.length)
    on_path = beside.low == beside.high
    until = np.zeros(beside.length + 2)
    np.add.at(until, beside.low[on_path], work[on_path])
    until = until.cumsum()
    beside_it = until[beside.near_high[loose] - 1] - until[beside.near_low[loose]]
    average = work.sum() / beside.model.num_stages
    ends = {v: _Ends.of(beside, v, others) for v, others in read_with(beside).items()}
    most = (part * average if part < math.inf else part for part in NARROW)
    narrow = (loose[inner & (beside_it <= seconds)].tolist() for seconds in most)
    return [
        _parallel(beside, forward, backward, [ends[v] for v in one], filled=filled)
        for one in dict.fromkeys(map(tuple, narrow))
    ]


@dataclass(frozen=True)
class _Ends:
    """What a group is joined to, at each of the boundaries where it may be: the last of the path
    before it and the first behind it.

    Gradients of a value go from one stage that reads it to the one before, so that they join these
    too: whoever else reads what the group reads, and surely is before or behind the boundary.
    """

    group: int
    first: int  # boundaries, with the next one
    after: int
    low: int
    high: int
    low_back: NDArray[np.intp]
    high_back: NDArray[np.intp]

    @staticmethod
    def of(beside: Beside, v: int, others: Sequence[int]) -> _Ends:
        first, after = int(beside.low[v]), int(beside.high[v])
        low, high = int(beside.near_low[v]), int(beside.near_high[v])
        low_back, high_back = np.full(after - first, low), np.full(after - first, high)
        for u in others:
            begin, end = int(beside.low[u]), int(beside.high[u])
            if end < after:
                at = max(end - first, 0)
                low_back[at:] = np.maximum(low_back[at:], begin)
            if begin > first:
                at = begin - first
                high_back[:at] = np.minimum(high_back[:at], end)
        return _Ends(v, first, after, low, high, low_back, high_back)

    @property
    def numbers(self) -> NDArray[np.intp]:
        return np.arange(self.first, self.after)


def read_with(beside: Beside) -> dict[int, list[int]]:
    """Who else reads, with gradients, what a group that is not on the path reads."""
    found: dict[int, list[int]] = {int(v): [] for v in np.flatnonzero(beside.low < beside.high)}
    for flow in with_gradients(beside.model):
        if len(flow.sinks) > 1:
            for v in flow.sinks:
                if v in found:
                    found[v] += [u for u in flow.sinks if u != v]
    return found


def _parallel(
    beside: Beside,
    forward: Array,
    backward: Array,
    groups: list[_Ends],
    *,
    filled: bool,
) -> Parallel:
    size = beside.length
    wide = beside.low < beside.high
    number = np.zeros(size + 1)
    for v in np.flatnonzero(wide).tolist():
        number[beside.low[v] : beside.high[v]] += 1
    wide[[one.group for one in groups]] = False
    there = np.zeros((2, size + 1))
    ahead, behind, early, late = np.zeros((4, 2, size + 2, size + 2))
    begun, ended = np.zeros(size + 1, dtype=np.intp), np.full(size + 1, size + 1)
    for one in groups:
        at, seconds = slice(one.first, one.after), (forward[one.group], backward[one.group])
        begun[at] = np.maximum(begun[at], np.maximum(one.low_back, one.first))
        ended[at] = np.minimum(ended[at], np.minimum(one.high_back, one.after))
        fixed = np.full(one.after - one.first, one.low), np.full(one.after - one.first, one.high)
        ends = fixed, (one.low_back, one.high_back)
        for way, (own, (lows, highs)) in enumerate(zip(seconds, ends, strict=True)):
            there[way, at] += own
            for k, low, high in zip(one.numbers, lows, highs, strict=True):
                ahead[way, low:, k] += own
                behind[way, k, :high] += own
                early[way, :low, k] = np.maximum(early[way, :low, k], own)
                late[way, k, high:] = np.maximum(late[way, k, high:], own)
    inside = np.s_[:, : size + 1, : size + 1]
    of_ahead = Side.of(there[:, None, :], ahead[inside], early[inside])
    of_behind = Side.of(there[:, :, None], behind[inside], late[inside])
    numbers = np.arange(size + 1)
    onward = Sides(of_ahead, of_behind, numbers[:, None] >= begun[None, :])
    back = Sides(of_behind.turned, of_ahead.turned, numbers[:, None] < ended[None, :])
    most = number if filled else np.full(size + 1, np.inf)
    of_wide = np.where(wide, forward + backward, 0.0)
    total = float(of_wide.sum())
    before, beyond = beside.before(of_wide), beside.behind(of_wide)
    all_there = there[0], there[1]
    return Parallel(
        wide, before, beyond, all_there, onward, back, _nested(groups, size), most, total,
    )  # fmt: skip


def _nested(groups: list[_Ends], size: int) -> NDArray[np.bool_]:
    """By boundary: of any two groups there, does the one span all that the other spans."""
    at: list[list[tuple[int, int, int, int]]] = [[] for _ in range(size + 1)]
    for one in groups:
        for k, low, high in zip(one.numbers, one.low_back, one.high_back, strict=True):
            at[k].append((one.low, one.high, int(low), int(high)))
    found = np.ones(size + 1, dtype=np.bool_)
    for k, ends in enumerate(at):
        for low, high in ((0, 1), (2, 3)):
            ordered = sorted({(one[low], -one[high]) for one in ends})
            found[k] &= all(a[1] <= b[1] for a, b in pairwise(ordered))
    return found
