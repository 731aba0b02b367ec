"""Likely chains: the least of all chains by their own measure, and cuts that hops decide."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from pdcompile.passes.partition import partition
from pdcompile.passes.partition.model import build, positions
from pdcompile.passes.partition.round_trips import CLOSE, Trips, likely_groups
from pdcompile.passes.partition.segments import Segments
from pdcompile.plan.evaluate import Deployment
from pdcompile.problem import Item, PartitionProblem, StageLimits, Traffic
from pdcompile.schedule.registry import kind_of
from tests.helpers.problems import brute_force, measure

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "2bw")


def hops_problem(seed: int, schedule: str, num_stages: int, n: int) -> PartitionProblem:
    """Items in a row with messages of unlike sizes, some as long as a stage, and some skips."""
    r = random.Random(seed)
    items = [Item(f"i{j}", (f"i{j}",), r.random(), 2 * r.random()) for j in range(n)]
    traffic = []
    for j in range(n - 1):
        size, skips = r.choice((1, 10, 30, 100)), r.random() < 0.2 and j + 2 < n
        traffic.append(Traffic(f"i{j}", j, (j + 1, j + 2) if skips else (j + 1,), size, size))
    m, kind = r.choice((4, 8, 16)), kind_of(schedule)
    depth = [num_stages - s + kind.stream * (num_stages - s - 1) for s in range(num_stages)]
    return PartitionProblem(
        tuple(items), tuple(traffic), (StageLimits(bytes_per_second=50.0),) * num_stages,
        schedule=schedule, num_microbatches=m, objective=kind.objective,
        in_flight=(m,) * num_stages if kind.warmup == "all" else tuple(depth),
    )  # fmt: skip


def least_seconds(segments: Segments, ends: tuple[int, ...]) -> float:
    """Seconds of the objective that stages which end at these ideals need: of each stage, and λ of
    every run of them, summed up as the definition says."""
    problem = segments.model.problem
    m, kind = problem.num_microbatches, kind_of(problem.schedule)
    trips = Trips(segments, kind, not kind.stream, m, 1.0)
    depths = problem.in_flight if kind.stream else [min(d, m) for d in problem.in_flight]
    turns = [
        trips.turn(segments.stages[s], d - 1, d - after)
        for s, (d, after) in enumerate(itertools.pairwise((*depths, depths[-1] - 1)))
    ]
    chain = list(itertools.pairwise((0, *ends)))
    worst = max(turn.step[pair] for turn, pair in zip(turns, chain, strict=True))
    once, more = trips.per_microbatch(0.0), trips.per_microbatch(1.0)
    for s in range(len(turns)):
        seconds, passed = 0.0, 0
        for t in range(s, len(turns)):
            seconds += turns[t].busy[chain[t]]
            passed += turns[t].fewer if t > s else 1
            passing = 1 + depths[s] - depths[t]
            worst = max(worst, (seconds / passing - once) / (more - once))
            if not turns[t].waits:
                break
            seconds += np.broadcast_to(turns[t].messages, turns[t].step.shape)[chain[t]]
    return float(worst)


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_chain_is_better_by_the_same_measure(schedule: str, seed: int) -> None:
    """The dynamic program against all chains of positions."""
    problem = hops_problem(seed, schedule, num_stages=3 + seed % 2, n=9)
    model = build(problem)
    segments = Segments(model, positions(model))
    size, count = len(segments.ideals), len(problem.stages)
    inner = itertools.combinations(range(1, size - 1), count - 1)
    best = min(least_seconds(segments, (*ends, size - 1)) for ends in inner)
    groups = likely_groups(segments, Deployment.straight(problem))
    assert groups is not None
    ends = tuple(np.cumsum([groups.count(s) for s in range(count)]).tolist())
    assert least_seconds(segments, ends) <= best * (1 + 2 * CLOSE)


def narrow_places(n: int = 12) -> PartitionProblem:
    """Equal items, between which much is sent but after each third, over slow links."""
    items = tuple(Item(f"i{j}", (f"i{j}",), 1.0 + j % 2, 2.0) for j in range(n))
    sizes = [2 if j % 3 == 2 else 400 for j in range(n - 1)]
    traffic = tuple(Traffic(f"i{j}", j, (j + 1,), size, size) for j, size in enumerate(sizes))
    stages = (StageLimits(bytes_per_second=100.0),) * 4
    return PartitionProblem(
        items, traffic, stages, in_flight=(4, 3, 2, 1), num_microbatches=12, objective="flush"
    )


def test_hops_decide() -> None:
    """Cuts of even loads send 4 s there and 4 s back; the likely chain is the optimum at once."""
    problem = narrow_places()
    model = build(problem)
    segments = Segments(model, positions(model))
    groups = likely_groups(segments, Deployment.straight(problem))
    assert groups is not None
    stage_of = model.items_of(groups)
    assert [stage_of.count(s) for s in range(4)] == [3, 3, 3, 3]
    wide = replace(
        problem,
        traffic=tuple(replace(t, forward_bytes=400, backward_bytes=400) for t in problem.traffic),
    )
    assert measure(problem, stage_of).objective < 0.7 * measure(wide, stage_of).objective
    found, certificate = partition(problem)
    assert found.objective == measure(problem, stage_of).objective
    assert certificate.status == "optimal"


def test_what_does_not_fit_has_no_chain() -> None:
    problem = narrow_places()
    heavy = tuple(replace(item, parameter_bytes=10, trainable_bytes=10) for item in problem.items)
    stages = tuple(replace(stage, memory_bytes=5) for stage in problem.stages)
    problem = replace(problem, items=heavy, stages=stages)
    model = build(problem)
    segments = Segments(model, positions(model))
    assert likely_groups(segments, Deployment.straight(problem)) is None


def test_small_problems_are_solved_as_before() -> None:
    """A random problem with hops, against all cuts."""
    problem = hops_problem(3, "1f1b", num_stages=3, n=7)
    found, _ = partition(problem)
    assert found.objective == pytest.approx(brute_force(problem), rel=1e-9)
