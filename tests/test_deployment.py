"""Consequences of the replicas of a stage, and of its recomputation."""

from __future__ import annotations

import pytest

from pdcompile.cluster import Level
from pdcompile.passes.simulate import simulate
from pdcompile.plan import TiedParameter
from pdcompile.problem.deployment import StageDeployment
from pdcompile.schedule import Action
from tests.helpers.schedules import make_plan


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 6, 7])
def test_shares_are_those_of_the_pipeline(replicas: int, count: int) -> None:
    plan = make_plan("1f1b", 2, count, replicas=(1, replicas))
    spec, stage = plan.spec, plan.stages[1]
    most = max(len(spec.share(1, q, count)) for q in range(replicas))
    assert stage.deployment.share(count) == most
    assert stage.deployment.ranks == len(spec.ranks[1]) == replicas


def test_recomputation_takes_time_and_keeps_one_set() -> None:
    plain, again = StageDeployment(2), StageDeployment(2, recompute=True)
    assert (plain.forwards, plain.kept(4), plain.again(3.0)) == (1, 4, 0.0)
    assert (again.forwards, again.kept(4), again.again(3.0)) == (2, 1, 3.0)
    plan = make_plan("1f1b", 1, 3, recompute=True, seconds=[(1.0, 2.0)])
    assert simulate(plan).forecast.step_seconds == 3 * (again.forwards * 1.0 + 2.0)


@pytest.mark.parametrize("replicas", [2, 3])
def test_sums_take_a_ring(replicas: int) -> None:
    link = Level("l", 1, 8.0, 0.5)
    tied = (TiedParameter("w", (0, 1), 1),)
    plan = make_plan("1f1b", 2, 6, replicas=(1, replicas), trainable_bytes=24, tied=tied)
    found = simulate(plan, links=lambda _a, _b: link)
    sums = [one for one in found.timeline if one.action is Action.POST_REDUCE]
    deployment = plan.stages[1].deployment
    assert len(sums) == replicas
    for one in sums:
        seconds = deployment.sum_seconds(link, 24)
        assert seconds == 2 * (replicas - 1) * (24 / replicas / 8.0 + 0.5)
        assert one.end_seconds - one.start_seconds == pytest.approx(seconds)
        assert one.num_bytes == deployment.summed_bytes(24) == 2 * (replicas - 1) * 24 // replicas
