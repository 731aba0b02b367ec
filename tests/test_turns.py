"""Turns of a stage: replicas that take microbatches in any order, of unlike speed."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pdcompile
from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import PlanError, ScheduleError
from pdcompile.passes.check import check
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Plan
from pdcompile.plan.times import times_of
from pdcompile.plan.validate import validate
from pdcompile.schedule.turns import ahead, horizon, in_turn, share_of
from tests.helpers.alike import CLOSE, PLANNED, close
from tests.helpers.models import batch_for, loss_for, mlp
from tests.helpers.schedules import make_plan, plans, same_clock
from tests.test_space.test_makespan import timed


def turned(draw: st.DrawFn, plan: Plan) -> Plan:
    """The plan with random turns, and with a depth of its own on stages that have them."""
    stages, depths = list(plan.stages), list(plan.training.warmup)
    if plan.num_ranks < len(stages):
        return plan
    for s, stage in enumerate(stages):
        replica = st.integers(0, stage.replicas - 1)
        turns = tuple(draw(st.lists(replica, min_size=1, max_size=5)))
        stages[s] = replace(stage, turns=turns)
        depths[s] = draw(st.integers(0, 3))
    training = replace(plan.training, warmup=tuple(depths))
    return replace(plan, stages=tuple(stages), training=training)


def on_unlike_devices(plan: Plan, speeds: list[float], *levels: Level) -> Plan:
    size = 1
    for level in levels:
        size *= level.size
    devices = tuple(Device(speed=speeds[n % len(speeds)]) for n in range(size))
    return replace(plan, cluster=Cluster(devices, levels).to_toml())


@settings(max_examples=80)
@given(st.data())
def test_the_clock_is_the_simulators_under_any_turns(data: st.DataObject) -> None:
    """And where it finds that ranks wait for ever, so does the proof."""
    plan = turned(data.draw, data.draw(timed(stream=False)))
    far = data.draw(st.sampled_from([1e9, 4.0]))
    plan = on_unlike_devices(
        plan, data.draw(st.sampled_from([[1.0], [1.0, 3.0, 2.0]])),
        Level("host", 4, 8.0, 1 / 8), Level("net", 5, far, 1 / 4),
    )  # fmt: skip
    gradients = [edge.value for edge in plan.edges if edge.gradient]
    times = times_of(plan, plan.machines, gradients)
    try:
        found = times.makespan(plan.training.warmup, plan.training.num_microbatches)
    except ValueError:
        with pytest.raises(ScheduleError):
            simulate(plan)
        return
    assert same_clock(found, plan, simulate(plan).forecast.step_seconds)


def test_the_longest_run_of_turns() -> None:
    assert [horizon(in_turn(3), most) for most in (0, 1, 4)] == [0, 3, 12]
    assert [horizon((0, 0, 0, 1), most) for most in (1, 2, 3, 4)] == [1, 2, 4, 5]
    assert list(share_of((0, 0, 1), 0, 7)) == [0, 1, 3, 4, 6]
    assert list(share_of((0, 0, 1), 1, 7)) == [2, 5]
    assert share_of(in_turn(2), 1, 7) == range(1, 7, 2)
    assert share_of((1, 1), 0, 4) == ()


def test_replicas_follow_one_order_of_the_stage() -> None:
    """With a run of 4 microbatches, the backward of i comes before the forward of i + 4."""
    turns = (0, 0, 0, 1)
    mine, other = (share_of(turns, replica, 8) for replica in (0, 1))
    assert ahead(in_turn(2), mine, 2) == ()
    assert ahead(turns, mine, 2) == (3, 4, 5, 6, 6, 6)
    assert ahead(turns, other, 2) == (1, 2)


@settings(max_examples=40)
@given(st.data())
def test_runs_that_do_not_grow_never_deadlock(data: st.DataObject) -> None:
    plan = turned(data.draw, data.draw(plans(stream=False, max_microbatches=10)))
    spec, depths, least = plan.spec, list[int](), 0
    for s in reversed(range(len(plan.stages))):
        depth = data.draw(st.integers(0, 2))
        while horizon(spec.turns(s), depth + 1) < least:
            depth += 1
        depths.insert(0, depth)
        least = horizon(spec.turns(s), depth + 1)
    if plan.num_ranks >= len(plan.stages):
        plan = replace(plan, training=replace(plan.training, warmup=tuple(depths)))
    check(plan)


@pytest.mark.parametrize(
    ("turns", "schedule", "why"),
    [((0, 2), "1f1b", "replica 2"), ((-1,), "1f1b", "turns"), ((0, 0, 1), "stash", "one microbatch of each")],
)  # fmt: skip
def test_turns_that_cannot_be(turns: tuple[int, ...], schedule: str, why: str) -> None:
    plan = make_plan(schedule, 2, 1, replicas=(2, 1))
    first = replace(plan.stages[0], turns=turns)
    with pytest.raises(PlanError, match=why) as caught:
        validate(replace(plan, stages=(first, plan.stages[1])))
    assert "stages[0].turns" in str(caught.value)
    if turns[0] == 0:
        with pytest.raises(ScheduleError, match=why):
            _ = replace(plan, stages=(first, plan.stages[1])).spec


def test_a_plan_in_turn_is_written_as_before() -> None:
    plan = make_plan("1f1b", 2, 4, replicas=(2, 1))
    plan = replace(plan, cluster=Cluster.local(3).to_toml())
    assert "turns" not in plan.to_json()
    turned = replace(plan, stages=(replace(plan.stages[0], turns=(0, 0, 1)), plan.stages[1]))
    assert Plan.from_json(turned.to_json()) == turned


TURNS = ((0, 0, 1), (1, 0, 0, 0))


def with_turns(plan: Plan, *turns: tuple[int, ...]) -> Plan:
    stages = [replace(one, turns=own) for one, own in zip(plan.stages, turns, strict=True)]
    depths = tuple(depth + 1 for depth in plan.training.warmup)
    training = replace(plan.training, warmup=depths)
    plan = replace(plan, stages=tuple(stages), training=training, forecast=None)
    times = times_of(plan, plan.machines, [e.value for e in plan.edges if e.gradient])
    seconds = times.period if training.kind.stream else times.makespan
    found = seconds([d + training.kind.stream for d in depths], training.num_microbatches)
    claimed = replace(plan.certificate, objective_seconds=found, bound_seconds=0.0)
    return replace(plan, certificate=replace(claimed, status="feasible", fastest_seconds=None))


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "gpipe", "zb-h1"])
@pytest.mark.usefixtures("one_capture_a_model")
def test_training_is_that_of_the_reference(schedule: str) -> None:
    """Means of a minibatch, whoever took its microbatches: short ones, evaluation, outputs."""
    model = mlp()
    x, y = batch_for(model, 8)
    common: dict[str, Any] = {
        "loss_fn": loss_for(model), "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "microbatches": 4, "schedule": schedule, "max_grad_norm": 0.3,
    }  # fmt: skip
    given = common | PLANNED | {"example_target": y}
    plan = pdcompile.compile(deepcopy(model), x, replicas=(2, 2), **given).plan
    expected = pdcompile.reference(deepcopy(model), **common)
    pipe = pdcompile.compile(model, x, plan=with_turns(plan, *TURNS), **given)
    assert pipe.plan.spec.patterns == TURNS
    for t, size in enumerate((8, 8, 1, 5, 8)):
        x, y = batch_for(model, size, t)
        ours, theirs = (one.step(x, target=y) for one in (pipe, expected))
        assert float(ours.loss) == pytest.approx(float(theirs.loss), abs=2e-5)
        torch.testing.assert_close(ours.outputs, theirs.outputs, **CLOSE)
    torch.testing.assert_close(pipe.predict(x), expected.predict(x), **CLOSE)
    close(pipe.full_state_dict(), expected.full_state_dict())
