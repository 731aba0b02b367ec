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
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.bounds import passage
from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.path.beside import Array, Beside, heaviest_path
from pdcompile.passes.partition.path.branches import read_with
from pdcompile.plan.makespan import warmup_of
from pdcompile.problem import StageLimits
from pdcompile.schedule.registry import kind_of

#: what is to end by a makespan: the ways of microbatches through a stage, links apart; with half of
#: what links take that are too slow for the microbatches in flight; or the stage's own work alone,
#: as where what runs beside the path makes ways shorter
Kind = Literal["ways", "links", "own"]
KINDS: tuple[Kind, ...] = ("ways", "own", "links")
WORTH = 0.01  # of the average stage's work: less gets no stage
MOST_TIMES = 30  # all work in a row: no plan takes longer, links apart
CLOSE = 0.01  # relative: to the least makespan for which there is a plan, links apart
#: so many times that one: roughly, then in between; less where work beside the path is hidden
TIMES = 1.02, 1.1, 1.0, 1.3, 0.98, 1.05, 1.2, 0.96, 1.01, 1.03, 1.15, 1.5, 0.94, 2.0


def path_plans(model: Model) -> Iterator[tuple[int, ...]]:
    """Stages of groups; of every kind of plan some come early."""
    beside = Beside.of(model, heaviest_path(model))
    if beside is None:
        return
    program = _Program(beside)
    kinds = list(product(program.first_stages(), KINDS))
    least = {one: program.least(*one) for one in kinds}
    times = TIMES if program.microbatches > 1 else (2.0,)
    for so_many, (first, kind), beside_it in product(times, kinds, program.beside_it):
        found = program.solve(so_many * least[first, kind], first, beside_it, kind)
        if found is not None:
            yield program.assignment(found, first, beside_it)


@dataclass(frozen=True, slots=True)
class _Cut:
    """An interval of the path on a stage, and whether the next stage is beside it."""

    start: int
    end: int
    stage: int
    parallel: bool


class _Tables(NamedTuple):
    """Matrices by the two boundaries of an interval; two of each where what may be at its first
    boundary is on it, and where that is on a stage beside the path."""

    own: list[Array]
    taken: list[list[Array]]  # seconds of a schedule, by stage
    apart: Array  # what may be beside it
    saved: Array  # of the time of one microbatch, if it is


@dataclass
class _Program:
    """Vectors by boundary, matrices by the two boundaries of an interval."""

    beside: Beside
    stages: tuple[StageLimits, ...] = field(init=False)  # that may be used
    fastest: float = field(init=False)
    microbatches: int = field(init=False)
    depth: tuple[int, ...] = field(init=False)  # warm-up by stage
    work: Array = field(init=False)  # seconds of each group
    until: Array = field(init=False)  # of what is on stages up to a boundary
    until_forward: Array = field(init=False)
    beside_it: list[NDArray[np.bool_]] = field(init=False)  # groups that may have a stage
    hops: list[Array] = field(init=False)  # by sending stage
    allowed: list[NDArray[np.bool_]] = field(init=False)
    free: list[int] = field(init=False)  # groups for stages before the path
    tables: dict[bytes, _Tables] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        beside, model = self.beside, self.beside.model
        work = np.array(model.forward) + np.array(model.backward)
        self.stages = model.problem.stages[: model.most_used]
        self.fastest = max(stage.speed for stage in self.stages)
        m = self.microbatches = model.problem.num_microbatches
        self.depth = warmup_of(model.problem.memory.in_flight, model.num_stages, m)
        self.work, self.until = work, beside.before(work)
        self.until[-1] = work.sum()
        self.until_forward = beside.before(np.array(model.forward))
        self.until_forward[-1] = sum(model.forward)
        spanned = self.until[np.minimum(beside.high - 1, beside.length)] - self.until[beside.low]
        loose, short = beside.low < beside.high, spanned * model.most_used <= work.sum()
        self.beside_it = [loose & False, loose & short, loose]
        self.hops = [self._hop(s) for s in range(model.num_stages)]
        self.allowed = [self._allowed(s) for s in range(model.num_stages)]
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
        none, number = self.beside_it[0], len(self.stages) - first
        low = float(self.until[-1]) * max(1, self.microbatches / number) / self.fastest
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
        self, makespan: float, first: int, beside_it: NDArray[np.bool_], kind: Kind
    ) -> list[_Cut] | None:
        """The intervals with the least sum of work and hops whose stages leave time for the others
        within this makespan, see `Kind`."""
        stages, size = self.stages, self.beside.length
        tables = self._tables(beside_it)
        shape = 2, len(stages) + 1, size + 1  # behind a stage beside it, or not
        best, came = np.full(shape, np.inf), np.full((*shape, 3), -1)
        best[0, first, 0] = 0.0
        for s in range(first, len(stages)):
            waits = self._waits(s, makespan) if kind == "links" else 0.0
            for late, wide in product((0, 1), (1, 2)) if beside_it.any() else ((0, 1),):
                if s + 2 * (wide - 1) >= len(stages):
                    continue
                seconds = tables.own[late] / stages[s].speed
                taken = tables.taken[late][s] + waits
                if kind == "own":
                    taken = np.where(taken < np.inf, self.microbatches * seconds, np.inf)
                fits = (taken <= makespan) & self.allowed[s]
                if wide == 2:
                    there = tables.apart / stages[s + 1].speed
                    fits &= self.microbatches * there <= makespan
                    seconds = seconds - tables.saved / stages[s + 1].speed
                ways = best[late, s][:, None] + np.where(fits, seconds, np.inf)
                start = ways.argmin(0)
                total = ways[start, np.arange(size + 1)] + self.hops[s + wide - 1]
                then = int(late or wide == 2), s + wide
                less = total < best[then]
                best[then][less] = total[less]
                came[then][less, 0], came[then][less, 1:] = start[less], (late, wide)
        return self._followed(came, int(best[:, -1, -1].argmin()), first)

    def _followed(self, came: NDArray[np.intp], late: int, first: int) -> list[_Cut] | None:
        cuts: list[_Cut] = []
        stage, end = len(self.stages), self.beside.length
        while (stage, end) != (first, 0):
            start, late, wide = map(int, came[late, stage, end])
            if start < 0:
                return None
            stage -= wide
            cuts.append(_Cut(start, end, stage, wide == 2))
            end = start
        return cuts[::-1]

    def _tables(self, beside_it: NDArray[np.bool_]) -> _Tables:
        key = beside_it.tobytes()
        if key not in self.tables:
            self.tables[key] = self._made(beside_it)
        return self.tables[key]

    def _made(self, beside_it: NDArray[np.bool_]) -> _Tables:
        model, none = self.beside.model, np.tri(self.beside.length + 1, dtype=bool)
        own = np.subtract.outer(-self.until, -self.until)
        forward = np.subtract.outer(-self.until_forward, -self.until_forward)
        apart = _apart(self.beside, np.where(beside_it, self.work, 0.0))
        saved = _saved(self.beside, own, forward, apart, beside_it)
        apart[apart < WORTH * self.until[-1] / len(self.stages)] = np.inf
        elsewhere = [
            _since(self.beside, np.where(beside_it, one, 0.0)) for one in (self.work, model.forward)
        ]
        owns = [(own, forward), (own - elsewhere[0], forward - elsewhere[1])]
        taken = [
            [np.where(none, np.inf, self._taken(s, f, both - f)) for s in range(len(self.stages))]
            for both, f in owns
        ]
        return _Tables([own, owns[1][0]], taken, apart, saved)

    def _taken(self, s: int, forward: Array, backward: Array) -> Array:
        """Seconds of a schedule in which a stage has an interval, links apart."""
        model, speed = self.beside.model, self.stages[s].speed
        part = kind_of(model.problem.memory.schedule).halves(1.0)[0]
        way = self.until_forward + part * (self.until - self.until_forward)
        f, w = forward / speed, part * backward / speed
        after = (way[-1] - way)[None, :] / self.fastest
        found = passage(f, w, after, self.microbatches, self.depth[s] + 1)
        result: Array = found + way[:, None] / self.fastest
        return result

    def _waits(self, s: int, makespan: float) -> Array:
        """Half of what round trips over the link before or behind the stage take beyond what the
        microbatches in flight between its ends leave time for."""
        m, depth = self.microbatches, self.depth
        limit = max(makespan - self.until[-1] / self.fastest, 0.0) / max(m - 1, 1)
        found = np.zeros((self.beside.length + 1,) * 2)
        if s + 1 < len(self.hops):
            spare = (depth[s] - depth[s + 1] - 1) * limit
            found = np.maximum(found, self.hops[s][None, :] - spare)
        if s > 0:
            spare = (depth[s - 1] - depth[s] - 1) * limit
            found = np.maximum(found, self.hops[s - 1][:, None] - spare)
        return m * found / 2

    def assignment(
        self, cuts: list[_Cut], first: int, beside_it: NDArray[np.bool_]
    ) -> tuple[int, ...]:
        """Stages of groups: what is beside the path is as late as may be, where it has no stage
        of its own, or as early as may be, where such a stage needs it."""
        beside, model = self.beside, self.beside.model
        stage_of = np.zeros(beside.length + 2, dtype=np.intp)
        for cut in cuts:
            stage_of[cut.start + 1 : cut.end + 1] = cut.stage
        stage_of[0], stage_of[-1] = first, cuts[-1].stage
        stages = stage_of[beside.high]
        _, after = lattice.neighbours(model.num_groups, model.arcs)
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

    def _hop(self, s: int) -> Array:
        """What crosses a boundary from not far before it, there and back, over the stage's link."""
        model, size = self.beside.model, self.beside.length
        found, near = np.zeros(size + 1), size // model.num_stages
        for flow in model.flows:
            if not flow.tied:
                at = int(self.beside.high[flow.sources[0]])
                last = min(int(self.beside.high[list(flow.sinks)].max()), at + near, size)
                link = model.problem.stages[s]
                found[at:last] += flow.forward_seconds(link) + flow.backward_seconds(link)
        return found

    def _allowed(self, s: int) -> NDArray[np.bool_]:
        model = self.beside.model
        limit = model.problem.stages[s].memory_bytes
        held = [
            model.fixed_bytes(v, s) + model.saved(s) * model.saved_bytes[v]
            for v in range(model.num_groups)
        ]
        until = self.beside.before(np.array(held, dtype=np.float64))
        until[-1] = sum(held)
        fits: NDArray[np.bool_] = np.subtract.outer(-until, -until) <= (
            np.inf if limit is None else limit
        )
        return fits

    def _free(self) -> list[int]:
        """Groups that nothing of the path is before, what sends little first."""
        model = self.beside.model
        before, _ = lattice.neighbours(model.num_groups, model.arcs)
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


def _since(beside: Beside, work: Array) -> Array:
    """[k, l]: of what may be at boundary k and is on its way to the interval's end."""
    size = beside.length
    table = np.zeros((size + 2, size + 2))
    np.add.at(table, (beside.low, beside.high), work)
    found = table.cumsum(0).cumsum(1)[: size + 1, : size + 1]  # low up to k, high up to l
    result: Array = np.maximum(found - np.diag(found)[:, None], 0.0)
    return result


def _apart(beside: Beside, work: Array) -> Array:
    size = beside.length
    table = np.zeros((size + 2, size + 2))
    np.add.at(table, (beside.low, beside.high), work)
    found: Array = table.cumsum(0)[:, ::-1].cumsum(1)[:, ::-1]  # low up to j, high from k
    found = found[: size + 1, 1:].copy()
    found[np.tri(size + 1, dtype=bool)] = 0.0
    return found


def _saved(
    beside: Beside, own: Array, forward: Array, apart: Array, beside_it: NDArray[np.bool_]
) -> Array:
    """Seconds at which an interval's stage and the one beside it both work."""
    model, reads = beside.model, read_with(beside)
    ahead = _apart(beside, np.where(beside_it, model.forward, 0.0))
    back = apart - ahead
    for v in np.flatnonzero(beside_it).tolist():
        low, high = beside.low[v], beside.high[v]
        within = np.zeros((high - low, high - low), dtype=bool)
        for u in reads[v]:
            first, last = max(beside.low[u], low), beside.high[u]
            within[: max(first - low, 0), max(last - low, 0) :] = True
        back[low:high, low:high] -= np.where(within, model.backward[v], 0.0)
    found: Array = np.minimum(forward, ahead) + np.minimum(own - forward, np.maximum(back, 0.0))
    return found
