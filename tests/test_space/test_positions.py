"""Plans cut at positions, and what no plan is below: against brute force, and by example."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition.space.candidates import violations
from pdcompile.passes.partition.space.pipelines import Part, Pipelines, PreparedProblem, timed
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.passes.partition.space.setting_bound import setting_bound
from pdcompile.problem import PartitionProblem
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from tests.helpers.problems import chain_problem
from tests.helpers.spaces import brute_force, harsh_case, random_case
from tests.test_path_bound import branched


def never() -> bool:
    return False


def case_of(seed: int) -> tuple[PartitionProblem, Cluster, SearchSpace, Setting]:
    """Small problems with branches beside a chain, every second one with links that cost little."""
    r = random.Random(seed)
    problem, cluster, space, setting = (harsh_case if seed % 4 == 3 else random_case)(seed)
    if seed % 3:
        problem = branched(seed)
    problem = replace(problem, num_microbatches=setting.num_microbatches)
    if seed % 2:
        levels = (replace(one, bytes_per_second=1e4, latency_seconds=0.0) for one in cluster.levels)
        cluster = replace(cluster, levels=tuple(levels))
    if setting.schedule == "vsync" or seed % 7 == 0:
        setting = replace(setting, schedule=r.choice(("zb-h1", "gpipe")), extra_warmup=0)
    return problem, cluster, space, setting


def least(case: tuple[PartitionProblem, Cluster, SearchSpace, Setting]) -> float | None:
    """The least seconds of all plans, on any number of ranks."""
    problem, cluster, space, setting = case
    ranks, found = range(len(cluster.devices)), []
    for used in range(1, len(ranks) + 1):
        counts = tuple(range(1, used + 1))
        seconds = brute_force(
            problem, cluster, space, setting, tuple(ranks[:used]), counts, simulated=False
        )
        found += [] if seconds is None else [seconds]
    return min(found, default=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 12))]
)
def test_no_plan_is_below_the_bound(block: int) -> None:
    ratios = []
    for seed in range(20 * block, 20 * block + 20):
        case = case_of(seed)
        best = least(case)
        if not best:
            continue
        problem, cluster, space, setting = case
        prepared = PreparedProblem(problem, 1)
        found = setting_bound(Part.whole(prepared, space, setting, cluster), (0.0, 2 * best), never)
        assert found <= best * (1 + 1e-9), seed
        ratios.append(found / best)
    assert len(ratios) > 10
    assert max(ratios) > 0.6


def layers(count: int, num_microbatches: int) -> PreparedProblem:
    """Equal layers of three ops each, of which the last one sends a tenth of what others do."""
    problem = chain_problem([1.0] * (3 * count), 1, num_microbatches=num_microbatches)
    traffic = tuple(
        replace(one, forward_bytes=10 if one.producer % 3 == 2 else 100, backward_bytes=10)
        for one in problem.traffic
    )
    return PreparedProblem(replace(problem, traffic=traffic, objective="flush"), 1)


def cuts(
    prepared: PreparedProblem,
    space: SearchSpace,
    setting: Setting,
    cluster: Cluster,
    counts: tuple[int, ...],
) -> list[Candidate]:
    """The first cut at positions by bound, and by load."""
    seats, found = Seats(cluster, tuple(range(len(cluster.devices)))), []
    for likely in (False, True):
        part = Part(prepared, space, setting, seats, counts, space.stages)
        pipelines = Pipelines(part, segments=prepared.positions, likely=likely)
        if pipelines.bound() < float("inf"):
            first = next(pipelines.candidates(lambda: float("inf")))[1]
            found += [] if first is None else [first]
    return found


def test_plans_at_positions_meet_the_bound_where_nothing_is_sent() -> None:
    """Twelve layers on four ranks, 64 microbatches: the bound is within 2 % of the best found."""
    prepared, space = layers(12, 64), SearchSpace("any")
    cluster = Cluster((Device(),) * 4, (Level("link", 4, float("inf")),))
    setting, best = Setting("1f1b", 64), float("inf")
    for counts in ((1,), (2,), (4,), (1, 2, 3, 4)):
        for one in cuts(prepared, space, setting, cluster, counts):
            assert not violations(prepared.problem, cluster, one)
            best = min(best, timed(prepared.problem, cluster, one)[0])
    bound = setting_bound(Part.whole(prepared, space, setting, cluster), (0.0, best), never)
    assert bound <= best <= 1.02 * bound


def test_positions_lie_where_little_crosses_them() -> None:
    cluster = Cluster((Device(),) * 4, (Level("link", 4, 1e6),))
    first = cuts(layers(250, 8), SearchSpace("1"), Setting("1f1b", 8), cluster, (1,))[0]
    ends = np.flatnonzero(np.diff(first.stage_of)) + 1
    assert len(ends) == 3
    assert (ends % 3 == 0).all()


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_so_many_stages_as_are_asked_for_all_hold_something(stages: int) -> None:
    """Also where the last ones could take everything in the time that there is."""
    problem = chain_problem([8.0] + [0.1] * 300, 1, num_microbatches=8)
    prepared = PreparedProblem(replace(problem, objective="flush"), 1)
    space = SearchSpace("any", stages=stages)
    cluster = Cluster((Device(),) * 6, (Level("link", 6, 1e9),))
    for one in cuts(prepared, space, Setting("zb-h1", 8), cluster, (1, 2, 3, 4, 5, 6)):
        assert set(one.stage_of) == set(range(stages))
        assert sum(option.replicas for option in one.options) == 6


def test_memory_makes_stages_recompute_and_tells_the_bound() -> None:
    """The fastest plan does not fit: one rank a stage, and all forwards run twice."""
    problem = chain_problem([1.0] * 8, 1, num_microbatches=8)
    items = tuple(replace(one, saved_bytes=10) for one in problem.items)
    prepared = PreparedProblem(replace(problem, items=items, objective="flush"), 1)
    link, space = (Level("link", 2, float("inf")),), SearchSpace("1", (False, True))
    setting, bounds = Setting("gpipe", 8, optimizer_factor=0.0), []
    for limit in (None, 200):
        cluster = Cluster((Device("cpu", limit),) * 2, link)
        bounds.append(
            setting_bound(Part.whole(prepared, space, setting, cluster), (0.0, 1e3), never)
        )
    assert bounds[0] < bounds[1]
    found = cuts(prepared, space, setting, cluster, (1,))
    assert found
    assert all(option.recompute for one in found for option in one.options)
    assert min(timed(prepared.problem, cluster, one)[0] for one in found) >= bounds[1]


def test_contradicting_constraints_are_refused() -> None:
    problem = replace(chain_problem([1.0] * 4, 2), together=((0, 1),), apart=((0, 1),))
    prepared, setting = PreparedProblem(problem, 1), Setting("1f1b", 2)
    part = Part.whole(prepared, SearchSpace("1"), setting, Cluster.local(2))
    with pytest.raises(InfeasibleError, match="apart"):
        setting_bound(part, (0.0, 1.0), never)
