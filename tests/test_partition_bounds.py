"""Lower bounds on the makespan never exceed it, on chains with everything that a chain can have."""

import random
from dataclasses import replace

import pytest

from pdcompile.passes.partition import partition
from pdcompile.passes.partition.bounds import applies, flush_bound, ramp_bound
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.dynamic_program import solve
from pdcompile.passes.partition.model import all_ideals, build
from pdcompile.passes.partition.segments import Segments
from pdcompile.problem import (
    Item,
    MemoryRule,
    PartitionProblem,
    SharedParameter,
    StageLimits,
    Traffic,
)
from tests.helpers.problems import brute_force, chain_problem, gpt_problem


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
    rule = MemoryRule(in_flight=r.choice(((), in_flight)))
    return PartitionProblem(
        items, traffic, limits, shared, memory=rule, num_microbatches=m, objective="flush"
    )


def segments_of(problem: PartitionProblem) -> Segments:
    model = build(problem)
    return Segments.build(model, all_ideals(model, 10_000) or [], complete=True)


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 3))]
)
def test_bounds_stay_below_the_optimum(block: int) -> None:
    met = improved = 0
    for seed in range(80 * block, 80 * block + 80):
        problem = random_chain(seed)
        best = brute_force(problem)
        assert best is not None
        segments = segments_of(problem)
        found = solve(segments, flush_bound(segments))
        assert found is not None
        assert found[0] <= best * (1 + 1e-9), f"seed {seed}"
        assert applies(segments)
        bound, chains = ramp_bound(segments, 0.0, best * 1.5 + 1e-9, Budget())
        assert bound <= best * (1 + 1e-9), f"seed {seed}"
        assert bound >= found[0] * (1 - 1e-4) - 1e-12, f"seed {seed}"
        assert all(len(groups) == segments.model.num_groups for groups in chains)
        met += bound >= best * (1 - 1e-4)
        improved += bound > found[0] * (1 + 1e-4)
    assert met > 10
    assert improved > 2


@pytest.mark.slow
def test_with_the_optimum_known_nothing_better_is_proved() -> None:
    """Decided at the best plan itself: either the proof, or a bound below it."""
    proved = 0
    for seed in range(120):
        problem = random_chain(1000 + seed)
        best = brute_force(problem)
        assert best is not None
        bound, _ = ramp_bound(segments_of(problem), 0.0, best, Budget())
        assert bound <= best
        proved += bound >= best * (1 - 1e-8)
    assert proved > 15


def test_where_it_applies() -> None:
    plain = chain_problem([1.0, 2.0, 3.0], 2, objective="flush", num_microbatches=4)
    assert applies(segments_of(plain))
    for other in (
        replace(plain, objective="bottleneck"),
        replace(plain, allow_empty=True),
        replace(plain, traffic=plain.traffic[:1]),
        replace(plain, stages=(StageLimits(),)),
    ):
        assert not applies(segments_of(other))


def test_a_budget_ends_it_with_a_valid_bound() -> None:
    problem = random_chain(3)
    assert ramp_bound(segments_of(problem), 0.25, 10.0, Budget(0)) == (0.25, [])


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "stages"), [(8, 12), (12, 16)])
def test_many_stages_under_flush_are_proved(layers: int, stages: int) -> None:
    """One and a half layers a stage: transfers on the way down and back decide."""
    _, certificate = partition(gpt_problem(layers, stages, "flush"))
    assert certificate.gap < 0.02
