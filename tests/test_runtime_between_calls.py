"""Acts of users between two calls: each counts as for the reference, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import ConfigError, InputError
from pdcompile.reference import Reference, reference
from pdcompile.runtime.pipeline import Pipeline
from tests.helpers import models
from tests.helpers.pipelines import by_hand, states_equal

SCHEDULES = pytest.mark.parametrize("schedule", ["1f1b", "2bw"])


def pair(
    model: nn.Module, schedule: str, loss_fn: Any = None, **given: Any
) -> tuple[Pipeline, Reference]:
    options = {
        "loss_fn": loss_fn or models.loss_for(model),
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "schedule": schedule,
        "microbatches": 4,
        **given,
    }
    twin = copy.deepcopy(model)
    inputs, target = models.batch_for(model, 8)
    pipe = by_hand(model, 3, inputs, target, **options).prepare()
    plan = pipe.plan
    if callable(options.get("loss_reduction")):  # which a plan by hand does not know
        plan = replace(plan, training=replace(plan.training, loss_reduction="callable"))
    return pipe, reference(twin, plan=plan, **options)


def same_steps(pipe: Pipeline, eager: Reference, model: nn.Module, *, first: int = 0) -> None:
    results = []
    for t in range(first, first + 3):
        inputs, target = models.batch_for(model, 8, t)
        results.append([p.step(inputs, target=target).loss for p in (pipe, eager)])
    assert all(float(ours) == float(theirs) for ours, theirs in results)
    assert not states_equal(pipe.full_state_dict(), eager.full_state_dict())


@pytest.mark.sample(1)
@SCHEDULES
@pytest.mark.parametrize("replace", [False, True])
def test_values_that_the_user_changes_count(schedule: str, replace: bool) -> None:
    model = models.gpt(layers=1)  # tied: the copy on the last stage has to follow
    pipe, eager = pair(model, schedule)
    same_steps(pipe, eager, model)
    for runner in (pipe, eager):
        for parameter in runner.parameters():
            if replace:
                parameter.data = parameter.data * 0.9
            else:
                parameter.data.mul_(0.9)
    same_steps(pipe, eager, model, first=3)


def test_values_of_weights_in_flight_are_not_changed() -> None:
    model = models.mlp()
    pipe, _ = pair(model, "2bw")
    inputs, target = models.batch_for(model, 8)
    pipe.step(inputs, target=target)
    with torch.no_grad():
        model.layers[0].weight.mul_(0.5)
    with pytest.raises(ConfigError, match=r"in flight(.|\n)*layers.0.weight(.|\n)*pipe.flush"):
        pipe.step(inputs, target=target)
    with pytest.raises(ConfigError, match="in flight"):  # would apply the update in flight
        pipe.close()
    pipe.close()


def _freeze(model: Any) -> None:
    model.layers[0].weight.requires_grad_(False)


def _replace(model: Any) -> None:
    model.layers[0].weight = nn.Parameter(torch.zeros_like(model.layers[0].weight))


def _replace_module(model: Any) -> None:
    model.layers[0] = nn.Linear(16, 16)


def _hook(model: Any) -> None:
    model.layers[0].register_forward_hook(lambda module, inputs, output: 2 * output)


def test_a_parameter_made_trainable_is_refused_with_what_helps() -> None:
    """Another remedy than for one that was frozen: no group of the optimizer has it."""
    model = models.mlp()
    bias = model.get_parameter("layers.0.bias").requires_grad_(False)
    pipe, _ = pair(model, "1f1b")
    batch, target = models.batch_for(model, 8)
    pipe.step(batch, target=target)
    bias.requires_grad_(True)
    with pytest.raises(
        ConfigError, match=r"made trainable(.|\n)*requires_grad_\(False\)"
    ) as caught:
        pipe.step(batch, target=target)
    assert "param_groups" not in str(caught.value)
    bias.requires_grad_(False)
    pipe.step(batch, target=target)
    weight = model.get_parameter("layers.0.weight").requires_grad_(False)
    with pytest.raises(ConfigError, match=r"frozen(.|\n)*requires_grad_\(True\) again"):
        pipe.step(batch, target=target)
    weight.requires_grad_(True)
    (group,) = pipe.optimizer.param_groups
    group["params"] = [p for p in group["params"] if p is not weight]
    before = weight.detach().clone()
    pipe.step(batch, target=target)
    assert torch.equal(weight, before)


@pytest.mark.sample(5)
@SCHEDULES
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_freeze, "frozen"),
        (_replace, "replaced"),
        (nn.Module.double, "is torch.float64"),
        (_replace_module, "other submodules"),
        (_hook, "other hooks"),
    ],
)
def test_another_model_after_compile_is_refused(
    schedule: str, change: Callable[[Any], None], words: str
) -> None:
    model = models.mlp()
    pipe, _ = pair(model, schedule)
    change(model)
    inputs, target = models.batch_for(model, 8)
    with pytest.raises(ConfigError, match=rf"{words}(.|\n)*where: layers"):
        pipe.step(inputs, target=target)


@pytest.mark.sample(1)
@SCHEDULES
def test_a_part_of_the_weights_starts_a_new_history_of_all(schedule: str) -> None:
    model = models.mlp()
    pipe, eager = pair(model, schedule)
    same_steps(pipe, eager, model)
    part = {"layers.0.weight": torch.ones(16, 16)}
    for runner in (pipe, eager):
        runner.load_state_dict(part)
        for parameter in runner.parameters():  # a part of the start of that history
            parameter.data.mul_(0.9)
    same_steps(pipe, eager, model, first=3)


class Counting(torch.optim.Optimizer):
    """Counts its steps in an attribute and in its groups, and gives parameters new storage."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = group["lr"] / (self.count + group["k"])
                    parameter.data = parameter.data - rate * parameter.grad


@pytest.mark.sample(1)
@SCHEDULES
def test_an_optimizer_that_counts_its_steps(schedule: str) -> None:
    model = models.mlp()
    pipe, eager = pair(model, schedule, optimizer=Counting)
    same_steps(pipe, eager, model)
    assert pipe.optimizer.count == eager.optimizer.count == 3
    for runner in (pipe, eager):
        runner.optimizer.count, runner.optimizer.param_groups[0]["k"] = 0, 7
    same_steps(pipe, eager, model, first=3)


@pytest.mark.sample(1)
@SCHEDULES
def test_the_state_of_an_optimizer_is_complete(schedule: str) -> None:
    model = models.mlp()
    pipe, eager = pair(model, schedule)
    for t in range(3):
        inputs, target = models.batch_for(model, 8, t)
        pipe.step(inputs, target=target), eager.step(inputs, target=target)
    ours, theirs = pipe.optimizer.state_dict(), eager.optimizer.state_dict()
    for index, values in theirs["state"].items():
        for key, value in values.items():
            assert torch.equal(ours["state"][index][key], value)


@pytest.mark.sample(1)
@SCHEDULES
def test_buffers_that_are_filled_anew_after_each_step(schedule: str) -> None:
    model = models.mlp()
    pipe, eager = pair(model, schedule)
    x, y = torch.empty(8, 16), torch.empty(8, 16)
    for t in range(3):
        inputs, target = models.batch_for(model, 8, t)
        x.numpy()[:], y.numpy()[:] = inputs.numpy(), target.numpy()  # autograd cannot notice
        pipe.step(x, target=y), eager.step(inputs, target=target)
    assert not states_equal(pipe.full_state_dict(), eager.full_state_dict())


def test_inputs_that_wait_for_gradients_are_refused() -> None:
    model = models.mlp()
    pipe, _ = pair(model, "1f1b")
    inputs, target = models.batch_for(model, 8)
    scaled = inputs * torch.ones(1, requires_grad=True)
    with pytest.raises(InputError, match="detach"):
        pipe.step(scaled, target=target)
    assert torch.equal(pipe.predict(scaled), pipe.predict(inputs))


@pytest.mark.sample(1)
@SCHEDULES
def test_modes_around_a_call(schedule: str) -> None:
    model = models.mlp()
    pipe, eager = pair(model, schedule)
    with torch.no_grad():
        same_steps(pipe, eager, model)
    inputs, target = models.batch_for(model, 8)
    with torch.inference_mode():
        made_there = inputs.clone()
        with pytest.raises(ConfigError, match="inference_mode"):
            pipe.step(inputs, target=target)
    with pytest.raises(InputError, match="inference_mode"):
        pipe.step(made_there, target=target)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="autocast"):
        pipe.predict(inputs)
    same_steps(pipe, eager, model, first=3)


@pytest.mark.filterwarnings("error")
def test_modes_around_the_first_call() -> None:
    """They are named before anything is captured in them, which would warn of what differs."""
    inputs, target = models.batch_for("mlp", 8)
    pipe = pdcompile.compile(
        models.mlp(), loss_fn=models.loss_for("mlp"), optimizer=partial(torch.optim.SGD, lr=0.1),
        microbatches=4, cluster="local:2", costs="estimated",
    )  # fmt: skip
    for mode, name in [
        (torch.inference_mode(), "inference_mode"),
        (torch.autocast("cpu", torch.bfloat16), "autocast"),
    ]:
        for call in (pipe.step, pipe.prepare):
            with mode, pytest.raises(ConfigError, match=f"torch.{name} is on"):
                call(inputs, target=target)
    pipe.step(inputs, target=target)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.last(F.relu(self.first(x)) * scale)


def test_a_constant_that_is_left_out_is_not_the_captured_one() -> None:
    options = {"loss_fn": F.mse_loss, "microbatches": 4}
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe = by_hand(Scaled(), 2, None, **options)
    pipe.step(x, 2.0, target=y)
    with pytest.raises(InputError, match=r"left out, and was 2.0(.|\n)*scale"):
        pipe.step(x, target=y)
    pipe = by_hand(Scaled(), 2, None, **options)
    pipe.step(x, 1.0, target=y)
    pipe.step(x, target=y)  # the default is the same


def _ignoring(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1)


@pytest.mark.sample(1)
@SCHEDULES
def test_microbatches_without_items_count_nothing(schedule: str) -> None:
    model = models.gpt(layers=1)
    count = lambda args, kwargs, target: (target != -1).sum()  # noqa: E731
    pipe, eager = pair(model, schedule, loss_fn=_ignoring, loss_reduction=count)
    inputs, target = models.batch_for(model, 8)
    empty = torch.full_like(target, -1)
    with pytest.raises(InputError, match="at least one"):
        pipe.step(inputs, target=empty)
    target[:3] = -1  # all of the first microbatch and half of the second
    for _ in range(3):
        ours, theirs = (float(p.step(inputs, target=target).loss) for p in (pipe, eager))
        assert ours == theirs
    assert not states_equal(pipe.full_state_dict(), eager.full_state_dict())


def test_a_count_that_is_no_number() -> None:
    model = models.mlp()
    pipe, _ = pair(model, "1f1b", loss_reduction=lambda args, kwargs, target: target)
    inputs, target = models.batch_for(model, 8)
    with pytest.raises(ConfigError, match="not one number"):
        pipe.step(inputs, target=target)


@pytest.mark.parametrize("norm", [0, -1.0, float("nan"), "1", True])
def test_norms_that_are_none(norm: Any) -> None:
    model = models.mlp()
    pipe, _ = pair(model, "1f1b", optimizer=None)
    with pytest.raises(ConfigError, match="max_norm"):
        pipe.clip_grad_norm_(norm)
    assert float(pipe.clip_grad_norm_(1.0)) == 0
