"""A lower bound on the makespan of a flush schedule, along a path of the model.

Real models are almost chains: masks, rotary angles, branches of attention and labels sit beside one
long path of groups whose values carry gradients.  Stages that hold groups of the path wait for each
other along it, there and back, and each holds an interval of it.  A group beside the path surely is
on the stage whose interval holds the last of the path before it and the first of the path behind
it; where a boundary lies between these two it is on one of the stages around the boundary, or on a
stage without the path that lies there.

Is a makespan possible?  As in `bounds`, from a makespan follows which (stage, interval) may be; D
and T are the way of one microbatch down to the stage and up from it, and beyond it and back, F and
W what the stage surely computes, w its warm-up, and S all work and all transfers of one microbatch:

- D + m·(F+W);
- S + (m−1)·max(F, W) + (m−1−w)·min(F, W);
- D + q·(F+W+T) + r·(F+W), q round trips, from 2 to ⌈m/(w+1)⌉, r = m−1−(q−1)(w+1);
- of two stages s and t next to each other, between which d = w_s − w_t + 1 microbatches are in
  flight: D + w_t·(F_s+W_s) + q·(F_s+W_s + F_t+W_t + transfers) + r·(F_s+W_s), q and r of the
  m − w_t others, with d for w + 1;
- the way down, F + W, and m gradients of a parameter that the stage shares with the first one.

Each of these also says how much a stage may compute besides F + W.  What all stages may compute
together has to be all work.

Where every stage holds a group of the path, S is all work there is.  Where only q of n do, the
others keep what lies beside the path at n − q boundaries at most, and it may not count in S.  So
this is asked for every q, and the least answer is the bound.

Holds for gpipe and 1f1b, and with W up to the gradients of the inputs where backward is split
(docs/planner.md; tests hold it against brute force).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.bounds import bisected, trips_in_turn
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.model import Flow, Model
from pdcompile.plan.makespan import warmup_of
from pdcompile.problem import StageLimits
from pdcompile.schedule.registry import kind_of

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

MOST = 240  # groups of the path that are told apart; between them cuts are looked at as one
CLOSE = 1e-4  # relative: where the bisection ends


def path_bound(
    model: Model,
    lower: float,
    upper: Callable[[], float],
    budget: Budget,
    offer: Callable[[tuple[int, ...]], object],
) -> float:
    """Seconds from `lower` up to `upper()` that no assignment of `model` is below.

    What is possible as far as the bound knows is offered, stages of groups, and `upper` asked
    again.  A budget that ends leaves the bound as far as it has come.
    """
    beside = Beside.of(model, heaviest_path(model))
    if beside is None:
        return lower
    bound = math.inf
    for case in _cases(beside):
        bound = min(bound, upper() * (1 - 1e-9))
        if bound <= lower or budget.late:
            return lower
        if case.whole * case.microbatches > bound * len(case.own):
            continue  # the busiest of so few stages takes longer
        chain = partial(case.chain, budget=budget)
        bound = bisected(chain, lower, bound, CLOSE, budget, partial(_offer, case, offer))
    return bound


def _offer(case: _Case, offer: Callable[[tuple[int, ...]], object], ends: list[int]) -> None:
    """Offer what the boundaries mean for all groups, where they say on which stage each is."""
    if case.every:
        for groups in case.beside.assignments(ends):
            offer(groups)


def heaviest_path(model: Model) -> tuple[int, ...]:
    """Groups in a row, each reading a value with a gradient of the one before; the most work."""
    after: list[list[int]] = [[] for _ in range(model.num_groups)]
    for flow in model.flows:
        if not flow.tied and flow.backward_messages > 0:
            after[flow.sources[0]] += flow.sinks
    heaviest, following = [0.0] * model.num_groups, [-1] * model.num_groups
    for v in reversed(range(model.num_groups)):
        work, following[v] = max(((heaviest[u], u) for u in after[v]), default=(0.0, -1))
        heaviest[v] = work + model.forward[v] + model.backward[v]
    path, v = [], max(range(model.num_groups), key=heaviest.__getitem__)
    while v >= 0:
        path.append(v)
        v = following[v]
    return tuple(path)


@dataclass
class Beside:
    """A path, and of every group the last of the path before it and the first behind it.

    Groups of the path have numbers from 1: `low` and `high` are both its own number for one of
    them, 0 and one more than there are where there is none before or behind.
    """

    model: Model
    length: int
    low: NDArray[np.intp]
    high: NDArray[np.intp]
    flows: list[list[Flow]]  # by boundary: of the values along the path, which a cut there sends

    @staticmethod
    def of(model: Model, path: tuple[int, ...]) -> Beside | None:
        """None where the path has no boundary."""
        kept = _kept(model, path)
        if len(kept) < 2:
            return None
        size = len(kept)
        number = {v: n for n, v in enumerate(kept, start=1)}
        before, after = lattice.neighbours(model.num_groups, model.arcs)
        low = np.zeros(model.num_groups, dtype=np.intp)
        high = np.full(model.num_groups, size + 1, dtype=np.intp)
        for v in range(model.num_groups):
            low[v] = max([number.get(v, 0), *(low[u] for u in before[v])])
        for v in reversed(range(model.num_groups)):
            high[v] = min([number.get(v, size + 1), *(high[u] for u in after[v])])
        return Beside(model, size, low, high, _along(model, path, number, size))

    def inside(self, of_groups: Array, *, every: bool) -> Array:
        """[j, k]: the sum over groups that surely are on a stage with groups j + 1 to k.

        Where `every` stage holds some of the path, the first one also has what nothing of the
        path is before, and the last one what nothing is behind.
        """
        table = np.zeros((self.length + 2, self.length + 2))
        np.add.at(table, (self.low, self.high), of_groups)
        found = table[::-1].cumsum(0)[::-1].cumsum(1)  # low from a on, high up to b
        rows, columns = np.arange(1, self.length + 2), np.arange(self.length + 1)
        if every:
            rows[0], columns[-1] = 0, self.length + 1
        result: Array = found[np.ix_(rows, columns)]
        return result

    def before(self, of_groups: Array) -> Array:
        """[j]: the sum over groups that are on earlier stages when j of the path are."""
        found: Array = np.bincount(self.high, of_groups, self.length + 2).cumsum()
        return found[: self.length + 1]

    def behind(self, of_groups: Array) -> Array:
        """[j]: the sum over groups that are not on earlier stages when j of the path are."""
        counted = np.bincount(self.low, of_groups, self.length + 2)
        found: Array = counted[::-1].cumsum()[::-1][1:]
        return np.concatenate(([of_groups.sum()], found[1:]))

    def spanning(self, of_groups: Array) -> Array:
        """[j]: the sum over groups that may be on either side of boundary j, or on no stage with
        the path."""
        ends = np.zeros(self.length + 3)
        apart = self.low < self.high
        np.add.at(ends, self.low[apart], of_groups[apart])
        np.add.at(ends, self.high[apart], -of_groups[apart])
        found: Array = np.maximum(ends.cumsum()[: self.length + 1], 0.0)
        return found

    def assignments(self, ends: list[int]) -> Iterator[tuple[int, ...]]:
        """Stages of groups whose path is cut at these boundaries, the last at its end: what is
        open as early or as late as may be, but what nothing of the path is before always late."""
        stage = np.searchsorted(np.array(ends), np.arange(self.length + 2), side="left")
        stage[-1] = len(ends) - 1
        before, after = lattice.neighbours(self.model.num_groups, self.model.arcs)
        first, last = stage[self.low].tolist(), stage[self.high].tolist()
        for v in reversed(range(len(last))):
            last[v] = min([last[v], *(last[u] for u in after[v])])
        yield tuple(last)
        for v in range(len(first)):
            first[v] = last[v] if self.low[v] == 0 else first[v]
            first[v] = max([first[v], *(first[u] for u in before[v])])
        yield tuple(first)


def _kept(model: Model, path: tuple[int, ...]) -> tuple[int, ...]:
    """At most `MOST` groups of the path: light ones are left out, no more of them in a row than
    weigh as little as has to be."""
    work = [model.forward[v] + model.backward[v] for v in path]
    light, kept = 0.0, path
    while len(kept) > MOST:
        light = max(2 * light, sum(work) / 1e5)
        found, since = [], math.inf  # the first one stays
        for v, own in zip(path, work, strict=True):
            since += own
            if since > light:
                found.append(v)
                since = 0.0
        kept = tuple(found)
    return kept


def _along(
    model: Model, path: tuple[int, ...], number: dict[int, int], size: int
) -> list[list[Flow]]:
    """The values from one group of the path to the next, by the boundary that lies there."""
    flow_of: dict[tuple[int, int], Flow] = {}
    for flow in model.flows:
        if not flow.tied and flow.backward_messages > 0:
            flow_of |= {(flow.sources[0], sink): flow for sink in flow.sinks}
    found: list[list[Flow]] = [[] for _ in range(size + 1)]
    at = 0
    for u, v in pairwise(path):
        at = number.get(u, at)
        found[at].append(flow_of[u, v])
    return found


@dataclass
class _Case:
    """So many stages that hold groups of the path.

    Matrices [j, k] of intervals j + 1 to k, vectors by boundary.
    """

    beside: Beside
    every: bool  # stage holds some of the path
    own: list[tuple[Array, Array]]  # forward and backward seconds, per stage
    speeds: list[float]  # of the stages, relative to the fastest
    warmup: list[int]
    allowed: list[Mask]
    hops: list[Array]  # there and back, between stage s and the next one
    before: Array  # work of one microbatch on earlier stages
    rest: Array  # on this one and later ones
    whole: float  # on all
    final: Array  # after the first stage's last backward, by its end
    shared: list[Array]  # until the last gradient of a tied parameter, without the way down
    microbatches: int
    _paths: list[list[tuple[Array, int, int, int]]] = field(init=False)

    def __post_init__(self) -> None:
        """`_paths`: of each stage; how often the ways before it and after it are in each, and, at
        least, what it computes besides."""
        m, before = self.microbatches, self.before[:, None]
        self._paths = []
        for s, (f, w) in enumerate(self.own):
            own, depth = f + w, self.warmup[s] + 1
            ends = self.whole + (m - 1) * np.maximum(f, w) + (m - depth) * np.minimum(f, w)
            found = [(before + m * own, 1, 0, m), (ends, 1, 1, m - depth)]
            found.append((self.shared[s], 0, 0, 1))
            for trips, others in trips_in_turn(m, depth):
                around = before + trips * self.rest[:, None] + others * own
                found.append((around, 1, trips, others))
            last = self._last(s)
            self._paths.append([(path + last, *times) for path, *times in found])

    def _last(self, s: int) -> Array:
        """Seconds after the first stage's last backward, by the intervals of stage s."""
        return self.final[None, :] if s == 0 else self.final[:, None]

    def chain(self, makespan: float, budget: Budget) -> list[int] | None:
        """The ends of intervals of which nothing shows that they take longer; None if there is
        no such chain."""
        count = len(self.own)
        states = [mask.copy() for mask in self.allowed]
        size = -1
        while size != (size := sum(map(np.count_nonzero, states))) and not budget.late:
            ahead, behind = self._ahead(states), self._behind(states)
            most = [self._most(s, ahead[s], behind[s], makespan) for s in range(count)]
            for s in range(count):
                states[s] &= most[s] >= 0
            if self.every:
                for s in range(count - 1):
                    self._between(s, ahead[s], states, makespan)
                self._all_work(states, most)
            if not all(mask.any() for mask in states):
                return None
        behind, ends = self._behind(states), [0]
        for mask, hops in zip(states, behind, strict=True):
            ends.append(int(np.where(mask[ends[-1]], hops, np.inf).argmin()))
        return ends[1:]

    def _most(self, s: int, ahead: Array, behind: Array, makespan: float) -> Array:
        """Seconds of a microbatch's work, at full speed, that stage s may compute; negative where
        it takes longer than the makespan as it is."""
        own = self.own[s][0] + self.own[s][1]
        besides = np.full(own.shape, np.inf)
        for path, down, up, times in self._paths[s]:
            hops = down * ahead[:, None] if down else 0.0
            left = makespan - (path + hops + up * behind[None, :] if up else path + hops)
            besides = np.minimum(besides, left / times if times else np.where(left < 0, -1, np.inf))
        beside_path = np.maximum(self.whole - self.before[:, None] - self.rest[None, :], 0.0)
        return np.where(
            besides < 0, -1.0, np.minimum((own + besides) * self.speeds[s], beside_path)
        )

    def _all_work(self, states: list[Mask], most: list[Array]) -> None:
        """Drop intervals without which, or with which, the stages may not compute all work."""
        least = self.whole * (1 - 1e-9)
        ahead = [np.where(np.arange(len(self.before)) == 0, 0.0, -np.inf)]
        for mask, own in zip(states, most, strict=True):
            ahead.append(np.where(mask, ahead[-1][:, None] + own, -np.inf).max(0))
        behind = np.where(np.arange(len(self.before)) == len(self.before) - 1, 0.0, -np.inf)
        for s in reversed(range(len(states))):
            with_it = ahead[s][:, None] + most[s] + behind[None, :]
            behind = np.where(states[s], most[s] + behind[None, :], -np.inf).max(1)
            states[s] &= with_it >= least

    def _between(self, s: int, ahead: Array, states: list[Mask], makespan: float) -> None:
        """Drop intervals of stage s, and of the next one, whose round trips take too long with
        every interval of the other."""
        here, there = self.warmup[s : s + 2]
        own, beyond = (f + w for f, w in self.own[s : s + 2])
        for trips, others in trips_in_turn(self.microbatches - there, here - there + 1):
            left = (ahead + self.before)[:, None] + (there + trips + others) * own
            left = left + trips * self.hops[s][None, :] + self._last(s)
            right = trips * beyond
            least_left = np.where(states[s], left, np.inf).min(0)
            least_right = np.where(states[s + 1], right, np.inf).min(1)
            states[s] &= left + least_right[None, :] <= makespan
            states[s + 1] &= right + least_left[:, None] <= makespan

    def _ahead(self, states: list[Mask]) -> list[Array]:
        """The least transfers on the way to each stage, by its first boundary."""
        found = [np.full(len(self.before), np.inf)]
        found[0][0] = 0.0
        for mask, hop in zip(states, self.hops, strict=False):
            found.append(np.where(mask, found[-1][:, None], np.inf).min(0) + hop)
        return found

    def _behind(self, states: list[Mask]) -> list[Array]:
        """The least transfers after each stage, by its last boundary."""
        found = [np.full(len(self.before), np.inf)]
        found[0][-1] = 0.0
        for mask, hop in zip(reversed(states), reversed(self.hops), strict=False):
            found.append(np.where(mask, found[-1][None, :], np.inf).min(1) + hop)
        return found[::-1]


def _cases(beside: Beside) -> Iterator[_Case]:
    """All stages hold groups of the path, or one fewer, and so on."""
    model = beside.model
    if model.most_used == model.num_stages and not model.problem.allow_empty:
        yield _case(beside, model.num_stages, None)
        fewer = model.num_stages - 1
    else:
        fewer = model.most_used
    anywhere = _allowed(beside, range(model.num_stages))
    for count in range(fewer, 0, -1):
        yield _case(beside, count, anywhere)


def _case(beside: Beside, count: int, anywhere: Mask | None) -> _Case:
    """`anywhere`: intervals that some stage may hold; which ones hold the path is open, and the
    others may hold what lies beside it.  None: stage s is the s-th."""
    model, size, every = beside.model, beside.length, anywhere is None
    stages, m = model.problem.stages, model.problem.num_microbatches
    part = kind_of(model.problem.memory.schedule).halves(1.0)[0]  # of a backward
    forward, backward = np.array(model.forward), part * np.array(model.backward)
    fastest = max(stage.speed for stage in stages)
    work = (forward + backward) / fastest
    f, w = (beside.inside(one, every=every) for one in (forward, backward))
    speeds = [stage.speed for stage in stages] if every else [fastest] * count
    missing = 0.0
    if not every:
        spans = np.sort(beside.spanning(work)[1:size])[::-1]
        free = work[(beside.low == 0) | (beside.high == size + 1)].sum()
        missing = float(spans[: min(len(stages) - count, count - 1)].sum() + free)
    hops = [_hop(beside, [stages[s]] if every else stages) for s in range(count - 1)]
    warmup = warmup_of(model.problem.memory.in_flight, len(stages), m)
    held = (_allowed(beside, (s,)) if anywhere is None else anywhere for s in range(count))
    return _Case(
        beside=beside,
        every=every,
        own=[(f / speed, w / speed) for speed in speeds],
        speeds=[speed / fastest for speed in speeds],
        warmup=[warmup[s] if every else max(warmup[s:]) for s in range(count)],
        allowed=list(held),
        hops=hops,
        before=np.maximum(beside.before(work) - missing, 0.0),
        rest=np.maximum(beside.behind(work) - missing, 0.0),
        whole=float(work.sum()) - missing,
        final=_final(beside) if every else np.zeros(size + 1),
        shared=[
            # The first stage with some of the path is one of the others, or the next one.
            _shared(beside, stages[len(stages) - count : s], f / v + w / v, missing, every=every)
            for s, v in enumerate(speeds)
        ],
        microbatches=m,
    )


def _hop(beside: Beside, links: list[StageLimits] | tuple[StageLimits, ...]) -> Array:
    """By boundary: the least that one value along the path takes there and back."""
    found = np.full(beside.length + 1, np.inf)
    for boundary, flows in enumerate(beside.flows):
        for flow in flows:
            found[boundary] = min(
                found[boundary],
                *(flow.forward_seconds(link) + flow.backward_seconds(link) for link in links),
            )
    return found


def _allowed(beside: Beside, choices: Sequence[int]) -> Mask:
    """[j, k]: whether one of these stages may hold the interval, by its memory; of a single one
    also by where the groups may be."""
    model, size = beside.model, beside.length
    ends, single = np.arange(size + 1), len(choices) == 1
    limits = [model.problem.stages[s].memory_bytes for s in choices]
    fits = np.full((size + 1, size + 1), None in limits)
    for s, limit in zip(choices, limits, strict=True):
        if limit is not None and not fits.all():
            held = [
                model.fixed_bytes(v, s) + model.saved(s) * model.saved_bytes[v]
                for v in range(model.num_groups)
            ]
            least = beside.inside(np.array(held, dtype=np.float64), every=single)
            fits |= least <= limit * (1 + 1e-12) + 0.5
    if single:
        (s,) = choices
        barred = [not a <= s <= b for a, b in zip(model.lowest, model.highest, strict=True)]
        fits &= beside.inside(np.array(barred, dtype=np.float64), every=True) < 0.5
    found: Mask = fits & (ends[:, None] < ends[None, :])
    return found


def _shared(
    beside: Beside, links: Sequence[StageLimits], own: Array, missing: float, *, every: bool
) -> Array:
    """[j, k]: seconds until the last gradient of a parameter that a group of the stage shares
    with one before the path has arrived there over these links, after the least way down."""
    model, found = beside.model, np.zeros_like(own)
    if not links:
        return found
    m, fastest = model.problem.num_microbatches, max(one.speed for one in model.problem.stages)
    down = np.maximum(beside.before(np.array(model.forward)) / fastest - missing, 0.0)
    for flow in model.flows:
        first, last = flow.sinks[0], flow.sinks[-1]
        if flow.tied and beside.high[first] == 1:
            # From holder to holder, one of which sends over the slowest link.
            once = max(flow.backward_seconds(link) for link in links)
            seconds = down[:, None] + own + m * once
            has = np.zeros(model.num_groups)
            has[last] = 1.0
            held = beside.inside(has, every=every) > 0
            found = np.maximum(found, np.where(held, seconds, 0.0))
    return found


def _final(beside: Beside) -> Array:
    """By the end of the first stage: seconds of new weights that it sends after its update.

    Of a parameter that a group surely on it shares with one that surely is not.
    """
    model = beside.model
    m, found = model.problem.num_microbatches, np.zeros(beside.length + 1)
    for flow in model.flows:
        if flow.tied:
            first = min(int(beside.high[v]) for v in flow.sources)
            last = max(int(beside.low[v]) for v in flow.sinks)
            once = m * min(flow.forward_seconds(link) for link in model.problem.stages)
            if first == 1:  # surely on the first stage
                found[:last] = np.maximum(found[:last], once)
    return found
