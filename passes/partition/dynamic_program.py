"""Dynamic program over chains of ideals: the best way to cut with a cost per stage.

D[s][J] = min over I ⊂ J of max(D[s−1][I], cost_s(I, J)).  Over all ideals of the graph this is
the optimum for every objective that is a maximum of per-stage costs; over some of them (prefixes
of linear orders) it is an upper bound.  PipeDream (Narayanan et al., 2019) does it for chains,
Tarnawski et al. (2020) over ideals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pdcompile.passes.partition.segments import Matrix, Segments

Cost = Callable[[int], Matrix]  # stage → [I, J] seconds


def solve(segments: Segments, cost: Cost) -> tuple[float, tuple[int, ...]] | None:
    """(optimum, stage of each group) for min max over stages of cost; None when infeasible."""
    num_stages = segments.model.num_stages
    best = np.full(len(segments.ideals), np.inf)
    best[0] = 0.0
    choices = []
    for s in range(num_stages):
        seconds = np.where(segments.allowed(s), cost(s), np.inf)
        through = np.maximum(best[:, None], seconds)
        choices.append(through.argmin(0))
        best = through.min(0)
    if not np.isfinite(best[-1]):
        return None
    ideal = len(segments.ideals) - 1
    stages = np.zeros(segments.model.num_groups, dtype=int)
    for s in reversed(range(num_stages)):
        before = int(choices[s][ideal])
        stages[segments.inside[ideal] & ~segments.inside[before]] = s
        ideal = before
    return float(best[-1]), tuple(int(s) for s in stages)


def flush_costs(segments: Segments) -> Iterator[Cost]:
    """Costs whose minimax is a good start for the makespan (not bounds: see `bounds`).

    m times the load, plus what runs before a stage's first microbatch and after its last.
    """
    model = segments.model
    m = model.problem.num_microbatches
    before: Matrix = (segments.forward + segments.backward)[0]
    shorter: Matrix = np.minimum(segments.forward, segments.backward)

    def ramp(stage: int) -> Matrix:
        result: Matrix = before[:, None] + m * segments.load(stage)
        return result

    def drain(stage: int) -> Matrix:
        depth = max(0, min(model.in_flight(stage), m) - 1)
        result: Matrix = before[-1] + (m - 1) * segments.compute(stage) - depth * shorter
        return result

    def both(stage: int) -> Matrix:
        result: Matrix = np.maximum(ramp(stage), drain(stage))
        return result

    def serial(stage: int) -> Matrix:
        shorter_engine = np.minimum(segments.compute(stage), segments.transfer(stage))
        result: Matrix = ramp(stage) + m * shorter_engine
        return result

    yield both
    yield segments.load
    yield serial


def memory_cost(segments: Segments) -> Cost:
    """Memory as a share of the stage's limit: the minimax says by how much it falls short."""

    def share(stage: int) -> Matrix:
        limit = segments.model.problem.stages[stage].memory_bytes
        needed = segments.memory(stage)
        result: Matrix = needed * 0.0 if limit is None else needed / max(limit, 1)
        return result

    return share
