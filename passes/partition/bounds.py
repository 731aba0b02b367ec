"""Lower bounds on the makespan of a flush schedule, as costs per stage.

Each is the length of a path through the schedule, so it holds for every assignment, and their
minimax over all chains of ideals is a bound for the whole problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.chains import Cost
from pdcompile.passes.partition.model import Model, always_linked
from pdcompile.passes.partition.segments import Matrix, Segments
from pdcompile.plan.makespan import warmup_of
from pdcompile.schedule.registry import kind_of

Vector = NDArray[np.float64]


def bounding_cost(segments: Segments) -> Cost:
    """Seconds of the objective when a stage is J∖I, at least: without a flush its load.

    With one always m·(F_s+W_s).  When every stage waits for its neighbours also these paths, where
    D is the way of one microbatch down to stage s and back up from it (work and transfers before
    the stage), T the same of what comes after it, and S = D + F_s + W_s + T:

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
    if model.problem.objective == "bottleneck":
        return segments.load_of
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
        own = segments.compute(segments.stages[stage])
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

    F and W of the stage, T in `after`, at most `depth` in flight: the three paths of
    `bounding_cost` without D.
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


def flush_costs(segments: Segments, shares: NDArray[np.float64] | None = None) -> Iterator[Cost]:
    """Costs whose minimax is a good start for the makespan (not bounds: those are above).

    The load by the share of all work that each stage is to have, where these are given; and m times
    the load, plus what runs before a stage's first microbatch and after its last.
    """
    model = segments.model
    m = model.problem.num_microbatches
    before: Matrix = (segments.forward + segments.backward)[0]
    shorter: Matrix = np.minimum(segments.forward, segments.backward)

    def shared(stage: int) -> Matrix:
        assert shares is not None
        result: Matrix = segments.load_of(stage) / max(float(shares[stage]), 1e-9)
        return result

    def whole(stage: int) -> Matrix:
        depth = max(0, min(model.in_flight(stage), m) - 1)
        ramp = before[:, None] + m * segments.load_of(stage)
        own = segments.compute(segments.stages[stage])
        result: Matrix = np.maximum(ramp, before[-1] + (m - 1) * own - depth * shorter)
        return result

    if shares is not None:
        yield shared
    yield whole
