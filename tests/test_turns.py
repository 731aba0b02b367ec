"""Turns of a stage: replicas that take microbatches in any order, of unlike speed."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pdcompile
from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import PlanError, ScheduleError
from pdcompile.passes.check import check
from pdcompile.passes.partition.alternatives import seconds_of
from pdcompile.passes.planning.by_speed import by_speed
from pdcompile.passes.planning.explain import explain
from pdcompile.passes.planning.solved_problem import placed
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Plan, TiedParameter
from pdcompile.plan.times import times_of
from pdcompile.plan.validate import validate
from pdcompile.report.plan_table import explain as explain_text
from pdcompile.schedule.spec import PipelineSpec
from pdcompile.schedule.turns import ahead, horizon, in_turn, share_of
from tests.helpers.alike import CLOSE, COMMON, PLANNED, close
from tests.helpers.launch import processes
from tests.helpers.models import batch_for, gpt, loss_for, mlp
from tests.helpers.schedules import make_plan, plans, same_clock
from tests.test_space.test_makespan import timed


def turned(draw: st.DrawFn, plan: Plan, most: int = 5) -> Plan:
    """The plan with at most so many random turns of each stage that has some, and its depth."""
    stages, depths = list(plan.stages), list(plan.training.warmup)
    if plan.num_ranks < len(stages):
        return plan
    for s, stage in enumerate(stages):
        replica = st.integers(0, stage.replicas - 1)
        turns = tuple(draw(st.lists(replica, min_size=1, max_size=most)))
        stages[s] = replace(stage, turns=turns)
        depths[s] = draw(st.integers(0, 3))
    training = replace(plan.training, warmup=tuple(depths))
    return replace(plan, stages=tuple(stages), training=training)


def on_unlike_devices(plan: Plan, speeds: list[float], *levels: Level) -> Plan:
    size = 1
    for level in levels:
        size *= level.size
    devices = tuple(Device(speed=speeds[n % len(speeds)]) for n in range(size))
    ours = [[devices[rank].speed for rank in own] for own in plan.ranks]
    paces = [tuple(min(own) / one for one in own) for own in ours]
    stages = [replace(one, paces=own) for one, own in zip(plan.stages, paces, strict=True)]
    return replace(plan, stages=tuple(stages), cluster=Cluster(devices, levels).to_toml())


@settings(max_examples=80)
@given(st.data())
def test_the_clock_is_the_simulators_under_any_turns(data: st.DataObject) -> None:
    """A pattern for which the simulator finds that ranks wait for ever is one that the proof
    refuses, too."""
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
    """The backward of i comes, with a run of 4 microbatches, before the forward of i + 4."""
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
    [((0, 2), "1f1b", "replica 2"), ((-1,), "1f1b", "turns"),
     ((0, 0, 1), "stash", "one microbatch of each")],
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


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from([0.5, 1.0, 1.5, 3.0, 7.0]), min_size=1, max_size=4), st.integers(1, 9)
)
def test_turns_by_speed_take_the_least_after_any_number(speeds: list[float], count: int) -> None:
    turns = by_speed(speeds, count)
    for m in range(1, count + 1):
        shares = [len(share_of(turns, q, m)) for q in range(len(speeds))]
        longest = max(n / v for n, v in zip(shares, speeds, strict=True))
        every = (n for n in product(range(m + 1), repeat=len(speeds)) if sum(n) == m)
        least = min(max(n / v for n, v in zip(one, speeds, strict=True)) for one in every)
        assert longest == pytest.approx(least)


def test_turns_by_speed() -> None:
    assert by_speed([3.0, 1.0], 8) == (0, 0, 0, 1)
    assert by_speed([2.0, 3.0], 10) == (1, 0, 1, 1, 0)
    assert by_speed([1.0, 1.0, 1.0], 7) == in_turn(3)
    assert by_speed([10.0, 1.0], 4) == (0,)  # the slow one would be the last


UNLIKE = {  # the speeds of ranks, stages, replicas of each
    "1f1b": ([3.0, 1.0, 1.0], 1, (3,)), "gpipe": ([3.0, 1.0, 1.0, 1.0], 2, (2, 2)),
    "zb-h1": ([3.0, 1.0, 1.0], 1, (3,)), "2bw": ([3.0, 1.0, 1.0], 1, (3,)),
    "interleaved": ([3.0, 1.0, 3.0, 1.0], 4, 2), "zb-v": ([3.0, 1.0, 3.0, 1.0], 4, 2),
}  # fmt: skip


def of_speeds(speeds: list[float]) -> Cluster:
    local = Cluster.local(len(speeds))
    devices = [replace(one, speed=v) for one, v in zip(local.devices, speeds, strict=True)]
    return replace(local, devices=tuple(devices))


@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", UNLIKE)
def test_the_planner_gives_faster_replicas_more(schedule: str, tmp_path: Path) -> None:
    speeds, stages, replicas = UNLIKE[schedule]
    model = mlp()
    x, y = batch_for(model, 16)
    common: dict[str, Any] = {
        "loss_fn": loss_for(model), "optimizer": partial(torch.optim.SGD, lr=0.1),
        "microbatches": 8, "schedule": schedule,
    }  # fmt: skip
    given = common | PLANNED | {"example_target": y, "stages": stages, "replicas": replicas}
    expected = pdcompile.reference(deepcopy(model), **common)
    plain = pdcompile.compile(deepcopy(model), x, **given).plan
    pipe = pdcompile.compile(model, x, cluster=of_speeds(speeds), **given)
    plan = pipe.plan
    first = plan.stages[0]
    assert not plain.patterned
    assert first.turns[:4] == (0, 0, 0, 1)
    assert first.paces[:2] == (1 / 3, 1.0)
    shares = "6, 1, 1" if replicas == (3,) else "6, 2"
    assert f"take {shares} of 8 microbatches, by their speeds (3, 1" in explain_text(plan)
    claim = plan.certificate
    assert 0 < claim.bound_seconds <= claim.objective_seconds
    found = explain(plan)
    assert not found.edited
    assert not plan.alternatives  # of replicas in turn alone
    assert found.objective_seconds == claim.objective_seconds
    if not plan.training.kind.stream:
        bare = tuple(replace(one, update_seconds=0.0) for one in plan.stages)
        assert simulate(replace(plan, stages=bare)).forecast.step_seconds == pytest.approx(
            claim.objective_seconds
        )
    in_turn_of_all = tuple(replace(one, turns=(), paces=()) for one in plan.stages)
    assert claim.objective_seconds < seconds_of(placed(replace(plan, stages=in_turn_of_all)))
    for t, size in enumerate((16, 16, 3, 16)):
        x, y = batch_for(model, size, t)
        ours, theirs = (one.step(x, target=y) for one in (pipe, expected))
        assert float(ours.loss) == pytest.approx(float(theirs.loss), abs=2e-5)
    close(pipe.full_state_dict(), expected.full_state_dict())
    pipe.close()
    again = pdcompile.compile(mlp(), batch_for(model, 16)[0], plan=plan, **given)
    assert again.plan.spec == plan.spec


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at, self.far = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.at + x * self.far


def halves(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0.5 * (output - target).square().mean()


@pytest.mark.parametrize(
    ("rescaled", "minimum"), [(True, 0.5), pytest.param(False, 0.25, marks=pytest.mark.slow)]
)
def test_rescaled_updates_land_at_the_minimum_of_the_mean(
    rescaled: bool, minimum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two quadratics, one a replica, of speeds 3 to 1: with minima at 0 and at 1."""
    if not rescaled:
        monkeypatch.setattr(PipelineSpec, "rate", lambda *_: 1.0)
    common: dict[str, Any] = {
        "loss_fn": halves, "optimizer": partial(torch.optim.SGD, lr=0.005), "schedule": "async",
    }  # fmt: skip
    x, own = torch.ones(1, 1), (torch.zeros(1, 1), torch.ones(1, 1))
    pipe = pdcompile.compile(
        Point(), x, example_target=x, replicas=(2,), cluster=of_speeds([3.0, 1.0]), **PLANNED,
        **common,
    )  # fmt: skip
    turns = pipe.plan.spec.turns(0)
    assert turns == (0, 0, 0, 1)
    assert pipe.plan.training.warmup == (3,)
    expected = pdcompile.reference(Point(), plan=pipe.plan, **common)
    for t in range(600):
        target = own[turns[t % 4]]
        pipe.step(x, target=target)
        if t < 100:
            expected.step(x, target=target)
        if t == 99:
            close(pipe.full_state_dict(), expected.full_state_dict())
    pipe.flush()
    assert float(sum(pipe.full_state_dict().values())) == pytest.approx(minimum, abs=1e-2)


def test_a_rate_that_the_optimizer_changes_stays_without_its_scale() -> None:
    """Each update finds what the one before has made of it."""

    class Decaying(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append(self.param_groups[0]["lr"])
            super().step(closure)
            self.param_groups[0]["lr"] *= 0.9

    seen: list[float] = []
    x, optimizer = torch.ones(1, 1), partial(Decaying, lr=0.1)
    pipe = pdcompile.compile(
        Point(), x, example_target=x, replicas=(2,), cluster=of_speeds([3.0, 1.0]), **PLANNED,
        loss_fn=halves, schedule="async", optimizer=optimizer,
    )  # fmt: skip
    common: dict[str, Any] = {"loss_fn": halves, "schedule": "async", "optimizer": optimizer}
    expected = pdcompile.reference(Point(), plan=pipe.plan, **common)
    rates = [pipe.plan.scale_of(0, t) * 0.1 * 0.9**t for t in range(8)]
    for one in (pipe, expected):
        seen.clear()  # of trials too
        for _ in range(8):
            one.step(x, target=x)
        if one is pipe:
            pipe.flush()
        assert seen == pytest.approx(rates)
        assert one.optimizer is not None
        assert one.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**8)


@pytest.mark.sample(2)
@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (2, 2)])
def test_a_tied_weight_has_the_rate_of_its_first_stage(replicas: tuple[int, int]) -> None:
    """An idle replica of that stage waits for no sum of a minibatch that has not begun."""
    model = gpt(layers=1, width=8, heads=1, vocab=16, context=4)
    x, y = batch_for(model, 2)
    common: dict[str, Any] = {
        "loss_fn": loss_for(model), "optimizer": partial(torch.optim.SGD, lr=0.1),
        "schedule": "async",
    }  # fmt: skip
    given = common | PLANNED | {"example_target": y}
    ends = [pdcompile.Pin("wte", 0), pdcompile.Pin("lm_head", 1)]
    plan = pdcompile.compile(deepcopy(model), x, replicas=replicas, constraints=ends, **given).plan
    assert plan.tied
    turned = with_turns(plan, *((0, 0, 1) if count > 1 else () for count in replicas))
    expected = pdcompile.reference(deepcopy(model), plan=turned, **common)
    pipe = pdcompile.compile(model, x, plan=turned, **given)
    for t in range(9):
        x, y = batch_for(model, 2, t)
        ours, theirs = (one.step(x, target=y) for one in (pipe, expected))
        assert float(ours.loss) == float(theirs.loss)
    pipe.flush()
    torch.testing.assert_close(
        pipe.full_state_dict(), expected.full_state_dict(), rtol=0.0, atol=0.0
    )


def test_rates_have_a_mean_of_one_over_replicas() -> None:
    plan = make_plan("async", 2, 1, replicas=(2, 1))
    plan = replace(plan, stages=(replace(plan.stages[0], turns=(0, 0, 0, 1)), plan.stages[1]))
    assert [plan.spec.rate(0, t) for t in range(5)] == [0.5, 0.5, 0.5, 1.5, 0.5]
    assert {plan.spec.rate(1, t) for t in range(5)} == {1.0}
    assert [plan.spec.group(s) for s in (0, 1)] == [1, 1]


@settings(max_examples=30)
@given(st.data())
def test_asynchronous_programs_are_proved_with_any_turns(data: st.DataObject) -> None:
    counts = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    tied = (TiedParameter("w", (0, len(counts) - 1), 1),)
    plan = make_plan(
        "async", len(counts), 1, replicas=counts, clip=data.draw(st.sampled_from([None, 1.0])),
        tied=data.draw(st.sampled_from([(), tied])) if len(counts) > 1 else (),
    )  # fmt: skip
    depths, depth = list[int](), 0
    for _ in counts:
        depth += data.draw(st.integers(0, 2))
        depths.insert(0, depth)
    turned_ = turned(data.draw, plan, 4)  # 3, 4 and 5 turns come together after 60 microbatches
    training = replace(plan.training, warmup=tuple(depths))
    check(replace(turned_, training=training))


TORCHRUN = (
    COMMON
    + """
import pdcompile
from dataclasses import replace
from tests.test_turns import of_speeds, with_turns

def close(ours, theirs):
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=2e-5)

def train(pipe, eager, model, turns):
    assert pipe.plan.spec.patterns == turns, pipe.plan.spec.patterns
    for t, size in enumerate([16, 2, 5, 16]):
        inputs, target = models.batch_for(model, size, t)
        given = (inputs,), dict(target=target)
        if size == 16:  # only what this rank reads
            given = (*pipe.shard([*zip(inputs, target)], [range(size)]),), {}
        ours, theirs = pipe.step(*given[0], **given[1]), eager.step(inputs, target=target)
        assert abs(float(ours.loss) - float(theirs.loss)) < 2e-5
    found = pipe.eval_step(inputs, target=target)
    assert abs(float(found.loss) - float(eager.eval_step(inputs, target=target).loss)) < 2e-5
    close(pipe.state_dict(), eager.full_state_dict())
    pipe.close()

for schedule in sys.argv[1:]:
    model = models.mlp()
    inputs, target = models.batch_for(model, 16)
    common = dict(loss_fn=models.loss_for(model), optimizer=partial(torch.optim.SGD, lr=0.1),
                  schedule=schedule, microbatches=8)
    given = dict(example_target=target, costs="estimated", verify="off", updates="home", **common)
    eager, twin = reference(copy.deepcopy(model), **common), copy.deepcopy(model)
    if schedule == "1f1b":
        cluster = of_speeds([3.0, 1.0, 1.0])
        pipe = pdcompile.compile(model, inputs, replicas=(3,), cluster=cluster, **given)
        train(pipe, eager, model, ((0, 0, 0, 1, 2),))
        continue
    plan = pdcompile.compile(twin, inputs, replicas=(2, 1), **given)
    turned, _ = with_turns(plan.plan, (0, 0, 1), ()), plan.close()
    pipe = pdcompile.compile(model, inputs, plan=turned, **given)
    train(pipe, eager, model, ((0, 0, 1), ()))
model = models.mlp()
inputs, target = models.batch_for(model, 2)
common = dict(loss_fn=models.loss_for(model), optimizer=partial(torch.optim.SGD, lr=0.1),
              schedule="async", max_grad_norm=0.5)
twin = copy.deepcopy(model)
pipe = pdcompile.compile(model, inputs, example_target=target, replicas=(3,), costs="estimated",
                         verify="off", cluster=of_speeds([3.0, 1.0, 1.0]), **common)
assert pipe.plan.spec.patterns == ((0, 0, 0, 1, 2),)
eager = reference(twin, plan=pipe.plan, **common)
for t in range(12):
    inputs, target = models.batch_for(model, 2, t)
    ours, theirs = (one.step(inputs, target=target) for one in (pipe, eager))
    assert abs(float(ours.loss) - float(theirs.loss)) < 2e-5
pipe.flush()
close(pipe.state_dict(), eager.full_state_dict())
pipe.close()
say("equal")
"""
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedules", [("1f1b", "2bw"), ("gpipe",)])
def test_on_ranks(schedules: tuple[str, ...], tmp_path: Path) -> None:
    """Turns by speed, turns of a plan that somebody edited, and asynchronous ones."""
    run = processes(TORCHRUN, 3, tmp_path, *schedules)
    assert run.code == 0, run
    assert run.output.count("equal") == 3, run
