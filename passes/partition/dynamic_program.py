"""Dynamic program over chains of ideals: the best way to cut with a cost per stage.

D[s][J] = min over I ⊂ J of max(D[s−1][I], cost_s(I, J)).  Over all ideals of the graph this is
the optimum for every objective that is a maximum of per-stage costs; over some of them (prefixes
of linear orders) it is an upper bound.  PipeDream (Narayanan et al., 2019) does it for chains,
Tarnawski et al. (2020) over ideals.  `chains` lists every assignment that a bound leaves: a proof
by looking, for what is small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.budget import Budget, OutOfTimeError
from pdcompile.passes.partition.segments import Matrix, Segments

Cost = Callable[[int], Matrix]  # stage → [I, J] seconds


def solve(
    segments: Segments,
    cost: Cost,
    budget: Budget | None = None,
    stages: int | None = None,
    join: np.ufunc = np.maximum,
) -> tuple[float, tuple[int, ...]] | None:
    """(optimum, stage of each group) for min max over stages of cost; None when infeasible.

    With `Model.most_used` below the number of stages the state also counts stages in use.

    Args:
        stages: how many, where the model does not say; any may be used.
        join: of the costs of stages; `np.add`: for the least sum.

    Raises:
        OutOfTimeError: the budget ended first.
    """
    model = segments.model
    num_stages, size = stages or model.num_stages, len(segments.ideals)
    most = num_stages if stages else model.most_used
    counted = most < num_stages
    best = np.full((most + 1 if counted else 1, size), np.inf)
    best[0, 0] = 0.0
    choices: list[NDArray[np.intp]] = []
    for s in range(num_stages):
        if budget is not None and budget.late:
            raise OutOfTimeError
        seconds = _within(segments, cost, s, num_stages)
        if counted:
            empty = join(best, seconds.diagonal())
            np.fill_diagonal(seconds, np.inf)
        choice = np.empty(best.shape, dtype=np.intp)
        found = np.full(best.shape, np.inf)
        for c in range(int(counted), len(best)):
            through = join(best[c - counted][:, None], seconds)
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
    found_at = np.zeros(model.num_groups, dtype=int)
    for s in reversed(range(num_stages)):
        before = int(choices[s][count, ideal])
        found_at[segments.inside[ideal] & ~segments.inside[before]] = s
        count -= int(counted and before != ideal)
        ideal = before
    return value, tuple(found_at.tolist())


def evenest(segments: Segments, loads: Sequence[Matrix]) -> tuple[float, tuple[int, ...]] | None:
    """The same for loads of so many stages; of cuts whose largest load is least the one in which
    the squares of all are."""
    found = solve(segments, loads.__getitem__, stages=len(loads))
    if found is None:
        return None
    most = found[0] * (1 + 1e-12)
    squares = [np.where(load <= most, load / max(most, 1e-300), np.inf) ** 2 for load in loads]
    even = solve(segments, squares.__getitem__, stages=len(loads), join=np.add)
    return found if even is None else (found[0], even[1])


def _within(segments: Segments, cost: Cost, stage: int, num_stages: int) -> Matrix:
    """The costs of one of so many stages, infinite where it may not be."""
    known = num_stages == segments.model.num_stages
    return np.where(segments.allowed(stage) if known else segments.nested, cost(stage), np.inf)


def flush_costs(segments: Segments, shares: NDArray[np.float64] | None = None) -> Iterator[Cost]:
    """Costs whose minimax is a good start for the makespan (not bounds: see `bounds`).

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


def chains(
    segments: Segments, cost: Cost, below: Callable[[], float], stages: int | None = None
) -> Iterator[tuple[int, ...]]:
    """Stages of each group, for all chains of ideals whose largest stage cost is < below().

    `below` is asked again before every step, so that the best found so far prunes the rest;
    `stages` as for `solve`.
    """
    num_stages = stages or segments.model.num_stages
    most = stages or segments.model.most_used
    costs = [_within(segments, cost, s, num_stages) for s in range(num_stages)]
    size = len(segments.ideals)
    to_go = np.full(size, np.inf)
    to_go[-1] = 0.0
    through: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = []
    for seconds in reversed(costs):
        through.insert(0, np.maximum(seconds, to_go[None, :]))
        to_go = through[0].min(1)
    stack: list[tuple[int, ...]] = [(0,)]
    while stack:
        chain = stack.pop()
        s = len(chain) - 1
        if s == num_stages:
            yield _stages(segments, chain)
            continue
        row = through[s][chain[-1]]
        order = np.argsort(-row, kind="stable")  # the cheapest is popped first
        used = len(set(chain)) - 1
        stack += [
            (*chain, int(j)) for j in order if row[j] < below() and used + (j != chain[-1]) <= most
        ]


def _stages(segments: Segments, chain: tuple[int, ...]) -> tuple[int, ...]:
    inside = segments.inside[list(chain)]
    first: np.ndarray[tuple[int, ...], np.dtype[np.intp]] = inside.argmax(0)
    return tuple(int(s) - 1 for s in first)
