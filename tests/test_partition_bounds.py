"""Lower bounds on the makespan never exceed it, on chains with everything that a chain can have."""

import random

import pytest

from pdcompile.passes.partition import partition
from pdcompile.passes.partition.bounds import bounding_cost
from pdcompile.passes.partition.chains import solve
from pdcompile.passes.partition.model import all_ideals, build
from pdcompile.passes.partition.segments import Segments
from pdcompile.passes.partition.space.straight import straight_bound
from pdcompile.problem import (
    Item,
    PartitionProblem,
    SharedParameter,
    StageLimits,
    Traffic,
)
from tests.helpers.problems import brute_force, gpt_problem, holding


def random_chain(seed: int) -> PartitionProblem:
    """Every item sends to the next one and perhaps further; flush schedule, no empty stage."""
    r = random.Random(seed)
    n = r.randint(2, 6)
    stages = r.randint(2, min(4, n))
    items = tuple(
        Item(f"i{i}", (f"i{i}",), r.choice((0.0, 1.0, r.random())), r.choice((0.0, 2 * r.random())))
        for i in range(n)
    )
    traffic = tuple(
        Traffic(
            f"i{i}", i, (i + 1, *(j for j in range(i + 2, n) if r.random() < 0.3)),
            r.randint(0, 5), r.randint(1, 5),
        )
        for i in range(n - 1)
    )  # fmt: skip
    m = r.randint(1, 7)
    depth = r.choice((1, 2)) if r.random() < 0.8 else m
    in_flight = tuple(min(m, depth * (stages - s - 1) + 1) for s in range(stages))
    users = tuple(sorted(r.sample(range(n), 2)))
    shared = (SharedParameter("w", r.randint(1, 9), True, users),) if r.random() < 0.5 else ()
    rate = r.choice((1.0, 5.0, 50.0))
    alike = r.random() < 0.5
    limits = tuple(
        StageLimits(
            speed=r.choice((1.0, 1.0, 2.0)),
            bytes_per_second=rate if alike else r.choice((1.0, 5.0, 50.0)),
            full_duplex=r.random() < 0.8,
            latency_seconds=r.choice((0.0, 0.2)),
        )
        for _ in range(stages)
    )
    in_flight = r.choice(((), in_flight))
    return PartitionProblem(
        items, traffic, limits, shared, in_flight=in_flight, holdings=holding(in_flight),
        num_microbatches=m, objective="flush",
    )  # fmt: skip


def segments_of(problem: PartitionProblem) -> Segments:
    model = build(problem)
    return Segments(model, all_ideals(model, 10_000) or [], complete=True)


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 3))]
)
def test_bounds_stay_below_the_optimum(block: int) -> None:
    met = 0
    for seed in range(80 * block, 80 * block + 80):
        problem = random_chain(seed)
        best = brute_force(problem)
        assert best is not None
        segments = segments_of(problem)
        found = solve(segments, bounding_cost(segments))
        assert found is not None
        assert found[0] <= best * (1 + 1e-9), f"seed {seed}"
        bound = straight_bound(segments.model, 0.0, best * 1.5 + 1e-9, lambda: False)
        assert bound <= best * (1 + 1e-9), f"seed {seed}"
        met += max(bound, found[0]) >= best * (1 - 1e-4)
    assert met > 5


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "stages"), [(8, 12), (12, 16)])
def test_many_stages_under_flush_are_proved(layers: int, stages: int) -> None:
    """One and a half layers a stage: transfers on the way down and back decide."""
    _, certificate = partition(gpt_problem(layers, stages, "flush"))
    assert certificate.gap < 0.02
