"""Likely plans along lines, and what no plan is below: against brute force, and by example."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition.space.candidates import violations
from pdcompile.passes.partition.space.line_plans import LinePlans, shifted
from pdcompile.passes.partition.space.pipelines import PreparedProblem, timed
from pdcompile.passes.partition.space.seats import Seats
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
        problem = replace(branched(seed), allow_empty=False, max_stages=None)
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
        plans = LinePlans(PreparedProblem(problem, 1), space, cluster)
        found = plans.bound(setting, 0.0, 2 * best, never)
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


def found_of(plans: LinePlans, setting: Setting, counts: tuple[int, ...]) -> list[Candidate]:
    found: list[Candidate] = []

    def take(one: Candidate) -> bool:
        found.append(one)
        return True

    plans.offer(setting, counts, lambda: float("inf"), never, take)
    return found


def test_likely_plans_meet_the_bound_where_nothing_is_sent() -> None:
    """Twelve layers on four ranks, 64 microbatches: the bound is within 2 % of the best found."""
    prepared = layers(12, 64)
    cluster = Cluster((Device(),) * 4, (Level("link", 4, float("inf")),))
    plans = LinePlans(prepared, SearchSpace("any"), cluster)
    setting, best = Setting("1f1b", 64), float("inf")
    for menus in plans.menus():
        for counts in menus:
            for one in found_of(plans, setting, counts):
                assert not violations(prepared.problem, cluster, one)
                best = min(best, timed(prepared.problem, cluster, one)[0])
    bound = plans.bound(setting, 0.0, best, never)
    assert bound <= best <= 1.02 * bound


def test_cuts_lie_where_little_crosses_them() -> None:
    prepared = layers(250, 8)
    cluster = Cluster((Device(),) * 4, (Level("link", 4, 1e6),))
    plans = LinePlans(prepared, SearchSpace("1"), cluster)
    first = found_of(plans, Setting("1f1b", 8), (1,))[0]
    ends = np.flatnonzero(np.diff(first.stage_of)) + 1
    assert len(ends) == 3
    assert (ends % 3 == 0).all()
    moved = [np.flatnonzero(np.diff(one.stage_of)) + 1 for one in shifted(prepared, first)]
    assert len(moved) == 6  # each of three boundaries, either way
    assert all((one % 3 == 0).all() and np.abs(one - ends).sum() == 3 for one in moved)


def test_memory_makes_stages_recompute_and_tells_the_bound() -> None:
    """What would be fastest does not fit: one rank a stage, and all forwards run twice."""
    problem = chain_problem([1.0] * 8, 1, num_microbatches=8)
    items = tuple(replace(one, saved_bytes=10) for one in problem.items)
    prepared = PreparedProblem(replace(problem, items=items, objective="flush"), 1)
    link = (Level("link", 2, float("inf")),)
    plans = {}
    for limit in (None, 200):
        cluster = Cluster((Device("cpu", limit),) * 2, link)
        space = SearchSpace("1", (False, True))
        plans[limit] = LinePlans(prepared, space, cluster)
    setting = Setting("gpipe", 8, optimizer_factor=0.0)
    free, tight = (one.bound(setting, 0.0, 1e3, never) for one in plans.values())
    assert free < tight
    found = found_of(plans[200], setting, (1,))
    assert found
    assert all(option.recompute for one in found for option in one.options)
    assert min(timed(prepared.problem, plans[200].cluster, one)[0] for one in found) >= tight


def test_contradicting_constraints_are_refused() -> None:
    problem = replace(chain_problem([1.0] * 4, 2), together=((0, 1),), apart=((0, 1),))
    plans = LinePlans(PreparedProblem(problem, 1), SearchSpace("1"), Cluster.local(2))
    with pytest.raises(InfeasibleError, match="apart"):
        plans.bound(Setting("1f1b", 2), 0.0, 1.0, never)


def test_devices_are_taken_from_the_first_on_where_they_are_like_the_last() -> None:
    """A plan that leaves devices out is for the processes 0 to n - 1 where it can be."""
    alike = Cluster((Device(),) * 4, (Level("host", 2, 1e9), Level("net", 2, 1e8)))
    assert Seats(alike, (0, 1, 2, 3)).first_like_last(1) == 0
    assert Seats(alike, (0, 1, 2, 3)).first_like_last(2) == 0
    assert Seats(alike, (0, 1, 2, 3)).first_like_last(3) == 1  # the slow link is at another place
    assert Seats(alike, (0, 1, 2, 3)).first_like_last(4) == 0
    unlike = replace(alike, devices=(Device(speed=0.5),) * 2 + (Device(),) * 2)
    assert Seats(unlike, (0, 1, 2, 3)).first_like_last(2) == 2
