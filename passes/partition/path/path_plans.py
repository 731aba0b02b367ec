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

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.path.beside import Array, Beside, heaviest_path
from pdcompile.passes.partition.path.branches import read_with
from pdcompile.plan.makespan import warmup_of

LIMITS = 16  # on what a stage computes, from the average to three times as much
WORTH = 0.01  # of the average stage's work: less gets no stage


def path_plans(model: Model) -> Iterator[tuple[int, ...]]:
    """Stages of groups; of every kind of plan some come early."""
    beside = Beside.of(model, heaviest_path(model))
    if beside is None:
        return
    program = _Program(beside)
    work = program.until[-1] / model.most_used
    limits = [np.inf] if model.problem.num_microbatches == 1 else []
    even = work * np.geomspace(1.0, 3.0, LIMITS)
    limits += [*even[::4], *even[2::4], *even[1::2]]  # each kind of plan roughly, then in between
    for limit, slow, first, beside_it in product(
        limits, (False, True), program.first_stages(), program.beside_it
    ):
        found = program.solve(limit, first, beside_it, slow=slow and limit < np.inf)
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
    work: Array = field(init=False)  # seconds of each group
    until: Array = field(init=False)  # of what is on stages up to a boundary
    until_forward: Array = field(init=False)
    beside_it: list[NDArray[np.bool_]] = field(init=False)  # groups that may have a stage
    hops: list[Array] = field(init=False)  # by sending stage
    allowed: list[NDArray[np.bool_]] = field(init=False)
    free: list[int] = field(init=False)  # groups for stages before the path

    def __post_init__(self) -> None:
        beside, model = self.beside, self.beside.model
        work = np.array(model.forward) + np.array(model.backward)
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

    def solve(
        self, limit: float, first: int, beside_it: NDArray[np.bool_], *, slow: bool
    ) -> list[_Cut] | None:
        """The intervals with the least sum of work and hops whose stages take at most `limit`, and
        less beside `slow` links."""
        model, size = self.beside.model, self.beside.length
        stages = model.problem.stages[: model.most_used]
        own = np.subtract.outer(-self.until, -self.until)
        own[np.tri(size + 1, dtype=bool)] = np.inf
        apart = self._apart(np.where(beside_it, self.work, 0.0))
        saved = self._saved(own, apart, beside_it)
        apart[apart < WORTH * self.until[-1] / len(stages)] = np.inf
        best = np.full((len(stages) + 1, size + 1), np.inf)
        best[first, 0] = 0.0
        came: dict[tuple[int, int], _Cut] = {}
        for s in range(first, len(stages)):
            for wide in (1, 2) if beside_it.any() and s + 2 < len(stages) else (1,):
                seconds = own / stages[s].speed
                waits = self._waits(s, limit) if slow else 0.0
                fits = (seconds <= limit - waits) & self.allowed[s]
                if wide == 2:
                    there = apart / stages[s + 1].speed
                    fits &= (there <= limit) & (there < np.inf)
                    seconds = seconds - saved / stages[s + 1].speed
                ways = best[s][:, None] + np.where(fits, seconds, np.inf)
                start = ways.argmin(0)
                total = ways[start, np.arange(size + 1)] + self.hops[s + wide - 1]
                for end in np.flatnonzero(total < best[s + wide]):
                    best[s + wide, end] = total[end]
                    came[s + wide, int(end)] = _Cut(int(start[end]), int(end), s, wide == 2)
        cuts, at = [], (len(stages), size)
        while at != (first, 0):
            if at not in came:
                return None
            cuts.append(came[at])
            at = cuts[-1].stage, cuts[-1].start
        return cuts[::-1]

    def _saved(self, own: Array, apart: Array, beside_it: NDArray[np.bool_]) -> Array:
        """Seconds at which an interval's stage and the one beside it both work."""
        model, reads = self.beside.model, read_with(self.beside)
        forward = np.subtract.outer(-self.until_forward, -self.until_forward)
        ahead = self._apart(np.where(beside_it, model.forward, 0.0))
        back = apart - ahead
        for v in np.flatnonzero(beside_it).tolist():
            low, high = self.beside.low[v], self.beside.high[v]
            within = np.zeros((high - low, high - low), dtype=bool)
            for u in reads[v]:
                first, last = max(self.beside.low[u], low), self.beside.high[u]
                within[: max(first - low, 0), max(last - low, 0) :] = True
            back[low:high, low:high] -= np.where(within, model.backward[v], 0.0)
        found: Array = np.minimum(forward, ahead) + np.minimum(own - forward, np.maximum(back, 0.0))
        return np.where(own < np.inf, found, 0.0)

    def _waits(self, s: int, limit: float) -> Array:
        """Half of what a round trip over the link before or behind the stage takes beyond what the
        microbatches in flight between its ends leave time for."""
        model = self.beside.model
        depth = warmup_of(
            model.problem.memory.in_flight, model.num_stages, model.problem.num_microbatches
        )
        found = np.zeros((self.beside.length + 1,) * 2)
        if s + 1 < model.num_stages:
            spare = (depth[s] - depth[s + 1] - 1) * limit
            found = np.maximum(found, self.hops[s][None, :] - spare)
        if s > 0:
            spare = (depth[s - 1] - depth[s] - 1) * limit
            found = np.maximum(found, self.hops[s - 1][:, None] - spare)
        return found / 2

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

    def _apart(self, work: Array) -> Array:
        size = self.beside.length
        table = np.zeros((size + 2, size + 2))
        np.add.at(table, (self.beside.low, self.beside.high), work)
        found: Array = table.cumsum(0)[:, ::-1].cumsum(1)[:, ::-1]  # low up to j, high from k
        found = found[: size + 1, 1:].copy()
        found[np.tri(size + 1, dtype=bool)] = 0.0
        return found

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
