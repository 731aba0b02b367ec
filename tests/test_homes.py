"""Updates at homes: each parameter is stepped by one of its stage's replicas (ZeRO-1)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pdcompile
from examples.gpt import GPT, loss_fn
from pdcompile.errors import ConfigError, InfeasibleError, PlanError, ScheduleError
from pdcompile.passes.check import check_programs
from pdcompile.passes.partition.alternatives import seconds_of
from pdcompile.passes.planning.graph_free import plan_of
from pdcompile.passes.planning.plan_check import check_plan
from pdcompile.passes.schedules.alone import chain
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Plan, Training
from pdcompile.plan.evaluate import Deployment, Evaluation
from pdcompile.problem import StageLimits
from pdcompile.problem.deployment import balanced_homes
from pdcompile.schedule import Action
from tests.helpers.launch import processes
from tests.helpers.problems import chain_problem
from tests.helpers.schedules import make_plan, mutated
from tests.test_check import programs_of
from tests.test_parts.test_pipelines import COMMON, RANKS, agree, checkpoints_fit

HOME = {"updates": "home", "microbatches": 4}


def gpt(**options: Any) -> pdcompile.Pipeline:
    torch.manual_seed(0)
    ids = torch.randint(256, (8, 16))
    return pdcompile.compile(
        GPT(2, 64, 4, 16), ids, example_target=ids, loss_fn=loss_fn, costs="estimated",
        verify="off",
        **{"microbatches": 4, "cluster": "1x4", "stages": 2, "replicas": 2, **options},
    )  # fmt: skip


SIZES = st.lists(st.integers(1, 9), max_size=12)


@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(1, 5), st.booleans())
def test_homes_are_balanced_over_all_stages(
    stages: list[list[int]], count: int, turned: bool
) -> None:
    """Stages have the same ranks, each in whatever order."""
    named = [{f"{s}.{n}": one for n, one in enumerate(own)} for s, own in enumerate(stages)]
    ranks = [[(s * turned + n) % count for n in range(count)] for s in range(len(stages))]
    homes, held = balanced_homes(ranks, named), [0] * count
    for own, of in zip(ranks, named, strict=True):
        for fqn, size in of.items():
            held[own[homes[fqn]]] += size
    sizes = [one for own in stages for one in own]
    assert len(homes) == len(sizes)
    assert max(held) <= sum(sizes) / count + (1 - 1 / count) * max(sizes, default=0)


def test_ranks_that_run_all_stages_update_alike() -> None:
    """The head and the embedding, which are the largest, have homes on unlike ranks."""
    plan = gpt(schedule="round", replicas=None, updates="home", cluster="1x2", stages=3).plan
    held = [one.optimizer_bytes for one in plan.ledgers]
    assert max(held) <= 1.1 * sum(held) / len(held)
    assert max(max(one.home_bytes) / sum(one.home_bytes) for one in plan.stages) > 0.6
    seconds = [
        sum(e.end_seconds - e.start_seconds for e in simulate(plan).timeline
            if (e.rank, e.action) == (rank, Action.STEP))
        for rank in range(2)
    ]  # fmt: skip
    each = [plan.training.update_seconds(one / 2, versions=False) for one in held]
    assert seconds == pytest.approx(each)


def test_the_ledger_has_the_optimizer_state_of_each_home() -> None:
    plans = {updates: gpt(updates=updates).plan for updates in ("every", "home")}
    for stage, other in zip(plans["home"].stages, plans["every"].stages, strict=True):
        assert sum(stage.home_bytes) == stage.trainable_bytes - 65536 * stage.index  # the head
        assert max(stage.home_bytes) <= 1.1 * sum(stage.home_bytes) / 2
        assert other.home_bytes == ()
        assert stage.update_seconds == pytest.approx(
            other.update_seconds * max(stage.home_bytes) / sum(stage.home_bytes)
        )
        for rank, own in zip(stage.ranks, stage.home_bytes, strict=True):
            assert plans["home"].ledgers[rank].optimizer_bytes == 2 * own
            assert plans["every"].ledgers[rank].optimizer_bytes == 2 * sum(stage.home_bytes)


def test_a_limit_on_memory_that_only_homes_keep() -> None:
    options: dict[str, Any] = {"stages": 1, "replicas": 4, "memory": "2000 kB"}
    with pytest.raises(InfeasibleError, match="--updates home"):
        gpt(**options)
    plan = gpt(**options, updates="home").plan
    assert max(ledger.total_bytes for ledger in plan.ledgers) <= 2_000_000


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_a_flush_takes_as_long_and_sends_as_much(schedule: str) -> None:
    """Half of an all-reduce is before the update, half after it."""
    link = StageLimits(bytes_per_second=1.0)
    found = [
        simulate(
            make_plan(schedule, 2, 4, replicas=(2, 2), homes=homes, trainable_bytes=8),
            links=lambda *_: link,
        ).forecast
        for homes in (False, True)
    ]
    assert found[0].step_seconds == found[1].step_seconds
    assert found[0].sent_bytes == found[1].sent_bytes


def test_a_stream_hides_both_halves_behind_a_minibatch() -> None:
    link = StageLimits(bytes_per_second=1.0)
    plan = make_plan("2bw", 2, 16, replicas=(2, 2), homes=True, edges=(), trainable_bytes=16)
    forecast = simulate(plan, links=lambda *_: link).forecast
    assert forecast.step_seconds == 16 / 2 * 3  # compute alone: an all-reduce takes 16 s


def test_the_seconds_of_a_stream_are_those_of_its_updates() -> None:
    """Weights from homes come in the midst of a minibatch, which a step of its own may wait for."""
    problem = chain_problem([3.0, 3.0], 2, num_microbatches=4)
    problem = replace(
        problem, items=tuple(replace(one, trainable_bytes=16) for one in problem.items)
    )
    on = replace(
        Deployment.straight(problem), ranks=[(0, 1), (2, 3)], schedule="2bw", in_flight=(2, 1),
        flush=False, num_microbatches=4, link=lambda *_: StageLimits(bytes_per_second=4.0),
    )  # fmt: skip
    for homes in (False, True):
        found = Evaluation(problem, (0, 1), replace(on, homes=homes))
        training = Training("2bw", 4, 4, (1, 0), updates="home" if homes else "every")
        forecast = simulate(plan_of(found, training), links=on.link).forecast
        assert seconds_of(found) == max(found.seconds, forecast.step_seconds / 4)


def test_weights_come_from_homes_in_time() -> None:
    """Before a forward that runs on them, and not before their update."""
    plan = make_plan("2bw", 1, 4, replicas=(2,), homes=True)
    programs = programs_of(plan, (4, 4, 4))
    check_programs(plan, programs)
    first, second = (list(program.columns[0]) for program in programs[1:3])
    wait = next(one for one in first if one.action is Action.WAIT_GATHER)
    first.remove(wait)
    second.append(wait._replace(minibatch=wait.minibatch - 1))
    late = [mutated(programs[1], 0, first), mutated(programs[2], 0, second)]
    with pytest.raises(ScheduleError, match="before they have come from their homes"):
        check_programs(plan, [programs[0], *late, *programs[3:]])
    column = list(programs[1].columns[0])
    post = next(one for one in column if one.action is Action.POST_GATHER)
    column.remove(post)
    early = mutated(programs[1], 0, [post, *column])
    with pytest.raises(ScheduleError, match="gives weights before their update"):
        check_programs(plan, [programs[0], early, *programs[2:]])


@pytest.mark.parametrize(("schedule", "updates"), [
    ("2bw", "home"), ("round-2bw", "home"), ("round-2bw", "every"),
])  # fmt: skip
def test_sums_go_with_the_weights_that_they_replace(schedule: str, updates: str) -> None:
    """Also where a replica has nothing of a short minibatch, and could go ahead."""
    plan = make_plan("2bw", 1, 4, replicas=(2,)) if schedule == "2bw" else chain(schedule, 3, 4, 2)
    plan = replace(plan, training=replace(plan.training, updates=updates))
    programs = programs_of(plan, (4, 1, 1, 1))
    check_programs(plan, programs)
    column = list(programs[2].columns[1])
    post = next(one for one in column if one[0:3:2] == (Action.POST_REDUCE, 0))
    column.remove(post)
    column.insert(next(n for n, one in enumerate(column) if one.action is Action.STEP), post)
    early = mutated(programs[2], 1, column)
    with pytest.raises(ScheduleError, match="posted before there are weights W_1"):
        check_programs(plan, [*programs[:2], early, *programs[3:]])


def test_the_planner_chooses_who_updates() -> None:
    """Homes update in less time; where weights have no replicas there are none."""
    plans = {one: gpt(updates=one, replicas="any").plan for one in ("every", "home", "auto")}
    seconds = {one: plan.forecast.step_seconds for one, plan in plans.items() if plan.forecast}
    assert seconds["auto"] == min(seconds.values()) < seconds["every"]
    chosen = plans["auto"]
    assert chosen.training.updates == "home"
    assert "updates of every replica or at homes" in chosen.certificate.scope
    assert chosen.certificate.bound_seconds <= plans["every"].certificate.objective_seconds
    (row,) = (one for one in chosen.alternatives if one.choice == "updates")
    assert (row.own, row.value) == ("home", "every")
    assert row.step_seconds > chosen.certificate.objective_seconds
    again = gpt(updates="auto", replicas=None, stages=None, plan=chosen, microbatches="auto").plan
    assert again.training.updates == "home"


def test_where_memory_asks_for_homes_the_planner_takes_them() -> None:
    options: dict[str, Any] = {"stages": 1, "replicas": 4, "memory": "2000 kB"}
    assert gpt(**options, updates="auto").plan.training.updates == "home"


@pytest.mark.parametrize(
    "options",
    [{"schedule": "stash", "microbatches": 1}, {"optimizer": None},
     {"replicas": 1, "cluster": "1x2"}, {"replicas": (1, 1), "cluster": "1x2"}],
)  # fmt: skip
def test_where_there_are_no_homes_every_replica_updates(options: dict[str, Any]) -> None:
    assert gpt(**options, updates="auto").plan.training.updates == "every"


def test_schedules_without_homes_are_left_out_where_homes_are_asked_for() -> None:
    options: dict[str, Any] = {"schedule": "auto", "max_staleness": "any", "replicas": 4}
    plan = gpt(**options, stages=1, updates="home").plan
    assert not plan.training.kind.updates_each


def test_an_edited_share_of_a_home_is_refused() -> None:
    pipe = gpt(updates="home")
    plan, compiled = pipe.plan, pipe._running.compiled
    first = replace(plan.stages[0], home_bytes=(1, 2))
    edited = replace(plan, stages=(first, *plan.stages[1:]))
    with pytest.raises(PlanError, match=r"home_bytes is \[1, 2\]"):
        check_plan(edited, compiled.capture.train, plan.machines)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("options", "what"),
    [({"schedule": "stash", "microbatches": 1}, "an update averages a minibatch of each"),
     ({"optimizer": None}, "optimizer=None makes none"),
     ({"updates": "homes"}, "updates='homes'")],
)  # fmt: skip
def test_homes_that_cannot_be(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        gpt(**{"updates": "home", **options})


def test_gradients_without_an_update_are_refused() -> None:
    ids = torch.randint(256, (8, 16))
    with pytest.raises(ConfigError, match="stepped at their homes"):
        gpt(updates="home").forward_backward(ids, target=ids)


FAST = [
    {**HOME, "replicas": 2, "stages": 2, "schedule": "2bw", "max_grad_norm": 0.5},
    {**HOME, "replicas": (3, 1), "schedule": "zb-h1"},
    {**HOME, "replicas": 2, "parts": 2, "stages": 1, "max_grad_norm": 0.5},
]


def test_gpt_trains_at_homes_as_plain_pytorch(tmp_path: Path) -> None:
    agree(processes(COMMON + RANKS, 4, tmp_path, json.dumps(FAST)), len(FAST))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "2bw", "zb-v", "interleaved"])
def test_homes_under_every_schedule(schedule: str, tmp_path: Path) -> None:
    several = {"stages": 4} if schedule in ("zb-v", "interleaved") else {"stages": 2}
    settings = [
        {**HOME, "schedule": schedule, "replicas": 2, **several},
        {**HOME, "schedule": schedule, "replicas": 2, "max_grad_norm": 0.5, **several},
        {**HOME, "schedule": schedule, "replicas": 2, "recompute": True, **several},
    ]
    agree(processes(COMMON + RANKS, 4, tmp_path, json.dumps(settings)), len(settings))


@pytest.mark.slow
def test_homes_in_device_order(tmp_path: Path) -> None:
    script = "import os\nos.environ['PDCOMPILE_TRANSPORT'] = 'ordered'\n"
    settings = [{**HOME, "replicas": 2, "stages": 2, "schedule": name} for name in ("1f1b", "2bw")]
    indented = "\n".join(f"    {line}" for line in script.splitlines())
    run = processes(indented + COMMON + RANKS, 4, tmp_path, json.dumps(settings))
    agree(run, len(settings))


@pytest.mark.slow  # test_parts.test_pipelines has homes among its plans
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_checkpoints_from_homes_fit_any_other_plan(optimizer: str, tmp_path: Path) -> None:
    at_home = {"updates": "home", "replicas": 2}
    settings = [
        {**at_home, "stages": 2}, {"stages": 4}, {**at_home, "stages": 1, "parts": 2},
        {"replicas": 2, "stages": 2},
    ]  # fmt: skip
    checkpoints_fit(optimizer, settings, tmp_path)


BYTES = """
    import torch
    import pdcompile
    from examples.gpt import GPT, loss_fn

    torch.manual_seed(0)
    ids = torch.randint(256, (8, 16))
    model = GPT(2, 64, 4, 16)
    model.spare = torch.nn.Parameter(torch.ones(100, 100))  # has no gradient, and so no state
    model.scale = torch.nn.Parameter(torch.ones(()))
    pipe = pdcompile.compile(
        model, ids, example_target=ids, loss_fn=loss_fn, costs="estimated",
        microbatches=4, replicas=2, stages=1, updates="home", verify="off",
    )
    pipe.step(ids, target=ids)
    states = pipe.optimizer.state.values()
    held = sum(one.nbytes for of in states for one in of.values() if one.dim())
    assert held == pipe.plan.ledgers[pipe.ranks[0]].optimizer_bytes, held
    assert "stepped by other replicas" in pipe.explain()
    whole = pipe.full_optimizer_state_dict()  # on rank 0
    assert not whole or "scale" in whole["param_groups"][0]["params"]
    try:
        pipe.optimizer.step()
    except pdcompile.PdcompileError as error:
        assert "updates='every'" in str(error)
        print("REFUSED")
"""


def test_a_write_to_a_tied_weight_is_refused_on_every_rank(tmp_path: Path) -> None:
    """Those refuse it too that hold none of it: replicas of a stage between the two that do."""
    script = (
        COMMON
        + """
    model = model_of("gpt")
    with compiled(model, stages=3, replicas=(1, 2, 1), updates="home") as pipe:
        pipe.step(**inputs, target=target)
        with torch.no_grad():
            model.tokens.weight.mul_(1.5)
        try:
            pipe.step(**inputs, target=target)
        except pdcompile.ConfigError as error:
            print("REFUSED", error.message, error.where)
    """
    )
    run = processes(script, 4, tmp_path)
    said = "REFUSED a parameter was changed that other ranks hold copies of (tied weights)"
    assert run.code == 0, run
    assert run.output.count(said) == 4, run


def test_optimizers_hold_what_the_ledger_says(tmp_path: Path) -> None:
    run = processes(BYTES, 2, tmp_path)
    assert run.code == 0, run
    assert run.output.count("REFUSED") == 2, run
