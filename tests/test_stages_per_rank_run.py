"""Several stages on one rank, running: bit for bit what the reference computes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import pdcompile
from pdcompile.errors import PlanError
from pdcompile.passes.check import check
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Plan
from tests.helpers.launch import processes
from tests.helpers.models import batch_for, gpt, loss_for, mlp, unet
from tests.helpers.pipelines import by_hand, states_equal
from tests.test_runtime_distributed import COMMON


@pytest.mark.parametrize(
    ("build", "ranks"),
    [
        (mlp, (0, 0, 0, 0)),
        (unet, (0, 0, 1, 1)),
        (unet, (0, 1, 0, 1)),
        (partial(gpt, tied=True), (0, 1, 0, 1)),
        (partial(gpt, tied=True), (0, 1, 1, 0)),
    ],
)
def test_in_one_process(build: Any, ranks: tuple[int, ...]) -> None:
    """Skips, tied weights, clipping, a short minibatch, evaluation, gradients without update."""
    model = build()
    x, y = batch_for(model, 8)
    options: dict[str, Any] = {
        "loss_fn": loss_for(model), "optimizer": partial(torch.optim.AdamW, lr=0.05),
        "schedule": "gpipe", "microbatches": 4, "max_grad_norm": 0.5,
    }  # fmt: skip
    expected = pdcompile.reference(deepcopy(model), **options)
    pipe = by_hand(model, 4, (x,), y, ranks=ranks, **options)
    for size in (8, 3, 8):
        ours = pipe.step(x[:size], target=y[:size]).loss
        theirs = expected.step(x[:size], target=y[:size]).loss
        assert ours is not None
        assert theirs is not None
        assert ours.item() == theirs.item()
    assert torch.equal(pipe.predict(x), expected.predict(x))
    for one in (pipe, expected):
        one.forward_backward(x, target=y)
        one.clip_grad_norm_(0.1)
        one.optimizer.step()
        one.zero_grad()
        one.step(x, target=y)
    assert states_equal(pipe.full_state_dict(), expected.full_state_dict()) == []
    assert pipe.stages == (0, 1, 2, 3)
    assert pipe.ranks == tuple(sorted(set(ranks)))
    check(pipe.plan)


TORCHRUN = (
    COMMON
    + """
for build, ranks in ((models.unet, (0, 1, 0, 1)), (partial(models.gpt, tied=True), (0, 1, 1, 0))):
    pipe, eager = pair(build(), "gpipe", 4, outputs="all", max_grad_norm=0.3, ranks=ranks)
    for t, size in enumerate([8, 3, 8]):
        inputs, target = models.batch_for(eager.to_model(), size, t)
        ours, theirs = (one.step(inputs, target=target) for one in (pipe, eager))
        assert float(ours.loss) == float(theirs.loss)
        assert torch.equal(ours.outputs, theirs.outputs)
    assert torch.equal(pipe.predict(inputs), eager.predict(inputs))
    full = pipe.full_state_dict()
    assert not states_equal(full, eager.full_state_dict() if rank == 0 else {})
    assert pipe.stages == tuple(s for s in range(4) if ranks[s] == rank)
    pipe.close()
say("equal")
"""
)


@pytest.mark.slow
def test_on_two_ranks(tmp_path: Path) -> None:
    run = processes(TORCHRUN, 2, tmp_path)
    assert run.code == 0, run
    assert run.output.count("equal") == 2, run


def sharing(plan: Plan, ranks: tuple[int, ...]) -> Plan:
    """The plan with its stages on these ranks, as somebody writes it who edits plan.json."""
    stages = [replace(stage, ranks=(r,)) for stage, r in zip(plan.stages, ranks, strict=True)]
    plan = replace(plan, stages=tuple(stages), forecast=None)
    seconds = simulate(plan).forecast.step_seconds
    certificate = replace(
        plan.certificate, objective_seconds=seconds, bound_seconds=0.0, status="feasible"
    )
    return replace(plan, certificate=certificate)


OPTIONS: dict[str, Any] = {
    "optimizer": partial(torch.optim.AdamW, lr=0.05), "schedule": "gpipe", "microbatches": 4,
    "costs": "estimated", "progress": False, "verify": "off",
}  # fmt: skip


@pytest.fixture(name="planned", scope="module")
def fixture_planned() -> Plan:
    """Four stages of a GPT on four ranks, by the planner."""
    model = gpt(tied=True)
    x, y = batch_for(model, 8)
    options = {**OPTIONS, "loss_fn": loss_for(model), "stages": 4}
    return pdcompile.compile(model, (x,), example_target=y, **options).plan


def given(plan: Plan, **options: Any) -> pdcompile.Pipeline:
    model = gpt(tied=True)
    x, y = batch_for(model, 8)
    options = {**OPTIONS, "loss_fn": loss_for(model), **options}
    return pdcompile.compile(model, (x,), example_target=y, plan=plan, **options)


@pytest.mark.parametrize("ranks", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)])
def test_compile_takes_a_plan_of_several_stages_a_rank(
    planned: Plan, ranks: tuple[int, ...]
) -> None:
    """It is read back, checked, simulated, proved and trained."""
    plan = Plan.from_json(sharing(planned, ranks).to_json())
    pipe = given(plan)
    model = gpt(tied=True)
    x, y = batch_for(model, 8)
    expected = pdcompile.reference(model, loss_fn=loss_for(model), **OPTIONS)
    for _ in range(2):
        losses = [one.step(x, target=y).loss for one in (pipe, expected)]
        assert losses[0].item() == losses[1].item()
    assert states_equal(pipe.full_state_dict(), expected.full_state_dict()) == []
    assert pipe.ranks == (0, 1)
    assert pipe.plan.forecast is not None
    assert len(pipe.plan.forecast.ledgers) == 2
    assert pipe.plan.forecast.step_seconds == plan.certificate.objective_seconds


def test_what_such_a_plan_may_not_say(planned: Plan) -> None:
    plan = sharing(planned, (0, 1, 0, 1))
    seconds = plan.certificate.objective_seconds
    right = repr(seconds)
    optimal = replace(plan.certificate, status="optimal", bound_seconds=seconds)
    as_alone = replace(plan.certificate, objective_seconds=planned.certificate.objective_seconds)
    for certificate, message in (
        (as_alone, "objective_seconds is .*, the stages take"),
        (optimal, "of ranks that hold several stages not all cuts are searched"),
    ):
        with pytest.raises(PlanError, match=message) as caught:
            given(replace(plan, certificate=certificate))
        assert f"write {right}, status 'feasible'" in str(caught.value.remedy)


def test_a_schedule_of_one_stage_a_rank_refuses_it(planned: Plan) -> None:
    training = replace(planned.training, schedule="1f1b", warmup=(3, 2, 1, 0))
    stages = [
        replace(stage, ranks=(r,)) for stage, r in zip(planned.stages, (0, 1, 0, 1), strict=True)
    ]
    plan = replace(planned, training=training, stages=tuple(stages), forecast=None)
    with pytest.raises(PlanError, match=r"rank 0 holds stages \[0, 2\]; sched") as caught:
        given(plan, schedule="1f1b")
    assert (
        caught.value.remedy
        == "give every rank to one stage, or use schedule gpipe or interleaved or zb-v"
    )


def test_the_stages_of_a_rank_share_its_memory(planned: Plan) -> None:
    """Each fits on a device alone; two of them do not."""
    plan = sharing(planned, (0, 1, 0, 1))
    most = max(ledger.total_bytes for ledger in simulate(planned).forecast.ledgers)
    cluster = pdcompile.Cluster.from_toml(planned.cluster)
    small = [replace(device, memory_bytes=most) for device in cluster.devices]
    plan = replace(plan, cluster=replace(cluster, devices=tuple(small)).to_toml(), problem=None)
    with pytest.raises(PlanError, match="left beside its other stages"):
        given(plan)


COMPILED = """
import pdcompile

model = models.gpt(tied=True)
inputs, target = models.batch_for("gpt", 8)
options = {
    "loss_fn": models.loss_for(model), "schedule": "gpipe", "microbatches": 4,
    "costs": "estimated", "progress": False, "verify": "off",
    "optimizer": partial(torch.optim.AdamW, lr=0.05),
}
eager = pdcompile.reference(models.gpt(tied=True), **options)
pipe = pdcompile.compile(model, (inputs,), example_target=target, plan=PLAN, **options)
for _ in range(3):
    ours, theirs = (one.step(inputs, target=target).loss for one in (pipe, eager))
    assert float(ours) == float(theirs)
assert len(pipe.stages) == 2
full = pipe.full_state_dict()
assert not states_equal(full, eager.full_state_dict() if rank == 0 else {})
pipe.close()
say("equal")
"""


@pytest.mark.slow
def test_a_plan_file_of_several_stages_a_rank_on_two_ranks(tmp_path: Path, planned: Plan) -> None:
    file = tmp_path / "plan.json"
    file.write_text(sharing(planned, (0, 1, 1, 0)).to_json())
    run = processes(COMMON + COMPILED.replace("PLAN", repr(str(file))), 2, tmp_path)
    assert run.code == 0, run
    assert run.output.count("equal") == 2, run
