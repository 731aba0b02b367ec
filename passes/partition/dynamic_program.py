"""Dynamic program over chains of ideals: the best way to cut with a cost per stage.

D[s][J] = min over I ⊂ J of max(D[s−1][I], cost_s(I, J)).  Over all ideals of the graph this is
the optimum for every objective that is a maximum of per-stage costs; over some of them (prefixes
of linear orders) it is an upper bound.  PipeDream (Narayanan et al., 2019) does it for chains,
Tarnawski et al. (2020) over ideals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.segments import Matrix, Segments

Cost = Callable[[int], Matrix]  # stage → [I, J] seconds


class OutOfTimeError(Exception):
    """The budget ended before the dynamic program."""


def solve(
    segments: Segments, cost: Cost, budget: Budget | None = None
) -> tuple[float, tuple[int, ...]] | None:
    """(optimum, stage of each group) for min max over stages of cost; None when infeasible.

    With `Model.most_used` below the number of stages the state also counts stages in use.

    Raises:
        OutOfTimeError: the budget ended first.
    """
    model = segments.model
    num_stages, size = model.num_stages, len(segments.ideals)
    most = model.most_used
    counted = most < num_stages
    best = np.full((most + 1 if counted else 1, size), np.inf)
    best[0, 0] = 0.0
    choices: list[NDArray[np.intp]] = []
    for s in range(num_stages):
        if budget is not None and budget.late:
            raise OutOfTimeError
        seconds = np.where(segments.allowed(s), cost(s), np.inf)
        if counted:
            empty = np.maximum(best, seconds.diagonal())
            np.fill_diagonal(seconds, np.inf)
        choice = np.empty(best.shape, dtype=np.intp)
        found = np.full(best.shape, np.inf)
        for c in range(int(counted), len(best)):
            through = np.maximum(best[c - counted][:, None], seconds)
            choice[c] = through.argmin(0)
            found[c] = through.min(0)
        if counted:
            stays = empty <= found
            choice = np.where(stays, np.arange(size), choice)
            found = np.minimum(found, empty)
        choices.append(choice)
        best = found
    count = int(best[:, -1].argmin())
    value = float(best[count, -1])
    if not np.isfinite(value):
        return None
    ideal = size - 1
    stages = np.zeros(model.num_groups, dtype=int)
    for s in reversed(range(num_stages)):
        before = int(choices[s][count, ideal])
        stages[segments.inside[ideal] & ~segments.inside[before]] = s
        count -= int(counted and before != ideal)
        ideal = before
    return value, tuple(int(s) for s in stages)


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
