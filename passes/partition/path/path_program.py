"""Cuts the heaviest path into intervals of stages, some with stages for what runs beside them.

Among the plans whose stages compute at most so much, a dynamic program takes the one through which
a microbatch goes fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcompile.cluster import slowest
from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.path.beside import Array, Beside
from pdcompile.passes.partition.path.interval_bytes import IntervalBytes
from pdcompile.passes.partition.path.path_tables import Band, PathCosts, Tables, by_length

#: what is to end by a makespan: the ways of microbatches through a stage, links apart; with half of
#: what links take that are too slow for the microbatches in flight; or the stage's own work alone,
#: as where what runs beside the path makes ways shorter
Kind = Literal["ways", "own", "links"]
KINDS: tuple[Kind, ...] = ("ways", "own", "links")


class Counting(NamedTuple):
    """What counts in the sum that is to be least, of which none is right everywhere.

    `once`: no stage has one beside it as long as groups may be elsewhere already; `further`: of a
    value that goes further than the next interval, what it takes beyond what goes along the path;
    `beside`: what a stage beside the path computes at another time than the one before it.
    """

    once: bool
    further: bool
    beside: bool


COUNTINGS = Counting(True, True, False), Counting(False, False, False), Counting(True, False, True)
MOST_BESIDE = 3  # stages in a row
TINY = np.finfo(np.float64).tiny  # seconds, of no work
MOST_TIMES = 30  # all work in a row: no plan takes longer, links apart
CLOSE = 0.01  # relative: to the least makespan for which there is a plan, links apart


@dataclass(frozen=True, slots=True)
class Cut:
    """An interval of the path on a stage, and how many of the next stages are beside it."""

    start: int
    end: int
    stage: int
    others: int


class Wanted(NamedTuple):
    """A plan of this kind, some of whose groups may have stages beside the path."""

    makespan: float
    kind: Kind
    beside_it: NDArray[np.bool_]
    counting: Counting = COUNTINGS[0]


@dataclass
class PathProgram:
    """Vectors by boundary, matrices by an interval's end and its length."""

    beside: Beside
    costs: PathCosts = field(init=False)  # on the stages that may be used
    microbatches: int = field(init=False)
    beside_it: list[NDArray[np.bool_]] = field(init=False)  # groups that may have a stage
    slow: list[bool] = field(init=False)  # links, by sending stage
    allowed: list[NDArray[np.bool_]] = field(init=False)
    neighbours: tuple[list[list[int]], list[list[int]]] = field(init=False)  # before, behind
    across: Array = field(init=False)  # seconds of what may be at a boundary
    free: list[int] = field(init=False)  # groups for stages before the path
    tables: dict[bytes, Tables] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        beside, model = self.beside, self.beside.model
        stages = model.problem.stages[: model.most_used]
        self.costs, self.microbatches = PathCosts(beside, stages), model.problem.num_microbatches
        until, total = self.costs.until, float(self.costs.work.sum())
        spanned = until[np.minimum(beside.high - 1, beside.length)] - until[beside.low]
        loose, short = beside.low < beside.high, spanned * model.most_used <= total
        unlike = {one.tobytes(): one for one in (loose & False, loose, loose & short)}
        self.beside_it = [*unlike.values()]
        most = max(stage.bytes_per_second for stage in stages)
        self.slow = [stage.bytes_per_second < most for stage in stages]
        needed = IntervalBytes(beside, every=False)
        self.allowed = [self._allowed(s, needed) for s in range(model.num_stages)]
        self.neighbours = lattice.neighbours(model.num_groups, model.arcs)
        self.across = beside.across(self.costs.work)
        self.free = self._free()

    def first_stages(self) -> list[int]:
        """Stages at which the path may begin: the first, and those behind another kind of link."""
        stages = self.beside.model.problem.stages
        if self.beside.model.most_used < len(stages):
            return [0]
        links = [(stage.bytes_per_second, stage.latency_seconds) for stage in stages]
        return [
            s
            for s in range(min(len(self.free), len(stages) - 1) + 1)
            if s == 0 or (s > 1 and links[s - 1] != links[s - 2])
        ]

    def least(self, first: int, kind: Kind) -> float:
        """About the least makespan for which there is a plan without stages beside the path."""
        none, number = self.beside_it[0], len(self.costs.stages) - first
        low = float(self.costs.until[-1]) * max(1, self.microbatches / number) / self.costs.fastest
        for high in low * np.geomspace(1.0, MOST_TIMES, 12):
            if self.solve(Wanted(float(high), kind, none), first) is not None:
                break
        else:
            return low
        while high - low > CLOSE * high:
            middle = (low + float(high)) / 2
            if self.solve(Wanted(middle, kind, none), first) is None:
                low = middle
            else:
                high = middle
        return float(high)

    def solve(self, wanted: Wanted, first: int) -> list[Cut] | None:
        """The intervals with the least sum of work and hops whose stages leave time for the others
        within the makespan."""
        count, size = len(self.costs.stages), self.beside.length
        shape = 2, count + 1, size + 1  # behind a stage beside it, or not
        best, came = np.full(shape, np.inf), np.full((*shape, 3), -1)
        best[0, first, 0] = 0.0
        spanned = self._tables(wanted.beside_it).apart < np.inf
        for s, late in product(range(first, count), (0, 1)):
            at = self._band(s, best[late, s], wanted.makespan)
            if at is None:
                continue
            begun, ends = at.starts(best[late, s]), np.arange(at.ends.start, at.ends.stop)
            for wide, seconds in self._steps(wanted, at, s, late, begins=s == first):
                ways = begun + seconds
                there = best[:, s + wide, at.ends], came[:, s + wide, at.ends]
                for then, so in _behind(at.of(spanned), late, wide, once=wanted.counting.once):
                    some = ways if so is None else np.where(so, ways, np.inf)
                    length = at.most - 1 - some[:, ::-1].argmin(1)  # the longest of several
                    total = some[ends - at.ends.start, length]
                    less = total < there[0][then]
                    there[0][then][less] = total[less]
                    there[1][then][less, 0] = (ends - 1 - length)[less]
                    there[1][then][less, 1:] = late, wide
        return self._followed(came, int(best[:, -1, -1].argmin()), first)

    def _band(self, s: int, best: Array, makespan: float) -> Band | None:
        """All intervals that begin where it is known how, and for which there is time."""
        speeds, until = [stage.speed for stage in self.costs.stages[s:]], self.costs.until
        room = makespan / self.microbatches * (1 + 1e-9)
        at_most = until + self.across
        begun = np.flatnonzero(np.isfinite(best) & (at_most + room * sum(speeds) >= until[-1]))
        ends = np.searchsorted(until, at_most[begun] + room * speeds[0], side="right")
        if not (ends > begun + 1).any():
            return None
        return Band(slice(int(begun[0]) + 1, int(ends.max())), int((ends - begun).max()) - 1)

    def _steps(
        self, wanted: Wanted, at: Band, s: int, late: int, *, begins: bool
    ) -> Iterator[tuple[int, Array]]:
        """How many stages further, and seconds of one microbatch on its way to a stage and there:
        alone, and with stages beside it."""
        tables, stage, m = self._tables(wanted.beside_it), self.costs.stages[s], self.microbatches
        once, further, _ = wanted.counting
        if once and late and further and self.slow[s - 1]:
            return  # what is elsewhere is sent over no slow link
        seconds, taken = at.of(tables.own[late]) / stage.speed, at.of(tables.taken[late][s])
        if wanted.kind == "own":
            taken = np.where(taken < np.inf, m * seconds, np.inf)
        elif wanted.kind == "links":
            taken = taken + self._waits(s, wanted.makespan, at)
        seconds = np.where((taken <= wanted.makespan) & at.of(self.allowed[s]), seconds, np.inf)
        hops = [0.0 if begins else at.of(one[s - 1][further]) for one in tables.hops]
        yield 1, seconds + hops[late]
        if wanted.beside_it.any() and not (once and late):
            seconds = seconds + hops[1]  # what is beside the path goes another way
            for others, more in self._beside(wanted, at, s):
                yield 1 + others, seconds + more

    def _beside(self, wanted: Wanted, at: Band, s: int) -> Iterator[tuple[int, Array]]:
        """How many of the next stages are beside a stage, and seconds that they make of its way."""
        tables, stages = self._tables(wanted.beside_it), self.costs.stages
        work, number, at_once = map(at.of, (tables.apart, tables.number, tables.at_once))
        ends = [one[wanted.counting.further] for one in tables.to_end]
        room = 0.0
        for n, other in enumerate(stages[s + 1 : -1][:MOST_BESIDE], start=1):
            room += other.speed * wanted.makespan  # behind them is a stage with some of the path
            fits = (self.microbatches * work <= room) & (number >= n)
            if not fits.any():
                continue
            around = tables.around(slowest(stages[max(s - 1, 0) : s + n + 1]))
            direct = at.starts(tables.to_end[max(s - 1, 0)][0])
            direct = direct + tables.to_end[s + n][0][at.ends, None]
            seconds = np.maximum(at.of(around) - direct, 0.0) - at_once / self.costs.fastest
            if wanted.counting.beside:
                seconds = seconds + work / other.speed
            over = np.max([one[at.ends] for one in ends[s : s + n + 1]], axis=0)
            seconds = seconds + (over - ends[s + n][at.ends])[:, None]  # over the slowest link
            yield n, np.where(fits, seconds, np.inf)

    def _followed(self, came: NDArray[np.intp], late: int, first: int) -> list[Cut] | None:
        cuts: list[Cut] = []
        stage, end = len(self.costs.stages), self.beside.length
        while (stage, end) != (first, 0):
            start, late, wide = map(int, came[late, stage, end])
            if start < 0:
                return None
            stage -= wide
            cuts.append(Cut(start, end, stage, wide - 1))
            end = start
        return cuts[::-1]

    def _tables(self, beside_it: NDArray[np.bool_]) -> Tables:
        key = beside_it.tobytes()
        if key not in self.tables:
            self.tables[key] = self.costs.tables(beside_it)
        return self.tables[key]

    def _waits(self, s: int, makespan: float, at: Band) -> Array:
        """Half of what round trips over the link before or behind the stage take beyond what the
        microbatches in flight between its ends leave time for."""
        m, depth, hops = self.microbatches, self.costs.depth, self.costs.hops
        limit = max(makespan - self.costs.until[-1] / self.costs.fastest, 0.0) / max(m - 1, 1)
        found: Array = np.zeros((1, 1))
        if s + 1 < len(hops):
            spare = (depth[s] - depth[s + 1] - 1) * limit
            found = np.maximum(found, hops[s][0][at.ends, -1:] - spare)
        if s > 0:
            spare = (depth[s - 1] - depth[s] - 1) * limit
            found = np.maximum(found, at.starts(hops[s - 1][0][:, -1]) - spare)
        return m * found / 2

    def assignment(
        self, cuts: list[Cut], first: int, beside_it: NDArray[np.bool_]
    ) -> tuple[int, ...]:
        """Stages of groups: what is beside the path is as late as may be, where it has no stage
        of its own, or as early as may be, where such a stage needs it."""
        beside = self.beside
        stage_of = np.zeros(beside.length + 2, dtype=np.intp)
        for cut in cuts:
            stage_of[cut.start + 1 : cut.end + 1] = cut.stage
        stage_of[0], stage_of[-1] = first, cuts[-1].stage
        stages = stage_of[beside.high]
        _, after = self.neighbours
        for cut in cuts:
            if cut.others:
                spans = beside_it & (beside.low <= cut.start) & (beside.high > cut.end)
                stages[spans] = cut.stage + 1 + _shared(self.costs.work[spans], cut.others)
                needed = spans.copy()
                for v in reversed(np.flatnonzero(beside.low <= cut.start)):
                    needed[v] |= any(needed[u] for u in after[v])
                needed &= stages == cut.stage
                stages[needed] = stage_of[beside.low[needed]]
        for s, v in enumerate(self.free[:first]):
            stages[v] = s
        found: list[int] = stages.tolist()
        for v in reversed(range(len(found))):
            found[v] = min([found[v], *(found[u] for u in after[v])])
        return tuple(found)

    def _allowed(self, s: int, needed: IntervalBytes) -> NDArray[np.bool_]:
        model = self.beside.model
        limit = model.problem.stages[s].memory_bytes
        if limit is None:
            return np.ones((self.beside.length + 1, self.beside.length), dtype=np.bool_)
        held = model.least_bytes(s)
        until = self.beside.before(held)
        until[-1] = held.sum()
        placed = np.subtract.outer(-until, -until)  # as `assignment` has it
        least = np.maximum(placed, needed.least(s) + needed.of_branches(s))
        return by_length(least <= limit)

    def _free(self) -> list[int]:
        """Groups that nothing of the path is before, what sends little first."""
        model = self.beside.model
        before, _ = self.neighbours
        sent = np.zeros(model.num_groups)
        for flow in model.flows:
            sent[list(flow.sources)] += flow.forward_bytes + flow.backward_bytes
        left = {v for v in range(model.num_groups) if self.beside.low[v] == 0}
        found: list[int] = []
        while left:
            ready = [v for v in left if not left & set(before[v])]
            v = min(ready, key=lambda v: (sent[v], v))
            found.append(v)
            left.remove(v)
        return found


def _shared(work: Array, parts: int) -> NDArray[np.intp]:
    """Which of so many parts groups in a row are in, of which none is empty if they are enough."""
    until = work.cumsum() - work / 2
    found = np.minimum((parts * until / max(work.sum(), TINY)).astype(np.intp), parts - 1)
    number = np.arange(len(work))
    result: NDArray[np.intp] = np.maximum(np.minimum(found, number), parts - len(work) + number)
    return result


def _behind(
    spanned: NDArray[np.bool_], late: int, wide: int, *, once: bool
) -> list[tuple[int, NDArray[np.bool_] | None]]:
    """Behind which intervals, all or these, something is elsewhere (1), or nothing is (0)."""
    if wide == 1 and late and once:  # as long as something spans them
        return [(1, spanned), (0, ~spanned)]
    return [(int(wide > 1 or late == 1), None)]
