"""Lower bounds on the makespan of a flush schedule, as costs per stage.

Each is the length of a path through the schedule, so it holds for every assignment; their
minimax over all chains of ideals is a bound for the whole problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from pdcompile.passes.partition.dynamic_program import Cost
from pdcompile.passes.partition.loads import always_linked
from pdcompile.passes.partition.makespan import Path, Timing, critical_path, warmup_of
from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.segments import Matrix, Segments


def flush_bound(segments: Segments) -> Cost:
    """Seconds that the minibatch takes at least when a stage is J∖I.

    Always m·(F_s+W_s).  When every stage waits for its neighbours also, with S = Σ(F_i+W_i):
    Σ_{i<s}(F_i+W_i) + m·(F_s+W_s);  S + (m−1)·F_s + (m−1−w_s)·W_s, and the same with F and W
    exchanged (until the first backward a stage does w_s + 1 forwards, and at the end so many
    backwards).
    """
    model = segments.model
    m = model.problem.num_microbatches
    warmup = warmup_of(model.problem.memory.in_flight, model.num_stages, m)
    linked = always_linked(model, "forward") and always_linked(model, "backward")
    fastest = max(stage.speed for stage in model.problem.stages)
    before: Matrix = (segments.forward + segments.backward)[0] / fastest

    def cost(stage: int) -> Matrix:
        result: Matrix = m * segments.compute(stage)
        if linked:
            speed = model.problem.stages[stage].speed
            f, w = segments.forward / speed, segments.backward / speed
            rest = m - 1 - warmup[stage]
            ends = before[-1] + (m - 1) * np.maximum(f, w) + rest * np.minimum(f, w)
            # The other parts of S run at `fastest` at best; this stage's own are in before[-1].
            result = np.maximum(before[:, None] + result, ends)
        return result

    return cost


def seed_paths(model: Model) -> Iterator[Path]:
    """Paths that are likely to be critical: one stage or one link much slower than the others."""
    n, m = model.num_stages, model.problem.num_microbatches
    warmup = warmup_of(model.problem.memory.in_flight, n, m)
    hops = {(s, s + 1): 1e-3 for s in range(n - 1)}
    back = {(s + 1, s): 1e-3 for s in range(n - 1)}
    for slow in range(n):
        work = tuple(1.1 if s == slow else 1.0 for s in range(n))
        yield critical_path(Timing(work, work, hops, back), warmup, m)
    for link in hops:
        yield critical_path(Timing((1.0,) * n, (1.0,) * n, {**hops, link: 9.0}, back), warmup, m)


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
