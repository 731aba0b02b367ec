"""Several stages on one rank, running: bit for bit what the reference computes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import pdcompile
from pdcompile.errors import PlanError
from pdcompile.passes.check import check
from pdcompile.passes.simulate import simulate
from pdcompile.passes.stages.assemble import FINGERPRINT_DIGITS
from pdcompile.plan import Plan
from tests.helpers import alike
from tests.helpers.alike import COMMON
from tests.helpers.launch import processes
from tests.helpers.models import batch_for, gpt, loss_for, mlp, unet
from tests.helpers.pipelines import by_hand

OPTIONS: dict[str, Any] = {"schedule": "gpipe", "microbatches": 4, "max_grad_norm": None}
TIED = partial(gpt, layers=1, tied=True)
compiled, train_alike = partial(alike.compiled, **OPTIONS), partial(alike.train_alike, **OPTIONS)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("build", "ranks"),
    [
        (mlp, (1, 1, 3, 3)),  # ranks that hold nothing before and between them
        (mlp, (0, 0, 0, 0)),
        (unet, (0, 0, 1, 1)),
        (unet, (0, 1, 0, 1)),
        (TIED, (0, 1, 0, 1)),
        (TIED, (0, 1, 1, 0)),
    ],
)
def test_in_one_process(build: Any, ranks: tuple[int, ...]) -> None:
    """Skips, tied weights, clipping, a short minibatch, evaluation, gradients without update."""
    model = build()
    x, y = batch_for(model, 8)
    options = {**alike.OPTIONS, **OPTIONS, "max_grad_norm": 0.5, "loss_fn": loss_for(model)}
    pipe = by_hand(model, 4, (x,), y, ranks=ranks, **options).prepare()
    train_alike(pipe, build, max_grad_norm=0.5)
    assert pipe.stages == (0, 1, 2, 3)
    assert pipe.ranks == tuple(sorted(set(ranks)))
    check(pipe.plan)


TORCHRUN = (
    COMMON
    + """
for build, ranks in ((models.unet, (0, 1, 0, 1)), (partial(models.gpt, tied=True), (0, 1, 1, 0))):
    pipe, _ = pair(build(), "gpipe", 4, outputs="all", max_grad_norm=0.3, ranks=ranks)
    options = dict(schedule="gpipe", microbatches=4, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    train_alike(pipe, build, everywhere=True, max_grad_norm=0.3, **options)
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


UNASKED = (
    COMMON
    + """
import pdcompile
options = dict(optimizer=None, microbatches=4, costs="estimated", verify="off", progress=False)
for schedule, given in (("interleaved", {"stages": 4}), ("zb-v", {"replicas": 2})):
    for steps in (1, 3):
        model = models.mlp()
        inputs, target = models.batch_for(model, 8)
        pipe = pdcompile.compile(model, loss_fn=models.loss_for(model), schedule=schedule,
                                 **options, **given)
        losses = [pipe.step(inputs, target=target).loss for _ in range(steps)]
        pipe.close()
        assert len({float(loss) for loss in losses}) == 1
say("closed")
"""
)


@pytest.mark.slow
def test_losses_that_nobody_asks_for(tmp_path: Path) -> None:
    """Any stage of a rank may hear them: neither the next step nor the end waits for ever."""
    run = processes(UNASKED, 2, tmp_path)
    assert run.code == 0, run
    assert run.output.count("closed") == 2, run


def sharing(plan: Plan, ranks: tuple[int, ...]) -> Plan:
    """The plan with its stages on these ranks, as somebody writes it who edits plan.json."""
    stages = [replace(stage, ranks=(r,)) for stage, r in zip(plan.stages, ranks, strict=True)]
    plan = replace(plan, stages=tuple(stages), forecast=None)
    bare = [replace(stage, update_seconds=0.0) for stage in stages]  # certificates are without
    seconds = simulate(replace(plan, stages=tuple(bare))).forecast.step_seconds
    certificate = replace(
        plan.certificate, objective_seconds=seconds, bound_seconds=0.0, status="feasible"
    )
    return replace(plan, certificate=certificate)


@pytest.fixture(name="planned", scope="module")
def fixture_planned() -> Plan:
    """Four stages of a GPT on four ranks, by the planner."""
    return compiled(TIED, stages=4).plan


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "ranks", [pytest.param((0, 0, 1, 1), marks=pytest.mark.slow), (0, 1, 0, 1), (0, 1, 1, 0)]
)
def test_compile_takes_a_plan_of_several_stages_a_rank(
    planned: Plan, ranks: tuple[int, ...]
) -> None:
    """It is read back, checked, simulated, proved and trained."""
    plan = Plan.from_json(sharing(planned, ranks).to_json())
    pipe = compiled(TIED, plan=plan)
    train_alike(pipe, TIED)
    assert pipe.ranks == (0, 1)
    assert pipe.plan.forecast is not None
    assert len(pipe.plan.forecast.ledgers) == 2
    updates = max(stage.update_seconds for stage in plan.stages)
    certified = plan.certificate.objective_seconds
    assert 0 < pipe.plan.forecast.step_seconds - certified <= 2.001 * updates


def test_what_such_a_plan_may_not_say(planned: Plan) -> None:
    plan = sharing(planned, (0, 1, 0, 1))
    seconds = plan.certificate.objective_seconds
    right = repr(seconds)
    found = replace(plan.certificate, fastest_seconds=None)
    as_alone = replace(found, objective_seconds=planned.certificate.objective_seconds)
    with pytest.raises(PlanError, match=r"objective_seconds is .*, the stages take") as caught:
        compiled(TIED, plan=replace(plan, certificate=as_alone))
    assert f"write {right}, status 'feasible'" in str(caught.value.remedy)
    with pytest.raises(PlanError, match="with a gap of"):
        compiled(TIED, plan=replace(plan, certificate=replace(found, status="optimal")))


def test_a_schedule_of_one_stage_a_rank_refuses_it(planned: Plan) -> None:
    training = replace(planned.training, schedule="1f1b", warmup=(3, 2, 1, 0))
    stages = [
        replace(stage, ranks=(r,)) for stage, r in zip(planned.stages, (0, 1, 0, 1), strict=True)
    ]
    plan = replace(planned, training=training, stages=tuple(stages), forecast=None)
    with pytest.raises(PlanError, match=r"rank 0 holds stages \[0, 2\]; sched") as caught:
        compiled(TIED, plan=plan, schedule="1f1b")
    assert (
        caught.value.remedy
        == "give every rank to one stage, or use schedule gpipe or interleaved or zb-v"
    )


def test_the_stages_of_a_rank_share_its_memory(planned: Plan) -> None:
    """Each fits on a device alone; two of them do not."""
    plan = sharing(planned, (0, 1, 0, 1))
    most = max(ledger.total_bytes for ledger in simulate(planned).forecast.ledgers)
    cluster = pdcompile.Cluster.from_toml(planned.cluster)
    small = tuple(replace(device, memory_bytes=most) for device in cluster.devices)
    toml = replace(cluster, devices=small).to_toml()
    digest = sha256(toml.encode()).hexdigest()[:FINGERPRINT_DIGITS]
    known = planned.fingerprint.rpartition(".")[0]
    plan = replace(plan, cluster=toml, problem=None, fingerprint=f"{known}.{digest}")
    with pytest.raises(PlanError, match=r"rank 0 needs .* of memory by this plan, and has"):
        compiled(TIED, plan=plan)


COMPILED = (
    COMMON
    + """
build = partial(models.gpt, layers=1, tied=True)
options = dict(schedule="gpipe", microbatches=4, max_grad_norm=None)
pipe = compiled(build, plan=sys.argv[1], outputs="last", **options)
train_alike(pipe, build, **options)
assert len(pipe.stages) == 2
pipe.close()
say("equal")
"""
)


@pytest.mark.slow
def test_a_plan_file_of_several_stages_a_rank_on_two_ranks(tmp_path: Path, planned: Plan) -> None:
    file = tmp_path / "plan.json"
    file.write_text(sharing(planned, (0, 1, 1, 0)).to_json())
    run = processes(COMPILED, 2, tmp_path, str(file))
    assert run.code == 0, run
    assert run.output.count("equal") == 2, run
