"""Lower bounds on the makespan of a flush schedule.

As costs per stage: each is the length of a path through the schedule, so it holds for every
assignment, and their minimax over all chains of ideals is a bound for the whole problem.

For groups in a row (`always_linked`) a stage is an interval of groups, and the bound is sharper:
is a makespan possible?  A state is (stage, interval); from a makespan follows what each state may
cost, because these paths of the schedule go through it.  With D and T the way of one microbatch
down to the stage and up from it, and beyond it and back (work and transfers), F and W its own
seconds, w its warm-up:

- D + m·(F+W);
- D + F+W + T + (m−1)·max(F, W) + (m−1−w)·min(F, W);
- for two stages s and t next to each other, whose first microbatches in flight differ by
  d = w_s − w_t + 1: with q round trips between them, D + w_t·(F_s+W_s) + q·(both + transfers) +
  the rest on s; and the same for all stages from s on.

Where backward is split, W is the part up to the gradients of the inputs, also on the way.

D and T are sums along the chain of intervals, of which the least are kept.  States above the
makespan in question are dropped until nothing changes; if no chain is left, it is impossible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.dynamic_program import Cost
from pdcompile.passes.partition.model import Model, always_linked
from pdcompile.passes.partition.segments import Matrix, Segments
from pdcompile.plan.makespan import Path, Timing, critical_path, warmup_of
from pdcompile.problem import StageLimits
from pdcompile.schedule.registry import kind_of

Vector = NDArray[np.float64]


def flush_bound(segments: Segments) -> Cost:
    """Seconds that the minibatch takes at least when a stage is J∖I.

    Always m·(F_s+W_s).  When every stage waits for its neighbours also these paths, where D is
    the way of one microbatch down to stage s and back up from it (work and transfers before the
    stage), T the same of what comes after it, and S = D + F_s + W_s + T:

    - D + m·(F_s+W_s);
    - S + (m−1)·F_s + (m−1−w_s)·W_s, and the same with F and W exchanged (until the first
      backward a stage does w_s + 1 forwards, and at the end so many backwards);
    - D + q·(F_s+W_s+T) + r·(F_s+W_s): with w_s + 1 in flight, forward k waits for backward
      k − w_s − 1, so that round trips follow each other, for every q from 2 to ⌈m/(w_s+1)⌉;
      r = m−1−(q−1)(w_s+1) microbatches go by between the first and the second one.

    Where backward is split all of these hold with W up to the gradients of the inputs; and the
    first two with all of W_s, but without the ways back in D: nobody waits for the rest.
    """
    model = segments.model
    m = model.problem.num_microbatches
    warmup = warmup_of(model.problem.memory.in_flight, model.num_stages, m)
    linked = always_linked(model, "forward") and always_linked(model, "backward")
    fastest = max(stage.speed for stage in model.problem.stages)
    kind = kind_of(model.problem.memory.schedule)
    first_part = kind.halves(1.0)[0]  # of a backward
    before: Vector = (segments.forward + first_part * segments.backward)[0] / fastest
    ahead: Vector = segments.forward[0] / fastest
    hops_before, hops_after = _least_hops(segments) if linked else ([], [])
    final = last_transfer(segments) if linked else before

    def cost(stage: int) -> Matrix:
        own = segments.compute(stage)
        result: Matrix = m * own
        if not linked:
            return result
        speed = model.problem.stages[stage].speed
        f, w = segments.forward / speed, segments.backward / speed
        down = (before + hops_before[stage])[:, None]
        after = (before[-1] - before + hops_after[stage])[None, :]
        last = final[None, :] if stage == 0 else final[:, None]
        paths: Matrix = last + down + passage(f, first_part * w, after, m, warmup[stage] + 1)
        if kind.splits_backward:
            whole = _ends(f, w, after, m, warmup[stage] + 1)
            paths = np.maximum(paths, ahead[:, None] + np.maximum(result, whole))
        return paths

    return cost


def passage(f: Matrix, w: Matrix, after: Matrix, m: int, depth: int) -> Matrix:
    """Seconds between the first microbatch's arrival at a stage and the last one's return to it.

    F and W of the stage, T in `after`, at most `depth` in flight: the three paths of `flush_bound`
    without D.
    """
    own = f + w
    result: Matrix = np.maximum(m * own, _ends(f, w, after, m, depth))
    for trips, rest in trips_in_turn(m, depth):
        result = np.maximum(result, trips * (own + after) + rest * own)
    return result


def trips_in_turn(m: int, depth: int) -> set[tuple[int, int]]:
    """(trips that follow each other with `depth` in flight, microbatches that go by besides): the
    fewest and the most trips, if there are two."""
    most = -(-m // depth)
    return {(trips, m - 1 - (trips - 1) * depth) for trips in (2, most) if most > 1}


def _ends(f: Matrix, w: Matrix, after: Matrix, m: int, depth: int) -> Matrix:
    """The second path: `depth` forwards before any backward, so many backwards at the end."""
    result: Matrix = f + w + after + (m - 1) * np.maximum(f, w) + (m - depth) * np.minimum(f, w)
    return result


def last_transfer(segments: Segments) -> Vector:
    """Seconds after the first stage's last backward, when it holds at most the first v groups.

    New weights of a parameter that it shares with a group on a later stage still have to go
    there.
    """
    model = segments.model
    m = model.problem.num_microbatches
    found = np.zeros(model.num_groups + 1)
    for flow in model.flows:
        if flow.tied and flow.sources[0] == 0:
            once = m * min(flow.forward_seconds(link) for link in model.problem.stages)
            found[: max(flow.sinks) + 1] = np.maximum(found[: max(flow.sinks) + 1], once)
    return found


def _least_hops(segments: Segments) -> tuple[list[Vector], list[Vector]]:
    """Seconds of transfers of one microbatch, there and back, before and after each stage.

    For groups in a row (`always_linked`), so that ideal v holds the first v of them: entry
    [s][v] of the first is the least when v groups are on stages before s, of the second when v
    groups are on stages up to s.  On a hop at least what group v − 1 sends to group v travels.
    """
    model = segments.model
    n, stages = model.num_groups, model.problem.stages
    flows = [flow for flow in model.flows if not flow.tied and flow.sources[0] + 1 in flow.sinks]

    def hop(stage: int) -> Vector:
        """Seconds between a stage and the next one, when v groups are on stages up to it."""
        found = np.full(n + 1, np.inf)
        found[1:n] = 0.0
        for flow in flows:
            seconds = flow.forward_seconds(stages[stage]) + flow.backward_seconds(stages[stage])
            found[flow.sources[0] + 1] += seconds
        return found

    count = len(stages)
    hops = [hop(s) for s in range(count - 1)]
    none = np.full(n + 1, np.inf)
    ahead, behind = [none.copy()], [none.copy()]
    ahead[0][0] = behind[0][n] = 0.0
    for s in range(count - 1):
        fewer = np.minimum.accumulate(ahead[-1])
        ahead.append(hops[s] + np.concatenate(([np.inf], fewer[:-1])))
        more = np.minimum.accumulate(behind[-1][::-1])[::-1]
        behind.append(hops[-1 - s] + np.concatenate((more[1:], [np.inf])))
    return ahead, behind[::-1]


def seed_paths(model: Model) -> Iterator[Path]:
    """Paths that are likely to be critical: one stage or one link much slower than the others."""
    n, m = model.num_stages, model.problem.num_microbatches
    warmup = warmup_of(model.problem.memory.in_flight, n, m)
    schedule = model.problem.memory.schedule
    hops = {(s, s + 1): 1e-3 for s in range(n - 1)}
    back = {(s + 1, s): 1e-3 for s in range(n - 1)}
    for slow in range(n):
        work = tuple(1.1 if s == slow else 1.0 for s in range(n))
        yield critical_path(Timing(work, work, hops, back), warmup, m, schedule)
    for link in hops:
        slow_link = Timing((1.0,) * n, (1.0,) * n, {**hops, link: 9.0}, back)
        yield critical_path(slow_link, warmup, m, schedule)


def simple_bound(model: Model) -> float:
    """Seconds per microbatch: all work on all stages at full speed, and the largest group."""
    stages = model.problem.stages
    work = [f + w for f, w in zip(model.forward, model.backward, strict=True)]
    speeds = sorted((stage.speed for stage in stages), reverse=True)
    spread = math.fsum(work) / math.fsum(speeds[: model.most_used])
    largest = max(
        own / max(stage.speed for stage in stages[low : high + 1])
        for own, low, high in zip(work, model.lowest, model.highest, strict=True)
    )
    per_microbatch = max(spread, largest) * (1 - 1e-12)
    flush = model.problem.objective == "flush"
    return per_microbatch * (model.problem.num_microbatches if flush else 1)


def crude_upper(model: Model) -> float:
    """No assignment takes longer: everything one after the other, every flow on every hop."""
    stages, n = model.problem.stages, model.num_stages
    m = model.problem.num_microbatches
    slowest = min(stage.speed for stage in stages)
    work = math.fsum(model.forward) + math.fsum(model.backward)
    transfers = math.fsum(
        max(flow.forward_seconds(link) * m + flow.backward_seconds(link) for link in stages) * n
        for flow in model.flows
    )
    return (work / slowest + transfers) * (m + n) * 1.01 + 1e-250


Found = TypeVar("Found")

Array = NDArray[np.float64]
MAX_ENTRIES = 400_000  # of the table of transfers: groups x longest stage, squared
CLOSE = 1e-5  # relative: where the bisection ends
NEAR_UPPER = 0.03  # relative: its first step below the best plan
NEAR_LOWER = 0.1  # of what is open: its first step above the bound, where that is likely near


def applies(segments: Segments) -> bool:
    """Whether the problem is one of groups in a row, under a flush schedule."""
    model = segments.model
    return (
        segments.complete
        and model.problem.objective == "flush"
        and len(segments.ideals) == model.num_groups + 1
        and model.num_stages > 1
        and model.most_used == model.num_stages
        and always_linked(model, "forward")
        and always_linked(model, "backward")
    )


def ramp_bound(
    segments: Segments, lower: float, upper: float, budget: Budget
) -> tuple[float, list[tuple[int, ...]]]:
    """(a lower bound between `lower` and `upper`, assignments of groups worth a look).

    A budget that ends leaves the bound as far as it has come.
    """
    upper *= 1 - 1e-9  # plans as good as the one that is known are of no interest
    tables = _Tables.build(segments, upper)
    found: list[tuple[int, ...]] = []
    if tables is None:
        return lower, found
    chains = partial(tables.chain, budget=budget)
    return bisected(chains, lower, upper, CLOSE, budget, found.append), found


def bisected(
    chain: Callable[[float], Found | None],
    lower: float,
    upper: float,
    close: float,
    budget: Budget,
    found: Callable[[Found], object],
    share: float = 0.0,
    *,
    rising: bool = False,
) -> float:
    """The largest makespan up to `upper`, within `close` of it or this `share` of what is open,
    that no `chain` keeps; what is `found` for others.  A budget that ends leaves it as far as it
    has come.  Begins at `upper`; `rising`: near `lower`, and takes larger and larger steps."""
    low, high, reach, step = lower, upper, NEAR_UPPER, NEAR_LOWER * (upper - lower)
    middle = min(low + max(step, close * upper), upper) if rising else upper
    while high - low > max(close * high, share * (upper - low)) or middle == upper:
        one = chain(middle)
        if budget.late:
            break
        if one is None:
            low = middle
        else:
            found(one)
            high, rising = middle, False
        if middle == low == upper:
            break
        step *= 2
        middle = min(low + step, upper) if rising else max((low + high) / 2, (1 - reach) * upper)
        reach *= 2
    return low


@dataclass(slots=True)
class _Tables:
    """Arrays [first group, length − 1] of intervals; transfers [boundary, length, length]."""

    segments: Segments
    longest: int
    warmup: tuple[int, ...]
    own: list[tuple[Array, Array]]  # forward and backward seconds, per stage
    allowed: list[NDArray[np.bool_]]
    hops: list[Array]  # there and back, between stage s and s + 1
    before: Array  # work of the first groups at the highest speed
    final: Array  # see `bounds.last_transfer`
    ends: NDArray[np.intp] = field(init=False)  # [first group, length − 1] → boundary

    def __post_init__(self) -> None:
        n = self.segments.model.num_groups
        self.ends = np.minimum(np.arange(n)[:, None] + np.arange(1, self.longest + 1), n)

    @staticmethod
    def build(segments: Segments, upper: float) -> _Tables | None:
        model = segments.model
        n, m = model.num_groups, model.problem.num_microbatches
        speeds = [stage.speed for stage in model.problem.stages]
        work: Matrix = segments.forward + segments.backward
        fits = (m * work / max(speeds) <= upper) & segments.subset
        longest = int(fits.sum(1).max())
        if not longest or n * longest * longest > MAX_ENTRIES:
            return None
        part = kind_of(model.problem.memory.schedule).halves(1.0)[0]  # of a backward
        first = np.arange(n)[:, None]
        last = first + np.arange(1, longest + 1)
        inside = last <= n
        last = np.minimum(last, n)
        own = [
            (segments.forward[first, last] / speed, part * segments.backward[first, last] / speed)
            for speed in speeds
        ]
        allowed = [segments.allowed(s)[first, last] & inside for s in range(len(speeds))]
        links = {}
        for stage in model.problem.stages[:-1]:
            key = stage.bytes_per_second, stage.latency_seconds
            if key not in links:
                links[key] = _transfers(segments, longest, stage)
        hops = [
            links[stage.bytes_per_second, stage.latency_seconds]
            for stage in model.problem.stages[:-1]
        ]
        warmup = warmup_of(model.problem.memory.in_flight, model.num_stages, m)
        before = (segments.forward + part * segments.backward)[0] / max(speeds)
        final = last_transfer(segments)
        return _Tables(segments, longest, warmup, own, allowed, hops, before, final)

    def chain(self, makespan: float, budget: Budget) -> tuple[int, ...] | None:
        """Stages of groups of a chain that may take no more; None when there is none."""
        count = len(self.own)
        states = [mask.copy() for mask in self.allowed]
        size = -1
        while size != (size := sum(int(mask.sum()) for mask in states)) and not budget.late:
            behind = self._behind(states, makespan)
            ahead = self._ahead(states, makespan)
            for s in range(count):
                states[s] &= self._least(s, ahead[s], behind[s]) <= makespan
        if not all(mask.any() for mask in states):
            return None
        return self._follow(self._behind(states, makespan))

    def _least(self, s: int, ahead: Array, behind: Array) -> Array:
        """Seconds of the best schedule that goes through each state, at least."""
        m = self.segments.model.problem.num_microbatches
        f, w = self.own[s]
        down = self.before[:-1, None] + ahead
        down = down + (self.final[self.ends] if s == 0 else self.final[:-1, None])
        after = self.before[-1] - self.before[self.ends] + behind
        result: Array = down + passage(f, w, after, m, self.warmup[s] + 1)
        return result

    def _between(self, s: int) -> Array:
        """[boundary, length before, length after]: two stages that wait for each other."""
        m = self.segments.model.problem.num_microbatches
        here, there = self.warmup[s], self.warmup[s + 1]
        trips = (m - 1 - there) // (here - there + 1) + 1
        rest = m - 1 - there - (trips - 1) * (here - there + 1)
        f, w = self.own[s]
        own = f + w
        shared = there * own + rest * (own if trips > 1 else np.maximum(f, w)) + trips * own
        shared = shared + (self.final[self.ends] if s == 0 else self.final[:-1, None])
        left = self.before[:-1, None] + shared
        right = trips * (self.own[s + 1][0] + self.own[s + 1][1])
        result: Array = _shifted(left)[:-1, :, None] + right[:, None, :]
        result += trips * self.hops[s]
        return result

    def _ahead(self, states: list[NDArray[np.bool_]], makespan: float) -> list[Array]:
        """The least transfers from the first stage to each state."""
        first = np.full(states[0].shape, np.inf)
        first[0] = np.where(states[0][0], 0.0, np.inf)
        found = [first]
        for s in range(1, len(states)):
            least = _shifted(found[-1])[:-1, :, None]
            steps = least + self.hops[s - 1]
            steps = np.where(least + self._between(s - 1) <= makespan, steps, np.inf)
            found.append(np.where(states[s], steps.min(1), np.inf))
        return found

    def _behind(self, states: list[NDArray[np.bool_]], makespan: float) -> list[Array]:
        """The least transfers from each state to the last stage."""
        n = self.segments.model.num_groups
        last = np.where(states[-1] & (self.ends == n), 0.0, np.inf)
        found = [last]
        for s in reversed(range(len(states) - 1)):
            steps = found[-1][:, None, :] + self.hops[s]
            steps = np.where(self._between(s) <= makespan, steps, np.inf)
            least = np.full((n + 1, self.longest), np.inf)
            least[:-1] = steps.min(2)
            lengths = np.arange(self.longest)[None, :]
            found.append(np.where(states[s], least[self.ends, lengths], np.inf))
        return found[::-1]

    def _follow(self, behind: list[Array]) -> tuple[int, ...]:
        """A chain with the least transfers."""
        stages: list[int] = []
        start = 0
        length = int(behind[0][0].argmin())
        for s in range(len(behind)):
            stages += [s] * (length + 1)
            start += length + 1
            if s + 1 < len(behind):
                steps = self.hops[s][start, length] + behind[s + 1][start]
                length = int(steps.argmin())
        return tuple(stages)


def _shifted(values: Array) -> Array:
    """[boundary, length − 1] of the interval that ends there, from [first group, length − 1]."""
    n, longest = values.shape
    found = np.full((n + 1, longest), np.inf)
    for k in range(longest):
        found[k + 1 :, k] = values[: n - k, k]
    return found


def _transfers(segments: Segments, longest: int, link: StageLimits) -> Array:
    """[boundary, length − 1 before, length − 1 after]: seconds there and back of one hop."""
    n = segments.model.num_groups
    found = np.zeros((n, longest, longest))
    for flow in segments.model.flows:
        if flow.tied:
            continue
        source, sinks = flow.sources[0], np.array(flow.sinks)
        forward, back = flow.forward_seconds(link), flow.backward_seconds(link)
        for boundary in range(source + 1, min(int(sinks.max()), source + longest) + 1):
            nearest = int(sinks[sinks >= boundary].min())
            reach = nearest - boundary  # the stage after has to be longer than this
            if reach < longest:
                found[boundary, boundary - source - 1 :, reach:] += forward + back
    return found
