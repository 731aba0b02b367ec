"""RoundPipe's schedule: every rank runs what comes to it next."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import ConfigError, InfeasibleError, PlanError, ScheduleError
from pdcompile.passes.check import check
from pdcompile.passes.planning.explain import explain as explained
from pdcompile.passes.schedules import round as roundpipe
from pdcompile.passes.schedules.alone import chain
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Edge, Forecast, Plan, TiedParameter
from pdcompile.plan.times import times_of
from pdcompile.reference import reference
from pdcompile.report.plan_table import explain
from pdcompile.schedule import Action
from pdcompile.schedule.registry import KINDS, allowed
from pdcompile.units import format_bytes
from tests.helpers import alike
from tests.helpers.alike import WORKLOAD, Call, run_verbs
from tests.helpers.launch import processes
from tests.helpers.models import batch_for, gpt, loss_for, mlp, unet
from tests.helpers.schedules import same_clock
from tests.test_parts.test_pipelines import checkpoints_fit
from tests.test_replicas_on_ranks import TORCHRUN
from tests.test_schedules import drawn, drawn_in

OPTIONS: dict[str, Any] = {"schedule": "round", "microbatches": 4, "max_grad_norm": 0.3,
    "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}  # fmt: skip
compiled = partial(alike.compiled, stages=5, **OPTIONS)
NAMES = ["round", "round-2bw"]


@cache
def planned(**options: Any) -> Plan:
    """The plan of a small model on two ranks of one host."""
    return compiled(mlp, cluster="1x2", **options).plan


def test_it_is_its_picture() -> None:
    plan = chain("round", 3, 4, 2)
    cells = drawn(simulate(plan).timeline, 1, lambda one: f"{one.stage}.{one.microbatch}")
    assert cells == drawn_in(roundpipe, "rank")


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("stages", range(1, 8))
def test_turns_go_round_and_nobody_idles(stages: int, ranks: int) -> None:
    plan = chain("round", stages, 2 * ranks, ranks)
    for s in range(stages):
        assert [plan.spec.rank(s, i) for i in range(9)] == [
            (i * stages + s) % ranks for i in range(9)
        ]
    if plan.stages[0].replicas == ranks:  # else some ranks run some of the stages
        assert simulate(plan).forecast.bubble == pytest.approx(0.0)


@st.composite
def pipelines(draw: st.DrawFn) -> Plan:
    """Skips, tied weights, clipping, homes, and microbatches that are no multiple of the ranks."""
    stages, ranks, m = (draw(st.integers(*one)) for one in ((2, 6), (1, 4), (1, 7)))
    name = draw(st.sampled_from(["round", "round-2bw"]))
    plan, some = chain(name, stages, m, ranks), st.sets(st.integers(0, stages - 1), min_size=2)
    apart = name == "round-2bw" and plan.stages[0].replicas < ranks  # see the last tests
    tied = [TiedParameter(f, tuple(sorted(draw(some))), 4) for f in "ab" * (not apart)]
    source, *targets = sorted(draw(some))
    skip = Edge("skip", source, tuple(targets), 1, draw(st.booleans()))
    clip, homes = draw(st.sampled_from([None, 1.0])), draw(st.sampled_from(["every", "home"]))
    training = replace(plan.training, max_grad_norm=clip, updates=homes)
    return replace(plan, edges=(*plan.edges, skip), tied=tuple(tied), training=training)


@settings(max_examples=30)
@given(pipelines(), st.data())
def test_every_pipeline_is_proved_and_timed_as_by_the_simulator(
    plan: Plan, data: st.DataObject
) -> None:
    check(plan)
    moves, rates = data.draw(st.booleans()), range(3, 3 + plan.num_ranks)
    kind = "cuda" if moves else "cpu"
    own = tuple(Device(kind, host_bytes_per_second=rate) for rate in rates)
    cluster = Cluster(own, (Level("slow", plan.num_ranks, 4.0, 0.1),))
    sizes = {"parameter_bytes": 9, "recompute": moves}
    stages = tuple(replace(one, trainable_bytes=5 + one.index, **sizes) for one in plan.stages)
    if moves:
        plan = replace(plan, training=replace(plan.training, updates="home"))
    plan = replace(plan, stages=stages, cluster=cluster.to_toml())
    assert plan.fetched == (moves and plan.stages[0].replicas > 1)
    returning = [edge.value for edge in plan.edges if edge.gradient]
    training = plan.training
    found = times_of(plan, cluster, returning).makespan(training.warmup, training.num_microbatches)
    seconds = simulate(plan, timeline=False).forecast.step_seconds
    if training.kind.lag:  # the sums have the time of the next minibatch
        assert seconds <= found * (1 + 1e-9)
    else:
        assert same_clock(found, plan, seconds)


@settings(max_examples=20)
@given(st.integers(2, 5), st.integers(2, 3), st.lists(st.integers(1, 9), min_size=6, max_size=6))
def test_weights_move_over_the_link_of_each_rank(s: int, ranks: int, rates: list[int]) -> None:
    """Faster links never make a step slower, and without any time for it nothing is added."""
    found = []
    for links in (rates[:ranks], [2 * one for one in rates[:ranks]], [1e30] * ranks, None):
        kinds = [Device("cuda", host_bytes_per_second=one) for one in links or ()]
        cluster = Cluster(tuple(kinds) or (Device("cuda"),) * ranks, (Level("free", ranks, 1e30),))
        plan = chain("round", s, 2 * ranks, ranks)
        stages = (replace(one, parameter_bytes=9, recompute=True) for one in plan.stages)
        training = replace(plan.training, updates="home" if links else "every")
        plan = replace(plan, training=training, stages=tuple(stages), cluster=cluster.to_toml())
        assert plan.fetched == (links is not None and plan.stages[0].replicas > 1)
        times = times_of(plan, cluster, [edge.value for edge in plan.edges])
        found.append(simulate(plan, timeline=False).forecast.step_seconds)
        again = times.makespan(training.warmup, training.num_microbatches)
        assert again == pytest.approx(found[-1], abs=1e-2)  # gloo has a latency
    if plan.stages[0].replicas > 1:
        assert found[0] > found[1] > found[2]
    assert found[2] == pytest.approx(found[3], abs=1e-2)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("build", "ranks", "options"),
    [
        (mlp, 2, {}),
        (unet, 3, {}),
        (partial(gpt, tied=True), 2, {"recompute": True}),
        (partial(gpt, tied=True, dropout=0.2), 3, {}),
        (mlp, 2, {"stages": 4}),
    ],
)
def test_training_is_that_of_the_reference(build: Any, ranks: int, options: Any) -> None:
    """Five stages on two and on three ranks: short minibatches, a loop of one's own, evaluation."""
    pipe = compiled(build, cluster=Cluster.local(ranks), **options)
    plan = Plan.from_json(pipe.plan.to_json())
    count = len(plan.stages)
    assert [plan.spec.rank(s, 1) for s in range(count)] == [
        (count + s) % ranks for s in range(count)
    ]
    assert plan.certificate.bound_seconds <= plan.certificate.objective_seconds
    alike.train_alike(pipe, build, atol=2e-5 if plan.tied else 0.0, **OPTIONS)  # else bit for bit


@pytest.mark.parametrize(
    ("build", "ranks", "options"),
    [
        (partial(gpt, tied=True, dropout=0.2), 2, {"recompute": True}),
        (unet, 3, {"updates": "home"}),
        (mlp, 2, {"stages": 4}),
    ],
)
def test_late_updates_are_those_of_2bw(build: Any, ranks: int, options: Any) -> None:
    """Each minibatch runs on weights that are one older, whatever is drained between."""
    late = OPTIONS | {"schedule": "round-2bw"}
    pipe = compiled(build, cluster=Cluster.local(ranks), **{**options, **late})
    model = build()
    given = {**late, "loss_fn": loss_for(model)}
    theirs = [reference(copy.deepcopy(model), **given, plan=pipe.plan)]
    theirs += [reference(copy.deepcopy(model), **given | {"schedule": "2bw"})]
    close = partial(torch.testing.assert_close, rtol=0.0, atol=2e-5)
    for t, size in enumerate((8, 3, 1, 8, 8)):
        x, y = batch_for(model, size, t)
        losses = [float(one.step(x, target=y).loss) for one in (pipe, *theirs)]
        close(losses, losses[:1] * 3)
        assert pipe.plan.tied or losses[0] == losses[1]
        if t == 3:
            pipe.flush()
    for one in theirs:
        close(pipe.full_state_dict(), one.full_state_dict())
    close(float(pipe.eval_step(x, target=y).loss), float(theirs[0].eval_step(x, target=y).loss))


@pytest.mark.sample(1)
@pytest.mark.parametrize("build", [mlp, unet])
def test_a_microbatch_a_rank_is_the_reference_bit_for_bit(build: Any) -> None:
    """Sums over ranks are then in the order of microbatches."""
    options = {**OPTIONS, "microbatches": 3}
    pipe = compiled(build, cluster=Cluster.local(3), microbatches=3)
    alike.train_alike(pipe, build, **options)


def test_a_heavy_head_keeps_all_ranks_busy() -> None:
    """Half of the work is one layer: of all cuts under all schedules that drain, with stages that
    have a rank of their own, none idles so little or is so fast."""
    layers, ranks, m = (1.0, 1.0, 1.0, 1.0, 1.0, 5.0), 3, 12

    def simulated(schedule: str, stages: int, cut: tuple[int, ...]) -> Forecast:
        plan, ends = chain(schedule, stages, m, ranks), (0, *cut, len(layers))
        seconds = [sum(layers[a:b]) for a, b in pairwise(ends)]
        own = [
            replace(stage, forward_seconds=one, backward_seconds=2 * one)
            for stage, one in zip(plan.stages, seconds, strict=True)
        ]
        found = simulate(replace(plan, stages=tuple(own)), timeline=False).forecast
        assert found is not None
        return found

    kinds = [KINDS[name] for name in allowed(0) if not KINDS[name].dispatched]
    others = [
        simulated(kind.name, kind.usual * ranks, cut)
        for kind in kinds
        for cut in combinations(range(1, len(layers)), kind.usual * ranks - 1)
    ]
    for stages in (4, 5):
        found = simulated("round", stages, tuple(range(1, stages)))
        assert found.bubble < 1e-9 < 0.1 < min(one.bubble for one in others)
        assert found.step_seconds < min(one.step_seconds for one in others)


def test_the_planner_chooses_where_updates_are() -> None:
    plan = compiled(mlp, cluster="1x2", updates="auto").plan
    assert plan.training.updates == "home"
    assert all(len(stage.home_bytes) == 2 for stage in plan.stages)


def test_idle_time_is_that_of_a_rank_with_all_of_its_stages() -> None:
    found = explained(planned(schedule="round", updates="every"))
    busy = sum(one.compute_seconds for one in found.stages) * found.num_microbatches
    idle = 1 - busy / found.objective_seconds
    assert [one.idle for one in found.stages] == pytest.approx([idle] * len(found.stages))
    assert 0 <= idle < 0.5


@pytest.mark.parametrize("name", NAMES)
def test_the_host_holds_what_ranks_of_cpus_do(name: str) -> None:
    plan = compiled(mlp, cluster="1x2", updates="home", schedule=name, recompute=True).plan
    gpus = Cluster((Device("cuda"),) * 2, (Level("host", 2, 1e9),)).to_toml()
    held = [one.weights_bytes + one.gradients_bytes + one.optimizer_bytes for one in plan.ledgers]
    away = replace(plan, cluster=gpus)
    assert (plan.host_bytes, away.host_bytes) == (0, pytest.approx(sum(held), abs=16))
    shown = explain(replace(away, forecast=simulate(away).forecast))
    assert f"host, beside these: {format_bytes(away.host_bytes)} of weights" in shown
    assert "copied at 12.0 GB/s" in shown


@pytest.mark.parametrize("again", ["on", "auto"])
def test_the_bound_has_the_ways_of_weights(tmp_path: Path, call: Call, again: str) -> None:
    """Weights move where all stages recompute; where they need not, they may stay."""
    gpus = (Device("cuda", host_bytes_per_second=1e5),) * 2
    file, cluster = tmp_path / "plan.json", tmp_path / "cluster.toml"
    cluster.write_text(Cluster(gpus, (Level("host", 2, 1e9),)).to_toml())
    given = ["--cluster", str(cluster), "--schedule", "round", "--updates", "home"]
    given += ["--recompute", again, "--costs", "estimated"]
    run_verbs(call, ["plan", WORKLOAD, *given, "-o", str(file)])
    plan = Plan.load(file)
    ways = sum(2 * one.parameter_bytes + one.trainable_bytes for one in plan.stages) / 1e5
    least = plan.training.num_microbatches / 2 * ways
    certificate = plan.certificate
    assert (certificate.bound_seconds > least * 0.999) == plan.fetched == (again == "on")
    assert certificate.bound_seconds <= certificate.objective_seconds


@pytest.mark.parametrize("name", NAMES)
def test_weights_count_once_a_host(name: str) -> None:
    """Weights on CPUs are one memory, where nothing is sent after an update; a device of another
    kind has its own."""
    every, home = (planned(schedule=name, updates=one) for one in ("every", "home"))
    gpus = Cluster((Device("cuda"),) * 2, (Level("host", 2, 1e9),)).to_toml()
    for plan, readers in ((home, 2), (replace(home, cluster=gpus), 1)):
        found = simulate(plan)
        for one, other in zip(every.forecast.ledgers, found.forecast.ledgers, strict=True):
            whole, here = one.weights_bytes, other.weights_bytes
            assert here == pytest.approx(whole / readers, abs=len(plan.stages))
        gathers = [one.num_bytes for one in found.timeline if one.action is Action.POST_GATHER]
        assert (max(gathers) == 0) == (readers == 2)
    assert home.certificate.bound_seconds <= home.certificate.objective_seconds


def test_a_plan_fits_where_weights_are_once() -> None:
    """Memory for half of the weights of all stages, and no more."""
    given: dict[str, Any] = {"cluster": "1x2", "stages": 3}
    plans = [compiled(mlp, **given, updates=one).plan for one in ("every", "home")]
    most = [max(one.total_bytes for one in plan.forecast.ledgers) for plan in plans]
    assert most[1] < most[0]
    limit = (most[0] + most[1]) // 2
    given["memory"] = limit
    assert compiled(mlp, updates="home", **given).plan.forecast
    with pytest.raises(InfeasibleError):
        compiled(mlp, updates="every", **given)


def test_turns_are_those_of_the_dispatch_whatever_the_speeds() -> None:
    unlike = Cluster((Device(), Device(speed=3.0)), (Level("host", 2, 1e9),))
    plan = compiled(mlp, cluster=unlike).plan
    assert [stage.turns for stage in plan.stages] == [()] * 5


def test_what_it_has_not() -> None:
    with pytest.raises(ConfigError, match="runs what comes to it next"):
        compiled(mlp, cluster=Cluster.local(2), replicas=2)
    with pytest.raises(ScheduleError, match="which have unlike ranks under 'round-2bw'"):
        compiled(partial(gpt, tied=True), cluster="1x2", stages=4, schedule="round-2bw")
    with pytest.raises(ConfigError, match="2 hosts, and under 'round'") as caught:
        compiled(mlp, cluster="2x2")
    assert "schedule='1f1b'" in str(caught.value.remedy)


def test_other_turns_and_hosts_are_refused_in_a_plan() -> None:
    plan = planned(schedule="round", updates="every")
    data = json.loads(plan.to_json())
    data["stages"][1]["ranks"] = [0, 1]
    with pytest.raises(PlanError, match=r"\[0, 1\], and the turns under 'round' are \[1, 0\]"):
        Plan.from_json(json.dumps(data))
    two = Cluster.parse("2x1").to_toml()
    with pytest.raises(PlanError, match="2 hosts"):
        Plan.from_json(replace_text(plan, two))


def replace_text(plan: Plan, cluster: str) -> str:
    data = json.loads(plan.to_json())
    return json.dumps(data | {"cluster": cluster})


@pytest.mark.parametrize("name", NAMES)
def test_on_the_command_line(tmp_path: Path, call: Call, name: str) -> None:
    plan = str(tmp_path / "plan.json")
    given = ["--cluster", "1x2", "--schedule", name, "--updates", "home", "--costs", "estimated"]
    said = run_verbs(
        call,
        ["plan", WORKLOAD, *given, "--json", "-o", plan],
        ["simulate", plan, "--json"],
        ["run", WORKLOAD, "--plan", plan, "--steps", "2", "--json"],
        ["explain", plan],
    )
    assert f"{name}: 3 stages on 2 ranks" in said


@pytest.mark.slow
def test_checkpoints_fit_any_other_plan(tmp_path: Path) -> None:
    """The first replicas of stages are on unlike ranks."""
    turns: dict[str, Any] = {"schedule": "round", "stages": 3}
    settings = [turns, {"stages": 2}, {**turns, "updates": "home"}, turns]
    checkpoints_fit("adamw", settings, tmp_path, ranks=2)


_THEIRS = '(models.mlp, "1f1b", "all"), (models.unet, "2bw", "none")'
assert _THEIRS in TORCHRUN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "model"),
    [(2, "partial(models.gpt, layers=3, tied=True)"), (3, "models.unet")],
)
@pytest.mark.parametrize("updates", ["every", "home"])
@pytest.mark.parametrize("name", NAMES)
def test_on_ranks(ranks: int, model: str, updates: str, name: str, tmp_path: Path) -> None:
    script = TORCHRUN.replace(_THEIRS, f'({model}, "{name}", "all"),')
    script = script.replace('schedule == "1f1b"', str((updates, name) == ("every", "round")))
    options = f'stages=5, updates="{updates}"'
    run = processes(script.replace("replicas=REPLICAS", options), ranks, tmp_path)
    assert run.code == 0, run
    assert run.output.count("equal") == ranks, run
