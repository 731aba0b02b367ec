"""Which intervals of a path its stages may hold, if the schedule is to take no longer than that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.bounds import trips_in_turn
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.path.beside import Array
from pdcompile.passes.partition.path.branches import NEAR, Parallel, Sides
from pdcompile.passes.partition.path.crossings import Hop
from pdcompile.passes.partition.path.round_trips import Least, RoundTrips

Mask = NDArray[np.bool_]
LITTLE = (
    0.01  # of the intervals: if a round drops less than that, another one is not worth its time
)


class Window(NamedTuple):
    """The intervals [j, k] around all that are possible."""

    rows: slice
    columns: slice

    @staticmethod
    def of(mask: Mask) -> Window:
        """Around the intervals of a mask that has some."""
        rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
        return Window(*(slice(one[0], one[-1] + 1) for one in (rows, columns)))


class Ways(NamedTuple):
    """Seconds of ways with the path on every stage; of those without it on some, but with it on the
    last one; and of those whose last step was over stages without it."""

    all: Array
    some: Array | None = None
    over: Array | None = None

    def least(self, wide: Array | float = 0.0) -> Array:
        skipped = self.skipped
        return self.all if skipped is None else np.minimum(self.all, skipped - wide)

    @property
    def skipped(self) -> Array | None:
        """Without the path on some."""
        return _least(self.some, self.over)

    def within(self, window: Window) -> Ways:
        """Those of the window."""

        def part(one: Array) -> Array:
            found: Array = np.broadcast_to(one, self.all.shape)[window]
            return found

        some, over = (None if one is None else part(one) for one in (self.some, self.over))
        return Ways(part(self.all), some, over)

    def joined(self, other: Ways) -> Ways:
        """The least of both."""
        every = np.minimum(self.all, other.all)
        return Ways(every, _least(self.some, other.some), _least(self.over, other.over))

    @property
    def turned(self) -> Ways:
        """By the ends of intervals first."""
        some, over = (None if one is None else one.T for one in (self.some, self.over))
        return Ways(self.all.T, some, over)


def _least(one: Array | None, other: Array | None) -> Array | None:
    if one is None or other is None:
        return other if one is None else one
    return np.minimum(one, other)


class _Handed(NamedTuple):
    """What a stage hands on to those behind stages without the path, by its intervals [j, k] and
    the least of it by k; `again` where what is at k has been out of the way before.  All of it in a
    window.  `known`: over so many stages, without hops."""

    window: Window
    ways: Array
    least: Array
    again: Array
    known: dict[float, Array]

    @staticmethod
    def of(ways: Ways, mask: Mask, old: Mask) -> _Handed | None:
        """None where no interval is possible."""
        if not mask.any():
            return None
        window = Window.of(mask)
        ways, mask, old = ways.within(window), mask[window], old[window]
        one = ways.all if ways.some is None else np.minimum(ways.all, ways.some)
        again = np.full(mask.shape[1], np.inf)
        if ways.over is not None:
            one = np.minimum(one, np.where(old, np.inf, ways.over))
            again = np.where(mask & old, ways.over, np.inf).min(0)
        one = np.where(mask, one, np.inf)
        return _Handed(window, one, one.min(0), again, {})

    def over(self, others: float, parallel: Parallel, sides: Sides) -> Array:
        """What the stage behind so many without the path has, by its intervals [k, l] with k in the
        window, without hops."""
        if others not in self.known:
            found = self._over(others, parallel, sides)
            self.known[others] = np.minimum(found, self.again[:, None])
        return self.known[others]

    def _over(self, others: float, parallel: Parallel, sides: Sides) -> Array:
        """What spans the interval before is out of the way, or what spans the one behind."""
        here = self.window.columns
        f, w, both = (one[self.window] for one in sides.ahead.of_stages[others])
        ff, ww, all_of_it = (one[here] for one in sides.behind.of_stages[others])
        least = self.least[:, None]
        nested: Array = np.minimum(least - all_of_it, self._without(both))
        if others == 1 and parallel.all_nested:
            return nested
        apart = np.minimum(nested, self._without(f) - ww)
        apart = np.minimum(apart, self._without(w) - ff)
        if others > 1:
            nested = apart
            if parallel.all_nested:
                return nested
            there = (parallel.there[0] + parallel.there[1])[here, None]
            of_each = self._without(sides.ahead.of_stages[1][2][self.window] / others)
            apart = of_each - sides.behind.of_stages[1][2][here] / others - (1 - 1 / others) * there
            apart = np.maximum(apart, least - there)
        found: Array = np.where(parallel.nested[here, None], nested, apart)
        return found

    def _without(self, seconds: Array) -> Array:
        """The least, by k, that is handed on if so much of it is out of the way."""
        found: Array = (self.ways - seconds).min(0)[:, None]
        return found


@dataclass(frozen=True)
class _Step:
    """From a stage to the next one with some of the path, `others` without it between them.

    `least` seconds; less what may be between them and out of the way, by what spans either of them.
    Between two that are `far` from each other there are any number.
    """

    hop: Hop
    least: Array
    others: int = 0

    @staticmethod
    def of(hop: Hop, parallel: Parallel | None, others: int) -> _Step:
        if parallel is None or not others:
            return _Step(hop, hop.least)
        return _Step(hop, np.where(parallel.most >= others, hop.around, np.inf), others)

    @property
    def far(self) -> bool:
        return self.others >= NEAR

    def direct(self, ways: Ways, old: Mask | None, after: Callable[[Array], Array]) -> Ways:
        """What the stage `after` it has; where there is an `old` mask, stages may be left out."""
        every = after(ways.all)
        if old is None or ways.over is None:
            return Ways(every, None if ways.some is None else after(ways.some))
        some = np.where(old, np.inf, ways.over)
        some = some if ways.some is None else np.minimum(some, ways.some)
        return Ways(every, after(some), after(np.where(old, ways.over, np.inf)))

    def over(self, handed: _Handed, parallel: Parallel, sides: Sides, least: Array) -> None:
        """The `least` that the stage behind the others has, by its intervals, is no more."""
        here = handed.window.columns
        if (self.least[here] < np.inf).any():
            found = handed.over(math.inf if self.far else self.others, parallel, sides)
            np.minimum(least[here], found + self.least[here, None], out=least[here])


@dataclass(eq=False)
class Case:
    """What a stage takes, if it holds an interval of the path.

    Matrices [j, k] of intervals j + 1 to k, vectors by boundary.  `parallel`: of stages without
    the path; None where every stage holds some of it.
    """

    own: list[tuple[Array, Array]]  # forward and backward seconds, per stage
    speeds: list[float]  # of the stages, relative to the fastest
    warmup: tuple[int, ...]
    allowed: list[Mask]
    hop: Callable[[int, int], Hop]  # from a stage to another one
    before: Array  # work of one microbatch on earlier stages
    rest: Array  # on this one and later ones
    backward_share: tuple[float, float]  # of work besides, but for so many seconds
    most: list[Array]  # that an interval's stage can have, per stage
    surely: tuple[Array, Array]  # all that is on earlier stages, and all that is not
    loose: Array  # that a stage without the path can have, by the boundary where it lies
    whole: float  # on all, but for what may be on stages before the path
    total: float  # and all there is
    final: Array  # after the last backward of the path's first stage, by its end
    shared: list[Array]  # until the sum of a tied parameter's gradients, without the way down
    microbatches: int
    parallel: Parallel | None
    left_out: bool  # some stage surely is without the path
    first: tuple[int, int]  # so many stages may be without the path before it, at least and at most
    last: int  # and at most behind it
    _trips: RoundTrips = field(init=False)
    _paths: list[list[tuple[Array, int, int, float]]] = field(init=False)
    _steps: dict[tuple[int, int], _Step] = field(init=False)
    left: list[Mask] = field(init=False)  # that may be, with this makespan
    _makespan: float = field(init=False, default=math.inf)
    _last: Array = field(init=False)  # `final`, by the interval of any stage

    def __post_init__(self) -> None:
        """`_paths`: of each stage; how often the ways before it and after it are in each, and, at
        least, what it computes besides."""
        m, before = self.microbatches, self.before[:, None]
        self._paths, self.left = [], self.allowed
        self._last = np.tile(self.final[:, None], len(self.final))
        self._last[0] = self.final
        for s, (f, w) in enumerate(self.own):
            own, depth = f + w, self.warmup[s] + 1
            ends = self.whole + (m - 1) * np.maximum(f, w) + (m - depth) * np.minimum(f, w)
            found: list[tuple[Array, int, int, float]]
            found = [(before + m * own, 1, 0, m), (ends, 1, 1, m - depth)]
            share, lacking = self.backward_share
            back = self.whole + (m - 1) * w + (m - depth) * f
            back = back - (depth - 1) * lacking / self.speeds[s]
            found.append((back, 1, 1, m - depth + (depth - 1) * share))
            found.append((self.shared[s], 0, 0, 1))
            for trips, others in trips_in_turn(m, depth):
                around = before + trips * self.rest[:, None] + others * own
                found.append((around, 1, trips, others))
            self._paths.append([(one[0] + self._last, *one[1:]) for one in found if one[0].any()])
        count = len(self.own)
        self._trips = RoundTrips.of(self.warmup, m)
        self._steps = {
            (s, t): _Step.of(self.hop(s, t), self.parallel, t - s - 1)
            for s in range(count)
            for t in range(s + 1, count if self.parallel else min(s + 2, count))
        }

    def chain(
        self, makespan: float, budget: Budget, among: list[Mask] | None = None
    ) -> list[int] | None:
        """The ends of intervals (`among` these) of which nothing shows that they take longer; None
        if there is no such chain.  Empty, if there is one, where stages may hold nothing of the
        path."""
        count = len(self.own)
        left = self.allowed if makespan > self._makespan else self.left
        states = [a & b for a, b in zip(left, among or left, strict=True)]
        size, before = _size(states), math.inf
        while size < (1 - LITTLE) * before and not budget.late:
            ahead, behind = self.ahead(states), self.behind(states)
            most = [self._most(s, ahead[s], behind[s], makespan, states[s]) for s in range(count)]
            for s in range(count):
                states[s] &= most[s] >= 0
            self._drop_long_trips(ahead, behind, states, makespan)
            rooms = [speed * makespan / self.microbatches for speed in self.speeds]
            loose = self.loose if self.parallel is not None else None
            _drop_without_all_work(states, most, rooms, loose, self.surely, self.total)
            if not self._any(states):
                return None
            size, before = _size(states), size
        self._makespan, self.left = makespan, states
        if self.parallel is not None:
            return []
        ends = [0]
        for mask, ways in zip(states, self.behind(states), strict=True):
            ends.append(int(np.where(mask[ends[-1]], ways.all[ends[-1]], np.inf).argmin()))
        return ends[1:]

    @property
    def size(self) -> int:
        """How many intervals of stages may be, with this makespan."""
        return _size(self.left)

    def _any(self, states: list[Mask]) -> bool:
        if self.parallel is None:
            return all(mask.any() for mask in states)
        return any(mask[0].any() for mask in states) and any(mask[:, -1].any() for mask in states)

    def _most(self, s: int, ahead: Ways, behind: Ways, makespan: float, mask: Mask) -> Array:
        """Seconds of a microbatch's work, at full speed, that stage s may compute with intervals
        around those of the mask; negative where it takes longer than the makespan as it is."""
        most = np.full(mask.shape, -1.0)
        if not mask.any():
            return most
        at = Window.of(mask)
        own = (self.own[s][0] + self.own[s][1])[at]
        found = np.full(own.shape, -1.0)
        for down, up, whole in self._ways(ahead.within(at), behind.within(at), at):
            besides = np.full(own.shape, np.inf)
            for path, downs, ups, times in self._paths[s]:
                left = makespan - path[at]
                if downs == ups == 1:
                    left = left - whole
                else:
                    left = left - downs * down if downs else left
                    left = left - ups * up if ups else left
                more = left / times if times else np.where(left < 0, -1, np.inf)
                besides = np.minimum(besides, more)
            found = np.maximum(found, besides)
        within = np.minimum((own + found) * self.speeds[s], self.most[s][at])
        most[at] = np.where(found < 0, -1.0, within)
        return most

    def _ways(self, ahead: Ways, behind: Ways, at: Window) -> Iterator[tuple[Array, Array, Array]]:
        """The least way down to a stage, on from it, and both, with and without stages left out:
        of wide work, what is before the stage or beyond it may be on the one or the other, and all
        of it on neither."""
        if not self.left_out:
            yield ahead.all, behind.all, ahead.all + behind.all
        if self.parallel is None:
            return
        wide, *sides = self.parallel.apart()
        before, beyond = (one[at.rows] for one in sides)
        here, there = ahead.skipped, behind.skipped
        if there is not None:
            yield ahead.all, there - beyond, ahead.all + there - wide
        if here is not None:
            yield here - before, behind.least(beyond), here + behind.least() - wide

    def _drop_long_trips(
        self, ahead: list[Ways], behind: list[Ways], states: list[Mask], makespan: float
    ) -> None:
        """Drop intervals with which round trips of stages, one after the other, take too long."""
        limits = self._trips.limits(makespan, self._least(ahead, behind, states))
        if limits is None:
            return

        def over(s: int, t: int, trip: Array) -> Array | None:
            step = self._steps.get((s, t))
            return None if step is None else step.hop.before(trip) + step.least[:, None]

        own = [f + w for f, w in self.own]
        self._trips.drop(states, limits, own, own[0] * self.speeds[0], self.first, over)

    def _least(self, ahead: list[Ways], behind: list[Ways], states: list[Mask]) -> Least:
        once, rest, without = math.inf, np.full(len(states), np.inf), 0
        beyond: Array | float = 0.0
        if self.parallel is not None:
            beyond = self.parallel.beyond[:, None]
            without = int(min(self.parallel.most.max(), len(states)))
        for s, mask in enumerate(states):
            around = self.rest[:, None] + behind[s].least(beyond)
            rest[s] = np.where(mask, around, np.inf).min()
            if self.first[0] <= s <= self.first[1]:
                at = Window(slice(1), slice(None))
                for *_, whole in self._ways(ahead[s].within(at), behind[s].within(at), at):
                    taken = np.where(mask[at], self.whole + whole + self._last[at], np.inf)
                    once = min(once, float(taken.min()))
        last = [rest[s : s + without + 1].min() for s in range(len(states))]
        last[len(states) - self.last :] = [0.0] * self.last
        own = [
            [
                np.where(mask, one[way], np.inf).min()
                for mask, one in zip(states, self.own, strict=True)
            ]
            for way in range(2)
        ]
        f, w = np.where(np.isfinite(rest), own, 0.0)
        always = np.arange(len(states)) < (1 if self.first == (0, 0) else 0)
        return Least(once, rest, np.array(last), (f, w), always | (self.parallel is None))

    def ahead(self, states: list[Mask]) -> list[Ways]:
        """The least transfers on the way to each stage, by its interval, less what is out of the
        way."""
        found: list[Ways] = []
        handed: list[_Handed | None] = []
        old = None if self.parallel is None else self.parallel.onward.old
        for t, mask in enumerate(states):
            start = np.full(self.allowed[0].shape, np.inf)
            start[0] = 0.0 if self.first[0] <= t <= self.first[1] else np.inf
            ways = Ways(start, over=None if old is None or t < 2 else np.full(start.shape, np.inf))
            for s in range(t):
                step = self._steps.get((s, t))
                if step is None:
                    continue
                if step.others and self.parallel is not None:
                    one = handed[s]
                    if one is not None and ways.over is not None:
                        step.over(one, self.parallel, self.parallel.onward, ways.over)
                    continue

                def after(one: Array, s: int = s, step: _Step = step) -> Array:
                    return step.hop.before(np.where(states[s], one, np.inf)) + step.least[:, None]

                ways = ways.joined(step.direct(found[s], old, after))
            found.append(ways)
            if old is not None:
                handed.append(_Handed.of(ways, mask, old))
        return found

    def behind(self, states: list[Mask]) -> list[Ways]:
        """The least transfers after each stage, by its interval, less what is out of the way."""
        count = len(states)
        found: dict[int, Ways] = {}
        handed: dict[int, _Handed | None] = {}
        old = None if self.parallel is None else self.parallel.back.old.T
        for s in reversed(range(count)):
            none, end = (np.full(self.allowed[0].shape, np.inf) for _ in range(2))
            end[:, -1] = 0.0 if count - 1 - s <= self.last else np.inf
            early = s < count - 1  # the stages after it are without the path
            ways = Ways(none, end if self.parallel else None) if early else Ways(end)
            if old is not None and s < count - 2:
                ways = ways._replace(over=np.full(none.shape, np.inf))
            for t in range(s + 1, count):
                step = self._steps.get((s, t))
                if step is None:
                    continue
                if step.others and self.parallel is not None:
                    one = handed[t]
                    if one is not None and ways.over is not None:
                        step.over(one, self.parallel, self.parallel.back, ways.over.T)
                    continue

                def after(one: Array, t: int = t, step: _Step = step) -> Array:
                    return step.hop.after(np.where(states[t], one, np.inf)) + step.least[None, :]

                ways = ways.joined(step.direct(found[t], old, after))
            found[s] = ways
            if old is not None:
                handed[s] = _Handed.of(ways.turned, states[s].T, old.T)
        return [found[s] for s in range(count)]


def _size(states: list[Mask]) -> int:
    return sum(map(np.count_nonzero, states))


class _WorkUpTo(NamedTuple):
    """By boundary: how much the stages up to it compute, at least and at most."""

    least: Array
    most: Array

    def of(self, computed: Array) -> Array:
        """What they compute; -inf where that is too little."""
        found: Array = np.where(computed < self.least, -np.inf, np.minimum(computed, self.most))
        return found


def _drop_without_all_work(
    states: list[Mask],
    most: list[Array],
    rooms: list[float],
    loose: Array | None,
    surely: tuple[Array, Array],
    total: float,
) -> None:
    """Drop intervals with which the stages may not compute all work, in `total` so many seconds.

    A stage computes at most so much with an interval; without the path what there is `room` for
    and what is `loose` at the boundary where it lies (None: every stage has some of the path).  All
    stages up to a boundary compute what surely is before it, and nothing of what is behind it, so
    that groups which may be on any of several stages are on one.
    """
    rounding = 1e-9 * total
    before, behind = (one - rounding for one in surely)
    masked = [np.where(mask, own, -np.inf) for mask, own in zip(states, most, strict=True)]
    turned = [own.T for own in masked[::-1]]
    ahead = _computed(masked, rooms, loose, 0, _WorkUpTo(before, total - behind))
    rest = _computed(turned, rooms[::-1], loose, -1, _WorkUpTo(behind, total - before))[::-1]
    for s, own in enumerate(most):
        states[s] &= ahead[s][:, None] + own + rest[s + 1][None, :] >= total - rounding


def _computed(
    most: list[Array], rooms: list[float], loose: Array | None, first: int, due: _WorkUpTo
) -> list[Array]:
    """The most that stages before each one, and all, compute, by the boundary they come to from the
    `first`: what is loose there is there only once for several stages without the path."""
    start = np.full(most[0].shape[0], -np.inf)
    start[first] = 0.0
    found, with_path = [start], [start]
    for s, own in enumerate(most):
        with_path.append(due.of((found[s][:, None] + own).max(0)))
        best, room = with_path[-1], 0.0
        if loose is not None:
            for t in reversed(range(s + 1)):
                room += rooms[t]
                best = np.maximum(best, due.of(with_path[t] + np.minimum(room, loose)))
        found.append(best)
    return found
