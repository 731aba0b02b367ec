"""Losses scaled for float16: beside torch's own GradScaler, and beside the reference."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pdcompile
from pdcompile.eager.loss_scale import LossScale, Scale
from pdcompile.errors import ConfigError, ContractError
from pdcompile.plan import Plan
from pdcompile.runtime.transport.reductions import LocalSums, Norms
from tests.helpers.alike import COMMON, PLANNED, compiled
from tests.helpers.launch import processes
from tests.helpers.models import batch_for, gpt, loss_for, mlp, unet

FAST = {
    "init_scale": 2.0**22,
    "growth_interval": 3,
    "backoff_factor": 2.0**-4,
}  # overflows at first
FLOAT16: dict[str, Any] = {"autocast": torch.float16, "microbatches": 4}
STEPS = 9


def scaler(**changed: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{**FAST, **changed})


@settings(deadline=None)
@given(
    st.lists(st.booleans(), max_size=30),
    st.floats(1e-3, 1e30),
    st.integers(1, 4),
    st.floats(1.1, 9.0),
    st.floats(0.01, 0.9),
)
def test_a_scale_follows_torchs_own(
    finite: list[bool], first: float, interval: int, growth: float, backoff: float
) -> None:
    own = torch.amp.GradScaler(
        "cpu", first, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    own.scale(torch.ones(()))  # makes its tensors
    scale = Scale.of(own.state_dict())
    for one in finite:
        parameter.grad = torch.full((1,), 1.0 if one else float("inf"))
        own.unscale_(optimizer)
        own.update()
        scale = scale.after(finite=one)
        assert scale.state() == own.state_dict()


def by_hand(model: nn.Module, lag: int, max_norm: float | None) -> list[float]:
    """A loop of plain PyTorch with torch's GradScaler, on weights that are `lag` updates old."""
    loss_fn, own = loss_for(model), scaler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    own.scale(torch.ones(()))
    weights, scales = [deepcopy(model.state_dict())], [own.get_scale()]
    for t in range(STEPS):
        x, y = batch_for(model, 8, t)
        newest = deepcopy(model.state_dict())
        model.load_state_dict(weights[max(t - lag, 0)])
        then = scaler(init_scale=scales[max(t - lag, 0)])
        for part, target in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_fn(model(part), target)
            then.scale(loss * 0.25).backward()
        model.load_state_dict(newest)
        then.unscale_(optimizer)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        then.step(optimizer)
        # The rule of the scale, from one to the next, whatever scale this minibatch had.
        own._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = dict(
            then._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        )
        own.update()
        optimizer.zero_grad()
        weights.append(deepcopy(model.state_dict()))
        scales.append(own.get_scale())
    return scales


def trained(pipe: Any, model: nn.Module, steps: range = range(STEPS)) -> Any:
    for t in steps:
        x, y = batch_for(model, 8, t)
        pipe.step(x, target=y)
    return pipe.full_state_dict()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "lag", "max_norm"), [("1f1b", 0, 0.5), ("1f1b", 0, None), ("2bw", 1, 0.5)]
)
def test_it_is_torchs_grad_scaler(schedule: str, lag: int, max_norm: float | None) -> None:
    """Bit for bit, with updates that are skipped and scales that grow again."""
    model = mlp()
    scales = by_hand(model, lag, max_norm)
    assert any(b < a for a, b in pairwise(scales))
    assert any(b > a for a, b in pairwise(scales))
    own = scaler()
    options = {**FLOAT16, "schedule": schedule, "max_grad_norm": max_norm, "stages": 2}
    with compiled(mlp, grad_scaler=own, **options) as pipe:
        state = trained(pipe, mlp())
    assert own.get_scale() == scales[-1]
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name


CASES = [
    ("gpipe", mlp, {}),
    ("1f1b", partial(gpt, tied=True), {"max_grad_norm": 0.5}),
    ("1f1b", unet, {"recompute": True}),
    ("interleaved", mlp, {"stages": 4, "cluster": "local:2"}),
    ("zb-h1", mlp, {}),
    ("zb-v", mlp, {"stages": 4, "cluster": "local:2"}),
    ("2bw", partial(gpt, tied=True), {}),
    ("vsync", mlp, {"microbatches": 1}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("schedule", "build", "more"), CASES)
def test_every_schedule_is_its_reference(schedule: str, build: Any, more: dict[str, Any]) -> None:
    options = {**FLOAT16, "schedule": schedule, "stages": 2, "max_grad_norm": None, **more}
    own, theirs, model = scaler(), scaler(), build()
    with compiled(build, grad_scaler=own, **options) as pipe:
        state = trained(pipe, model)
        expected = pdcompile.reference(
            model, loss_fn=loss_for(model), optimizer=partial(torch.optim.AdamW, lr=0.05),
            grad_scaler=theirs, plan=pipe.plan, **{**options, "cluster": "auto"},
        )  # fmt: skip
    wanted = trained(expected, model)
    assert own.state_dict() == theirs.state_dict() != scaler().state_dict()
    for name, value in wanted.items():
        assert torch.equal(state[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "ranks"), [(2, 4), ((2, 1), 3)])
def test_replicas_skip_together(replicas: Any, ranks: int) -> None:
    own, theirs, model = scaler(), scaler(), mlp()
    options = {
        **FLOAT16,
        "schedule": "1f1b",
        "stages": 2,
        "replicas": replicas,
        "cluster": f"1x{ranks}",
    }
    with compiled(mlp, grad_scaler=own, **options) as pipe:
        state = trained(pipe, model)
    expected = pdcompile.reference(
        model, loss_fn=loss_for(model), optimizer=partial(torch.optim.AdamW, lr=0.05),
        grad_scaler=theirs, max_grad_norm=0.5, microbatches=4, autocast=torch.float16,
    )  # fmt: skip
    wanted = trained(expected, model)
    assert own.state_dict() == theirs.state_dict()
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=0.0, atol=2e-3)  # sums in float16


SCRIPT = (
    COMMON
    + """
scaler = lambda: torch.amp.GradScaler("cpu", 2.0**22, backoff_factor=2.0**-4, growth_interval=3)
for schedule in ("1f1b", "2bw"):
    own, other = scaler(), scaler()
    options = dict(autocast=torch.float16, max_grad_norm=0.5)
    pipe = compiled(models.mlp, schedule=schedule, microbatches=4, grad_scaler=own, **options)
    for t in range(9):
        x, y = models.batch_for("mlp", 8, t)
        pipe.step(x, target=y)
    state = pipe.full_state_dict()
    twin = reference(models.mlp(), loss_fn=models.loss_for("mlp"), microbatches=4,
                     schedule=schedule, optimizer=partial(torch.optim.AdamW, lr=0.05),
                     grad_scaler=other, **options)
    for t in range(9):
        x, y = models.batch_for("mlp", 8, t)
        twin.step(x, target=y)
    if rank == 0:
        assert all(torch.equal(state[n], value) for n, value in twin.full_state_dict().items())
    assert own.get_scale() == other.get_scale() < 2.0**22, (own.get_scale(), other.get_scale())
    pipe.close()
say("equal")
"""
)


@pytest.mark.slow
def test_on_two_ranks(tmp_path: Path) -> None:
    run = processes(SCRIPT, 2, tmp_path)
    assert run.code == 0, run
    assert run.output.count("equal") == 2, run


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_checkpoint_holds_the_scales(schedule: str, tmp_path: Path) -> None:
    options = {**FLOAT16, "schedule": schedule, "stages": 2}
    model, own, again = mlp(), scaler(), scaler()
    with compiled(mlp, grad_scaler=own, **options) as pipe:
        trained(pipe, model, range(4))
        pipe.save(tmp_path)
        wanted = trained(pipe, model, range(4, STEPS))
    with compiled(mlp, grad_scaler=again, resume=tmp_path, **options) as pipe:
        state = trained(pipe, model, range(4, STEPS))
    assert again.state_dict() == own.state_dict()
    assert all(torch.equal(state[name], value) for name, value in wanted.items())
    del options["autocast"]  # the plan has it, and that losses are scaled
    with compiled(mlp, resume=tmp_path, **options) as pipe:
        state = trained(pipe, model, range(4, STEPS))
    assert all(torch.equal(state[name], value) for name, value in wanted.items())
    with (
        pytest.warns(UserWarning, match="no grad_scaler= takes it"),
        compiled(mlp, resume=tmp_path, **{**options, "stages": 3}) as pipe,
    ):
        pipe.prepare()


def test_what_the_user_puts_into_the_scaler_counts() -> None:
    own, model = scaler(init_scale=8.0), mlp()
    with compiled(mlp, grad_scaler=own, stages=2, **FLOAT16) as pipe:
        trained(pipe, model, range(1))
        assert own.state_dict()["_growth_tracker"] == 1
        own.load_state_dict({**own.state_dict(), "scale": 2.0**30})
        before = pipe.full_state_dict()
        trained(pipe, model, range(1, 2))
        assert own.get_scale() == 2.0**26  # it overflowed
        after = pipe.full_state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())


def test_a_scaler_that_is_switched_off_is_none() -> None:
    off = torch.amp.GradScaler("cpu", enabled=False)
    with compiled(mlp, grad_scaler=off, stages=2, microbatches=4) as pipe:
        pipe.prepare()
        assert not pipe.plan.training.loss_scaling
        x, y = batch_for(mlp(), 8)
        pipe.forward_backward(x, target=y)


def test_a_plan_says_that_losses_are_scaled() -> None:
    with compiled(mlp, grad_scaler=True, stages=2, **FLOAT16) as pipe:
        plan = Plan.from_json(pipe.prepare().plan.to_json())
    assert plan.training.loss_scaling
    given = {name: one for name, one in PLANNED.items() if name != "costs"}
    model = mlp()
    x, y = batch_for(model, 8)
    with pdcompile.compile(model, plan=plan, loss_fn=loss_for(model), **given) as pipe:
        pipe.step(x, target=y)  # with torch's defaults, as nothing else is said
    with pytest.raises(ConfigError, match="grad_scaler"):
        pdcompile.compile(
            mlp(), plan=plan, loss_fn=loss_for(model), grad_scaler=False, **given
        ).step(x, target=y)


def test_a_scale_is_a_float32_from_the_first_minibatch_on() -> None:
    """Torch's GradScaler, too, shows the number that it was given until it first scales."""
    model, own, other = mlp(), scaler(init_scale=1000.1), scaler(init_scale=1000.1)
    with compiled(mlp, grad_scaler=own, stages=2, **FLOAT16) as pipe:
        state = trained(pipe, model, range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for t in range(2):
        x, y = batch_for(model, 8, t)
        for part, target in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_for(model)(model(part), target)
            other.scale(loss * 0.25).backward()
        other.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        other.step(optimizer)
        other.update()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name


def test_ranks_with_unlike_scales_are_named() -> None:
    board: dict[Any, Any] = {}
    parts = [
        Norms(LocalSums(board, 2, n), n, [[], []], {}, LossScale(scaler(init_scale=s), 0))
        for n, s in enumerate((8.0, 16.0))
    ]
    for part in parts:
        part.post(0, {})
    with pytest.raises(ContractError, match="scaled by 8 here, and by 12 in the mean"):
        parts[0].wait(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": None}, "optimizer=None makes none"),
        ({"detect_nonfinite": True}, "gradients that overflow"),
        ({"schedule": "stash", "microbatches": 1}, "weights of unlike age"),
        ({"grad_scaler": object()}, "is no torch.amp.GradScaler"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    given = {"grad_scaler": scaler(), "max_grad_norm": None, "stages": 2, **FLOAT16, **options}
    with pytest.raises(ConfigError, match=message):
        compiled(mlp, **given).prepare()


def test_gradients_without_an_update_are_refused() -> None:
    model = mlp()
    x, y = batch_for(model, 8)
    with compiled(mlp, grad_scaler=True, stages=2, **FLOAT16) as pipe:
        with pytest.raises(ConfigError, match="decides whether it makes an update") as caught:
            pipe.forward_backward(x, target=y)
        assert caught.value.where == "forward_backward"
        with pytest.raises(ConfigError, match="decides whether it makes an update"):
            pipe.clip_grad_norm_(1.0)  # would divide what is in .grad by the scale
        pipe.step(x, target=y)  # still usable


def test_parameters_in_float16_are_refused() -> None:
    with pytest.raises(ConfigError, match="this parameter is float16"):
        compiled(lambda: mlp().half(), grad_scaler=True, stages=2, microbatches=4).prepare()
