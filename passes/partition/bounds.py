"""Bounds of a problem that need no search, and the cost of a stage for the dynamic program."""

from __future__ import annotations

import math

from pdcompile.passes.partition.chains import Cost
from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.segments import Segments


def bounding_cost(segments: Segments) -> Cost:
    """Seconds of the objective when a stage is J∖I, at least: its load, or all of its work."""
    problem = segments.model.problem
    if problem.objective == "bottleneck":
        return lambda stage: segments.load(segments.stages[stage])
    return lambda stage: problem.num_microbatches * segments.compute(segments.stages[stage])


def trips_in_turn(m: int, depth: int) -> set[tuple[int, int]]:
    """(trips that follow each other with `depth` in flight, microbatches that go by besides): the
    fewest and the most trips, if there are two."""
    most = -(-m // depth)
    return {(trips, m - 1 - (trips - 1) * depth) for trips in (2, most) if most > 1}


def simple_bound(model: Model) -> float:
    """Seconds per microbatch: all work on all stages at full speed, and the largest group."""
    stages = model.problem.stages
    work = [f + w for f, w in zip(model.forward, model.backward, strict=True)]
    spread = math.fsum(work) / math.fsum(stage.speed for stage in stages)
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
