"""Bounds of the search on memory, against the formula of an assignment."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.search import solve
from pdcompile.problem import PartitionProblem
from tests.helpers.problems import brute_force, holding, measure
from tests.test_path_bound import blocks, branched, ratios


def tight(seed: int) -> PartitionProblem:
    """Branches beside a chain with everything that takes memory; limits that some cuts keep."""
    r = random.Random(seed)
    problem = blocks(seed) if r.random() < 0.4 else branched(seed)
    items = []
    for item in problem.items:
        size = r.choice((0, 0, r.randint(0, 9)))
        trained = size if r.random() < 0.8 else r.randint(0, size)
        items.append(
            replace(item, parameter_bytes=size, trainable_bytes=trained,
                    workspace_bytes=r.choice((0, r.randint(0, 20))))
        )  # fmt: skip
    count, m = len(problem.stages), problem.num_microbatches
    in_flight = tuple(min(m, count - s) for s in range(count))
    own, versions = problem.in_flight or in_flight, r.choice((1, 2))
    held = holding(own, versions=versions, received=tuple(n + 1 for n in in_flight),
                   returned=(2,) * (count - 1) + (1,))  # fmt: skip
    problem = replace(problem, items=tuple(items), in_flight=own, holdings=held)
    least = sorted(max(measure(problem, one).memory_bytes) for one in some(problem, r, 20))
    limit = least[len(least) // 3]
    limits = tuple(replace(one, memory_bytes=limit) for one in problem.stages)
    return replace(problem, stages=limits)


def some(problem: PartitionProblem, r: random.Random, count: int) -> Iterator[tuple[int, ...]]:
    """Assignments that keep the order of items, most with something on every stage."""
    last, n = len(problem.stages) - 1, len(problem.items)
    for _ in range(count):
        stages = sorted(r.randint(0, last) for _ in range(n))
        if n > last and r.random() < 0.8:
            cuts = sorted(r.sample(range(1, n), last))
            stages = [sum(i >= cut for cut in cuts) for i in range(n)]
        for t in problem.traffic:  # some leave the row, as far as their readers let them
            stages[t.producer] = r.randint(
                max((stages[a.producer] for a in problem.traffic if t.producer in a.consumers),
                    default=0),
                min(stages[c] for c in t.consumers),
            )  # fmt: skip
        yield tuple(stages)


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 12))]
)
def test_bounds_stay_below_the_optimum_under_memory_limits(block: int, fast: bool) -> None:
    count = 12 if fast else 60
    found = ratios(tight(seed) for seed in range(60 * block, 60 * block + count))
    assert len(found) > count // 3
    assert sum(ratio > 0.7 for ratio in found) > count // 12


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(30))
def test_searches_under_memory_limits_end_between_bound_and_optimum(seed: int) -> None:
    problem = tight(1000 + seed)
    best = brute_force(problem)
    if best is None:
        return
    with Budget(20) as budget:
        search = solve(problem, budget)
    assert search.upper == pytest.approx(best, rel=1e-6)
    assert search.bound <= best * (1 + 1e-9)
