"""Schedules that compute on older weights: 2bw, stash, vsync."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import pdcompile
from pdcompile.errors import ConfigError, PlanError
from pdcompile.plan import Certificate, Plan, StagePlan, Training
from tests.helpers.loops import (
    ADAMW,
    SGD,
    batches,
    delayed_by_hand,
    run,
    same,
)
from tests.helpers.models import convnet, gpt, loss_for, mlp


@pytest.mark.sample(2)
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("build", [gpt, convnet])
def test_2bw_computes_on_the_weights_before(
    build: Callable[[], nn.Module], clip: float | None
) -> None:
    model = build()
    data = batches(model, 6, 6, 4, 6, 6)
    expected = delayed_by_hand(model, data, lambda name: 1, 2, clip)
    trained, _ = run(
        model, data, optimizer=ADAMW, schedule="2bw", microbatches=2, max_grad_norm=clip
    )
    same(trained, expected)
    eager, _ = run(model, data, optimizer=ADAMW, microbatches=2, max_grad_norm=clip)
    assert any(
        not torch.equal(p, q) for p, q in zip(eager.parameters(), trained.parameters(), strict=True)
    )


def test_2bw_on_paper() -> None:
    # w ← w − lr·g(w'), loss = w·x: the gradient is x, so use (w·x)²/2 with gradient w'·x².
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    pipe = pdcompile.reference(
        model,
        loss_fn=lambda out, target: out.square().mean() / 2,
        optimizer=partial(torch.optim.SGD, lr=0.5),
        schedule="2bw",
        microbatches=1,
    )
    seen = []
    for _ in range(4):
        pipe.step(torch.ones(1, 1))
        seen.append(model.weight.item())
    # W1 = W0 − W0/2, W2 = W1 − W0/2, W3 = W2 − W1/2, W4 = W3 − W2/2
    assert seen == [0.5, 0.0, -0.25, -0.25]


def test_flush_and_evaluation_change_nothing() -> None:
    model = gpt(dropout=0.2)
    data = batches(model, *[4] * 4)
    plain, _ = run(model, data, optimizer=ADAMW, schedule="2bw", microbatches=2)
    other = copy.deepcopy(model)
    pipe = pdcompile.reference(
        other, loss_fn=loss_for(model), optimizer=ADAMW, schedule="2bw", microbatches=2
    )
    for x, y in data:
        pipe.step(x, target=y)
        pipe.flush()
        pipe.eval_step(x, target=y)
        pipe.predict(x)
    same(other, plain)


def plan(schedule: str, parameters: list[list[str]], warmup: tuple[int, ...]) -> Plan:
    stages = tuple(
        StagePlan(index=s, ops=(), parameters=tuple(names)) for s, names in enumerate(parameters)
    )
    return Plan(
        fingerprint="",
        stages=stages,
        edges=(),
        tied=(),
        training=Training(schedule=schedule, warmup=warmup),
        cluster="",
        certificate=Certificate(0.0, 0.0, "feasible", "nobody", 0.0, ""),
    )


def test_stash_and_vsync_compute_on_weights_of_their_age() -> None:
    model = mlp(layers=3)
    data = batches(model, *[2] * 7)
    by_stage = [[n for n, _ in model.named_parameters() if f".{s}." in n] for s in range(3)]
    lag = {name: 2 - s for s, names in enumerate(by_stage) for name in names}
    stash = plan("stash", by_stage, (2, 1, 0))
    trained, _ = run(model, data, optimizer=ADAMW, schedule="stash", microbatches=1, plan=stash)
    same(trained, delayed_by_hand(model, data, lag.__getitem__, 1, None))

    vsync = plan("vsync", by_stage, (3, 1, 0))
    vsync = replace(vsync, training=replace(vsync.training, max_grad_norm=0.1))
    trained, _ = run(model, data, optimizer=ADAMW, microbatches=1, plan=vsync)
    same(trained, delayed_by_hand(model, data, lambda name: 3, 1, 0.1))
    options: dict[str, Any] = {"schedule": "vsync", "max_grad_norm": 0.1, "stages": 3}
    trained, _ = run(model, data, optimizer=ADAMW, microbatches=1, **options)
    same(trained, delayed_by_hand(model, data, lambda name: 2, 1, 0.1))


def test_loading_weights_restarts_the_versions() -> None:
    model = mlp()
    data = batches(model, *[4] * 4)
    pipe = pdcompile.reference(
        copy.deepcopy(model), loss_fn=loss_for(model), optimizer=SGD, schedule="2bw",
        microbatches=2,
    )  # fmt: skip
    pipe.step(data[0][0], target=data[0][1])
    pipe.step(data[1][0], target=data[1][1])
    assert pipe.optimizer is not None
    pipe.optimizer.state.clear()
    pipe.load_state_dict(model.state_dict())
    for x, y in data:
        pipe.step(x, target=y)
    trained, _ = run(model, data, optimizer=SGD, schedule="2bw", microbatches=2)
    same(pipe.to_model(), trained)


def test_stash_needs_its_own_plan() -> None:
    model = mlp(layers=2)
    names = [name for name, _ in model.named_parameters()]
    options: dict[str, Any] = {"model": model, "schedule": "stash", "microbatches": 1}
    for parameters, said in [
        ([names, names[:1]], "several stages"),
        ([names, ["other"]], "does not have: other"),
    ]:
        with pytest.raises(ConfigError, match=said):
            pdcompile.reference(plan=plan("stash", parameters, (1, 0)), **options)
    with pytest.raises(PlanError, match="cannot read the plan"):
        pdcompile.reference(plan="no.json", **options)
