"""The schedule of inference: planned, proved, simulated and run without gradients; int8 weights."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from examples.int8 import Int8Linear, LoRA, built, loss_fn, with_lora
from pdcompile import CutBefore
from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import ConfigError, ScheduleError
from pdcompile.passes.check import check, check_programs
from pdcompile.passes.schedules import forward, make_stream
from pdcompile.passes.schedules.stream import evaluation
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Edge, Plan
from pdcompile.plan.times import times_of
from pdcompile.reference import reference
from pdcompile.schedule import Action, Schedule
from pdcompile.schedule.registry import allowed, several_a_rank
from tests.helpers.alike import PLANNED, Call
from tests.helpers.launch import processes
from tests.helpers.schedules import chain, make_plan
from tests.test_schedules import drawn_in, picture

ROOT = Path(__file__).parent.parent
INFERENCE: dict[str, Any] = {**PLANNED, "schedule": "forward", "microbatches": 4}


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(16, 32), nn.Linear(32, 24), nn.Linear(24, 64), nn.Linear(64, 8))
    return nn.Sequential(*(part for one in layers for part in (one, nn.Dropout(0.5), nn.ReLU())))


def expected(model: nn.Module, x: Tensor, count: int = 4) -> Tensor:
    with torch.no_grad():
        return torch.cat([model.eval()(part) for part in x.chunk(count)])


def test_forward_is_its_picture() -> None:
    plan = make_plan("forward", 4, 5)
    assert picture(plan) == drawn_in(forward)
    assert simulate(plan).forecast.bubble == pytest.approx(3 / 8)  # (N − 1) / (m + N − 1)
    two = make_plan("forward", 4, 3, per_rank=2)
    assert picture(two)  # each rank has one microbatch at a time on both of its stages


@pytest.mark.parametrize("replicas", [(), (1, 2, 1), (2, 1, 3)])
@pytest.mark.parametrize("count", [1, 2, 7])  # fewer than replicas: these hold weights
def test_it_is_proved_and_its_clock_is_the_simulators(
    replicas: tuple[int, ...], count: int
) -> None:
    edges = (*chain(3), Edge("skip", 0, (1, 2), 3, False))
    plan = make_plan("forward", 3, count, edges=edges, replicas=replicas)
    for ordered in (False, True):
        text = str(check(plan, ordered=ordered))
        assert "coverage: each microbatch once forward on each of 3 stages" in text
        assert "any number of calls" in text
    machines = Cluster((Device(),) * plan.num_ranks, (Level("slow", plan.num_ranks, 4.0, 0.1),))
    plan = replace(plan, cluster=machines.to_toml())
    fast = times_of(plan, machines, ()).makespan((0, 0, 0), count)
    assert fast == pytest.approx(simulate(plan).forecast.step_seconds)
    assert len(simulate(plan).forecast.ledgers) == plan.num_ranks


def test_a_forward_that_is_dropped_is_found() -> None:
    plan = make_plan("forward", 2, 2)
    program = evaluation(plan, plan.edges, 2)
    column = [one for one in program.columns[1] if str(one) != "F 1 s1"]
    assert len(column) < len(program.columns[1])
    with pytest.raises(ScheduleError):
        check_programs(plan, [Schedule(program.name, (program.columns[0], tuple(column)))])


def test_a_plan_of_inference_holds_weights_once_and_what_is_in_flight() -> None:
    """Nothing is trained, whatever options of updates say; the training plan of the same model has
    gradients, states of its optimizer, and activations of several microbatches."""
    own = model()
    x = torch.randn(8, 16)
    updates = {"optimizer": torch.optim.SGD, "max_grad_norm": 1.0, "recompute": True}
    pipe = pdcompile.compile(deepcopy(own), (x,), stages=2, **INFERENCE, **updates)
    plan = pipe.plan
    assert pipe.optimizer is None
    assert (plan.training.warmup, plan.training.max_grad_norm) == ((0, 0), None)
    assert [stage.recompute for stage in plan.stages] == [False, False]
    assert not any(edge.gradient for edge in plan.edges)
    weights = sum(one.numel() * 4 for one in own.parameters())
    ledgers = plan.ledgers
    assert sum(one.weights_bytes for one in ledgers) == weights
    assert not any(one.gradients_bytes or one.optimizer_bytes or one.temporaries_bytes
                   for one in ledgers)  # fmt: skip
    assert sum(stage.backward_seconds for stage in plan.stages) == 0
    trained = pdcompile.compile(
        deepcopy(own), (x,), example_target=torch.randn(8, 8), loss_fn=nn.functional.mse_loss,
        stages=2, **{**INFERENCE, "schedule": "gpipe"},
    ).plan.ledgers  # fmt: skip
    for one, other in zip(ledgers, trained, strict=True):
        assert 2 * one.total_bytes < other.total_bytes
    assert torch.equal(pipe.predict(x), expected(own, x))
    loaded = Plan.from_json(plan.to_json())
    again = pdcompile.compile(deepcopy(own), (x,), plan=loaded, **PLANNED)
    assert again.optimizer is None
    assert torch.equal(again.predict(x), expected(own, x))


@pytest.mark.parametrize(
    "chosen",
    [
        {"stages": 2, "replicas": 2},
        {"stages": 4, "cluster": Cluster.local(2)},
        {"stages": 2, "replicas": "any", "cluster": Cluster.local(3)},
        {"stages": 2, "parts": 2, "verify": "auto"},
    ],
)
def test_replicas_several_stages_a_rank_and_parts(chosen: dict[str, Any]) -> None:
    own, x = model(), torch.randn(8, 16)
    pipe = pdcompile.compile(deepcopy(own), (x,), **{**INFERENCE, **chosen})
    for size in (8, 3):
        found = pipe.predict(x[:size])
        if size == 8:
            assert torch.equal(found, expected(own, x))
        torch.testing.assert_close(found, expected(own, x[:size], 1))
    result = pipe.eval_step(x)
    assert result.loss is None
    assert torch.equal(result.outputs, expected(own, x))


def test_no_other_cut_is_faster() -> None:
    """The plan is the best of all two cuts of unlike layers, over links that cost something."""
    machines = Cluster((Device(),) * 3, (Level("slow", 3, 2e7, 1e-6),), in_process=True)
    options = {**INFERENCE, "cluster": machines, "cut_tolerance": 0.0}
    best = pdcompile.compile(model(), (torch.randn(8, 16),), **options).plan.certificate
    assert best.gap == 0
    found = []
    for a in range(3, 12, 3):
        for b in range(a + 3, 12, 3):
            cut = (CutBefore(str(a)), CutBefore(str(b)))
            pipe = pdcompile.compile(model(), (torch.randn(8, 16),), constraints=cut, **options)
            found.append(pipe.plan.certificate.objective_seconds)
            assert simulate(pipe.plan).forecast.step_seconds == pytest.approx(found[-1])
    assert best.objective_seconds <= min(found) * (1 + 1e-9)
    assert best.objective_seconds < 0.999 * max(found)


def test_what_trains_is_refused() -> None:
    x, y = torch.randn(8, 16), torch.randn(8, 8)
    options = {**INFERENCE, "loss_fn": nn.functional.mse_loss}
    pipe = pdcompile.compile(model(), stages=2, **options)
    with pytest.raises(pdcompile.InputError, match="needs a target") as first:
        pipe.predict(x)
    assert "pipe.eval_step" in str(first.value.remedy)
    loss = pipe.eval_step(x, target=y).loss  # as the remedy says
    own = reference(model(), schedule="forward", microbatches=4, loss_fn=nn.functional.mse_loss)
    assert torch.equal(loss.wait(), own.eval_step(x, target=y).loss.wait())
    assert torch.equal(pipe.predict(x), own.predict(x))
    for one in (pipe, own):
        for call in (one.step, one.forward_backward):
            with pytest.raises(ConfigError, match="'forward' is for inference") as caught:
                call(x, target=y)
            assert "predict or eval_step" in str(caught.value.remedy)
    assert "forward" not in (*allowed("any"), *several_a_rank().split(" or "))


def test_commands(tmp_path: Path, call: Call) -> None:
    file, target = str(tmp_path / "plan.json"), f"{ROOT / 'examples' / 'int8.py'}:build"
    code, _, err = call("plan", target, "--schedule", "forward", "--cluster", "local:2",
                        "--costs", "estimated", "-o", file)  # fmt: skip
    assert code == 0, err
    code, out, err = call("explain", file)
    assert code == 0, err
    assert "forward: 2 stages on 2 ranks" in out
    code, out, err = call("simulate", file)
    assert code == 0, err
    assert "rank 1 ·" in out
    assert "B= backward" not in out
    code, _, err = call("schedule", "forward")
    assert code != 0
    assert "'forward' updates nothing" in err
    code, _, err = call("run", target, "--plan", file)
    assert code != 0
    assert "'forward' is for inference" in err


RANKS = """
import os
import torch
import pdcompile
from examples.int8 import built
model, ids = built(layers=2)
with torch.no_grad():
    whole = torch.cat([model(part) for part in ids.chunk(4)])
options = dict(schedule="forward", microbatches=4, costs="estimated", progress=False)
with pdcompile.compile(model, stages=2, outputs="all", **options) as pipe:
    for _ in range(3):
        assert torch.equal(pipe.predict(ids), whole)
    assert torch.equal(pipe.eval_step(ids).outputs, whole)
print("equal")
"""


def test_int8_on_two_ranks(tmp_path: Path) -> None:
    run = processes(RANKS, 2, tmp_path)
    assert run.code == 0, run
    assert run.output.count("equal") == 2, run


def test_int8_weights_take_a_byte_each() -> None:
    model, ids = built()
    with torch.no_grad():
        whole = torch.cat([model(part) for part in ids.chunk(4)])
    pipe = pdcompile.compile(model, (ids,), stages=2, **{**INFERENCE, "verify": "auto"})
    held = [*model.parameters(), *model.buffers()]
    assert sum(one.dtype == torch.int8 for one in held) == 16
    size = sum(one.numel() * one.element_size() for one in held)
    assert sum(one.weights_bytes for one in pipe.plan.ledgers) == size
    eight = sum(one.numel() for one in held if one.dtype == torch.int8)
    assert eight + 4 * sum(p.numel() for p in model.parameters()) < size < 2.2 * eight
    assert torch.equal(pipe.predict(ids), whole)


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_lora_trains_on_int8_and_gradients_cross_where_it_needs_them(first: int) -> None:
    """Equal to plain accumulation bit for bit; a stage before all LoRA parameters gets none."""
    model, ids = built(layers=2)
    own = with_lora(deepcopy(model), first)
    options = {"loss_fn": loss_fn, "optimizer": partial(torch.optim.AdamW, lr=1e-2),
               "microbatches": 4}  # fmt: skip
    plain = reference(deepcopy(own), **options)
    pipe = pdcompile.compile(
        own, (ids,), example_target=ids, constraints=(CutBefore("blocks.1"),), stages=2,
        **options, **PLANNED,
    )  # fmt: skip
    assert [edge.gradient for edge in pipe.plan.edges] == [first == 0] * len(pipe.plan.edges)
    program = make_stream(pipe.plan).step(4)[0]
    kinds = {one.action for column in program.columns for one in column}
    assert (Action.SEND_GRADIENT in kinds) == (first == 0)
    losses = [[one.step(ids, target=ids).loss.item() for _ in range(3)] for one in (plain, pipe)]
    assert losses[0] == losses[1]
    assert losses[0][2] < losses[0][0]
    after = pipe.to_model().state_dict()
    for name, value in plain.to_model().state_dict().items():
        assert torch.equal(value, after[name]), name
        if not name.endswith(("up.up", "up.down")):
            assert torch.equal(value, with_lora(deepcopy(model), first).state_dict()[name])
    trained = [stage.trainable_bytes for stage in pipe.plan.stages]
    assert (trained[0] == 0) == (first == 1)


def test_int8_weights_are_not_updated() -> None:
    """torch gives them no gradients, as buffers or as parameters."""
    linear, x = nn.Linear(16, 16), torch.randn(8, 16)
    eight = Int8Linear(linear, x)
    whole = nn.Sequential(eight, deepcopy(eight))
    with pytest.raises(RuntimeError, match="floating point"):
        nn.Parameter(eight.weight)
    for frozen in (False, True):
        if frozen:
            for one in whole:
                weight = one.weight
                del one.weight
                one.weight = nn.Parameter(weight, requires_grad=False)
        pipe = pdcompile.compile(whole, stages=2, loss_fn=nn.functional.mse_loss, **PLANNED)
        with pytest.raises(ConfigError, match="8-bit integers") as caught:
            pipe.step(x, target=x)
        assert "0.weight" in str(caught.value.where)
        assert pipe.predict(x).shape == x.shape
        pipe.close()
    lora = nn.Sequential(LoRA(deepcopy(whole[0]), 16, 16), whole[1])  # int8 parameters beside it
    pipe = pdcompile.compile(lora, stages=2, loss_fn=nn.functional.mse_loss, **PLANNED)
    before = lora[0].base.weight.clone()
    pipe.step(x, target=x).loss.item()
    assert torch.equal(lora[0].base.weight, before)
