"""Plans of ranks that hold several stages in turn, against all cuts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import ConfigError, InfeasibleError
from pdcompile.passes.check import check as check_schedule
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.partition.space.candidates import evaluation, violations
from pdcompile.passes.planning.plan_check import check_plan
from pdcompile.passes.schedules import warmup
from pdcompile.passes.simulate import simulate
from pdcompile.problem import StageLimits
from pdcompile.problem.constraints import Pin, Together
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from pdcompile.schedule.registry import kind_of
from tests.helpers.graphs import chain, residual
from tests.helpers.whole_space import at
from tests.test_space.test_branch_and_bound import cluster_of, explored


def in_turn(schedule: str, stages: int, per_rank: int, m: int = 4) -> SearchSpace:
    placement = kind_of(schedule).placement(stages, stages // per_rank)
    return SearchSpace(
        schedules=(schedule,), microbatches=(m,), stages=stages, in_order=True, placement=placement
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["interleaved", "gpipe"])
@pytest.mark.parametrize(("make", "rate"), [(chain, 1e6), (chain, 1e2), (residual, 1e6)])
@pytest.mark.parametrize("speeds", [(1.0, 1.0), (2.0, 1.0)])
def test_no_cut_beats_the_bound_and_few_the_plan(
    make: Any, rate: float, speeds: tuple[float, float], schedule: str
) -> None:
    graph = make(3)
    cluster = cluster_of(*(Device(speed=speed) for speed in speeds), rate=rate)
    plan = explored(graph, cluster, in_turn(schedule, 4, 2))
    check_plan(plan, at(graph)(4), cluster)
    check_schedule(plan)
    problem = coarsen(at(graph)(4), (StageLimits(),) * 4, num_microbatches=4)
    depths = warmup(schedule, 4, 4, placement=(0, 1, 0, 1))
    every = []
    for cut in itertools.combinations_with_replacement(range(4), len(problem.items)):
        one = Candidate(
            Setting(schedule, 4), cut, (StageDeployment(),) * 4, ((0,), (1,), (0,), (1,)), depths
        )
        if not violations(problem, cluster, one):
            every.append(evaluation(problem, cluster, one).seconds)
    found = plan.certificate
    assert found.bound_seconds <= min(every)
    assert found.objective_seconds <= 1.05 * min(every)
    assert found.objective_seconds == pytest.approx(simulate(plan).forecast.step_seconds, rel=1e-6)


def test_wishes_hold() -> None:
    graph, cluster = chain(8), cluster_of(Device(), Device())
    wishes = (Pin("linear_3", 0), Together("linear_5", "linear_6"))
    plan = explored(graph, cluster, in_turn("interleaved", 4, 2), constraints=wishes)
    stage_of = {op: stage.index for stage in plan.stages for op in stage.ops}
    assert stage_of["linear_3"] == 0
    assert stage_of["linear_5"] == stage_of["linear_6"]


def test_what_cannot_be_cut_says_so() -> None:
    cluster = cluster_of(Device(), Device())
    with pytest.raises(InfeasibleError, match="cannot be cut into 40 stages"):
        explored(chain(2), cluster, in_turn("interleaved", 40, 20))


@pytest.mark.parametrize("again", [(False,), (False, True)])
def test_remedies_name_only_what_was_not_given(again: tuple[bool, ...]) -> None:
    """No rank has enough of the weights alone for these, and together they have."""
    held = sum(one.bytes for one in chain(8).tensors.values())
    cluster = cluster_of(*(Device("cpu", int(2.05 * held)),) * 2)
    space = replace(in_turn("interleaved", 4, 2), recompute=again)
    with pytest.raises(InfeasibleError) as caught:
        explored(chain(8), cluster, space)
    assert ("--recompute auto" in str(caught.value)) == (True not in again)
    assert "a schedule with one stage a rank" in str(caught.value)


def test_spaces_that_there_are_not() -> None:
    for schedule, stages, placement in (
        ("1f1b", 4, (0, 1, 0, 1)),
        ("interleaved", 4, (0, 2, 0, 2)),
        ("interleaved", 4, (0, 1)),
    ):
        with pytest.raises(ConfigError, match=r"placement=.* is not a choice"):
            SearchSpace(schedules=(schedule,), stages=stages, in_order=True, placement=placement)


def test_a_half_duplex_link_is_timed_too() -> None:
    cluster = Cluster((Device(),) * 2, (Level("slow", 2, 1e3, 1e-3, full_duplex=False),))
    plan = explored(chain(3), cluster, in_turn("interleaved", 4, 2))
    check_plan(plan, at(chain(3))(4), cluster)
