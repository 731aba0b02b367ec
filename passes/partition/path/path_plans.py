"""Plans that cut the heaviest path into intervals, some with a stage for what runs beside them.

A stage beside the path takes what spans the interval of the stage before it: both work at the same
time, backward only where that one does not read what it reads (`branches`).  Stages before the path
take what nothing of it is before.  Among the plans whose stages compute at most so much, a dynamic
program takes the one through which a microbatch goes fastest, for several such limits; what else a
plan costs (links of skips, tied parameters, memory) is left to its evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.path.beside import Array, Beside, heaviest_path
from pdcompile.passes.partition.path.interval_bytes import IntervalBytes
from pdcompile.passes.partition.path.path_tables import PathCosts, Tables

#: what is to end by a makespan: the ways of microbatches through a stage, links apart; with half of
#: what links take that are too slow for the microbatches in flight; or the stage's own work alone,
#: as where what runs beside the path makes ways shorter
Kind = Literal["ways", "links", "own"]
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
MOST_TIMES = 30  # all work in a row: no plan takes longer, links apart
CLOSE = 0.01  # relative: to the least makespan for which there is a plan, links apart
#: so many times that one, what is best most often first; less where work beside the path is hidden
TIMES = 1.0, 1.02, 1.01, 1.1, 1.05, 1.3, 0.98, 1.03, 1.2, 0.96, 1.15, 1.5, 0.94, 2.0


def path_plans(model: Model) -> Iterator[tuple[int, ...]]:
    """Stages of groups; of every kind of plan some come early."""
    beside = Beside.of(model, heaviest_path(model))
    if beside is None:
        return
    program = _Program(beside)
    several = program.microbatches > 1  # else they differ in nothing
    kinds = [*product(KINDS if several else KINDS[:1], program.first_stages())]
    times, least = TIMES if several else (2.0,), cache(program.least)
    for so_many, counting, beside_it, (kind, first) in product(
        times, COUNTINGS, program.beside_it, kinds
    ):
        if beside_it.any() or not counting.beside:
            makespan = so_many * least(first, kind)
            found = program.solve(makespan, first, beside_it, kind, counting)
            if found is not None:
                yield program.assignment(found, first, beside_it)


@dataclass(frozen=True, slots=True)
class _Cut:
    """An interval of the path on a stage, and whether the next stage is beside it."""

    start: int
    end: int
    stage: int
    parallel: bool


@dataclass
class _Program:
    """Vectors by boundary, matrices by the two boundaries of an interval."""

    beside: Beside
    costs: PathCosts = field(init=False)  # on the stages that may be used
    microbatches: int = field(init=False)
    beside_it: list[NDArray[np.bool_]] = field(init=False)  # groups that may have a stage
    slow: list[bool] = field(init=False)  # links, by sending stage
    allowed: list[NDArray[np.bool_]] = field(init=False)
    neighbours: tuple[list[list[int]], list[list[int]]] = field(init=False)  # before, behind
    free: list[int] = field(init=False)  # groups for stages before the path
    tables: dict[bytes, Tables] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        beside, model = self.beside, self.beside.model
        stages = model.problem.stages[: model.most_used]
        self.costs, self.microbatches = PathCosts(beside, stages), model.problem.num_microbatches
        until, total = self.costs.until, float(self.costs.work.sum())
        spanned = until[np.minimum(beside.high - 1, beside.length)] - until[beside.low]
        loose, short = beside.low < beside.high, spanned * model.most_used <= total
        self.beside_it = [loose & False, loose, loose & short]
        most = max(stage.bytes_per_second for stage in stages)
        self.slow = [stage.bytes_per_second < most for stage in stages]
        needed = IntervalBytes(beside, every=False)
        self.allowed = [self._allowed(s, needed) for s in range(model.num_stages)]
        self.neighbours = lattice.neighbours(model.num_groups, model.arcs)
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
            if self.solve(high, first, none, kind) is not None:
                break
        else:
            return low
        while high - low > CLOSE * high:
            middle = (low + float(high)) / 2
            if self.solve(middle, first, none, kind) is None:
                low = middle
            else:
                high = middle
        return float(high)

    def solve(
        self,
        makespan: float,
        first: int,
        beside_it: NDArray[np.bool_],
        kind: Kind,
        counting: Counting = COUNTINGS[0],
    ) -> list[_Cut] | None:
        """The intervals with the least sum of work and hops whose stages leave time for the others
        within this makespan, see `Kind` and `Counting`."""
        once, further = counting.once, counting.further
        stages, size = self.costs.stages, self.beside.length
        tables = self._tables(beside_it)
        shape = 2, len(stages) + 1, size + 1  # behind a stage beside it, or not
        best, came = np.full(shape, np.inf), np.full((*shape, 3), -1)
        best[0, first, 0] = 0.0
        for s in range(first, len(stages)):
            waits = self._waits(s, makespan) if kind == "links" else 0.0
            for late, wide in product((0, 1), (1, 2)) if beside_it.any() else ((0, 1),):
                if s + 2 * (wide - 1) >= len(stages):
                    continue
                if once and late and (wide == 2 or (further and self.slow[s - 1])):
                    continue  # what is elsewhere is sent over no slow link
                seconds = tables.own[late] / stages[s].speed
                taken = tables.taken[late][s] + waits
                if kind == "own":
                    taken = np.where(taken < np.inf, self.microbatches * seconds, np.inf)
                fits = (taken <= makespan) & self.allowed[s]
                if wide == 2:
                    fits &= self.microbatches * tables.apart / stages[s + 1].speed <= makespan
                    seconds = seconds - tables.saved[s]
                    if counting.beside:
                        seconds = seconds + tables.apart / stages[s + 1].speed
                apart = int(late or wide == 2)  # what is beside the path goes another way
                hop = tables.hops[apart][s - 1][further] if s > first else 0.0
                ways = best[late, s][:, None] + np.where(fits, seconds + hop, np.inf)
                for then, there in _behind(tables.apart < np.inf, late, wide, once=once):
                    some = np.where(there, ways, np.inf)
                    start = some.argmin(0)
                    total = some[start, np.arange(size + 1)]
                    if wide == 2:  # from this stage to the one behind that, over both links
                        over, last = (one[further][:, -1] for one in tables.hops[1][s : s + 2])
                        total += np.maximum(over - last, 0.0)
                    less = total < best[then, s + wide]
                    best[then, s + wide][less] = total[less]
                    came[then, s + wide][less, 0] = start[less]
                    came[then, s + wide][less, 1:] = late, wide
        return self._followed(came, int(best[:, -1, -1].argmin()), first)

    def _followed(self, came: NDArray[np.intp], late: int, first: int) -> list[_Cut] | None:
        cuts: list[_Cut] = []
        stage, end = len(self.costs.stages), self.beside.length
        while (stage, end) != (first, 0):
            start, late, wide = map(int, came[late, stage, end])
            if start < 0:
                return None
            stage -= wide
            cuts.append(_Cut(start, end, stage, wide == 2))
            end = start
        return cuts[::-1]

    def _tables(self, beside_it: NDArray[np.bool_]) -> Tables:
        key = beside_it.tobytes()
        if key not in self.tables:
            self.tables[key] = self.costs.tables(beside_it)
        return self.tables[key]

    def _waits(self, s: int, makespan: float) -> Array:
        """Half of what round trips over the link before or behind the stage take beyond what the
        microbatches in flight between its ends leave time for."""
        m, depth, hops = self.microbatches, self.costs.depth, self.costs.hops
        limit = max(makespan - self.costs.until[-1] / self.costs.fastest, 0.0) / max(m - 1, 1)
        found = np.zeros((self.beside.length + 1,) * 2)
        if s + 1 < len(hops):
            spare = (depth[s] - depth[s + 1] - 1) * limit
            found = np.maximum(found, hops[s][0][None, :, -1] - spare)
        if s > 0:
            spare = (depth[s - 1] - depth[s] - 1) * limit
            found = np.maximum(found, hops[s - 1][0][:, -1:] - spare)
        return m * found / 2

    def assignment(
        self, cuts: list[_Cut], first: int, beside_it: NDArray[np.bool_]
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
            if cut.parallel:
                spans = beside_it & (beside.low <= cut.start) & (beside.high > cut.end)
                stages[spans] = cut.stage + 1
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
            return np.ones((self.beside.length + 1,) * 2, dtype=np.bool_)
        held = model.least_bytes(s)
        until = self.beside.before(held)
        until[-1] = held.sum()
        placed = np.subtract.outer(-until, -until)  # as `assignment` has it
        least = np.maximum(placed, needed.least(s) + needed.of_branches(s))
        fits: NDArray[np.bool_] = least <= limit
        return fits

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


def _behind(
    spanned: NDArray[np.bool_], late: int, wide: int, *, once: bool
) -> list[tuple[int, NDArray[np.bool_]]]:
    """Behind which intervals something is elsewhere (1), and behind which nothing is (0)."""
    every = np.ones_like(spanned)
    if wide == 1 and late and once:  # as long as something spans them
        return [(1, spanned), (0, ~spanned)]
    return [(int(wide == 2 or late == 1), every)]
