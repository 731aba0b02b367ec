"""The promise: what the pipeline trains is what the model trains, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from tests.helpers import models
from tests.helpers.cases import case

Build = Callable[[], nn.Module]
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
MOMENTUM = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)

BUILDERS: dict[str, Build] = {
    "gpt": models.gpt,
    "gpt-dropout": partial(models.gpt, dropout=0.1),
    "mlp": models.mlp,
    "convnet": models.convnet,
    "unet": models.unet,
}


def pair(build: Build) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = build()
    return model, copy.deepcopy(model)


def batches_for(model: nn.Module, sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    return [models.batch_for(model, size, seed) for seed, size in enumerate(sizes)]


def train(
    pipe: Any, batches: list[tuple[Tensor, Tensor]], *, schedule_lr: bool, flush_at: int | None
) -> list[float]:
    losses = []
    decay = None
    for t, (inputs, target) in enumerate(batches):
        losses.append(float(pipe.step(inputs, target=target).loss))
        if schedule_lr:
            decay = decay or torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.5)
            decay.step()
        if t == flush_at:
            pipe.flush()
    pipe.flush()
    return losses


def assert_equal_states(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), f"{name} differs"


def compare_training(
    build: Build,
    schedule: str,
    stages: int,
    *,
    sizes: list[int],
    microbatches: int = 4,
    optimizer: Any = ADAMW,
    clip: float | None = None,
    schedule_lr: bool = False,
    flush_at: int | None = None,
    verify: str = "off",  # training itself compares what stages compute
) -> None:
    model, twin = pair(build)
    batches = batches_for(model, sizes)
    common: dict[str, Any] = {
        "loss_fn": models.loss_for(model),
        "optimizer": optimizer,
        "schedule": schedule,
        "microbatches": microbatches,
        "max_grad_norm": clip,
    }
    given = {"costs": "estimated", "stages": stages, "verify": verify, "time_limit": 0}
    with pdcompile.compile(model, **given, **common) as pipe:
        ours = train(pipe, batches, schedule_lr=schedule_lr, flush_at=flush_at)
        state = pipe.full_state_dict()
    expected = pdcompile.reference(twin, plan=pipe.plan, **common)
    theirs = train(expected, batches, schedule_lr=schedule_lr, flush_at=flush_at)
    assert ours == theirs
    assert_equal_states(state, expected.full_state_dict())


FAST = {"gpipe": ("gpt-dropout", "convnet", "unet"), "1f1b": ("gpt", "mlp")}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "stages", "name"),
    [
        case(stages == 3 and name in FAST[schedule], schedule, stages, name)
        for schedule in FAST
        for stages in (2, 3, 4)
        for name in BUILDERS
    ],
)
def test_flush_schedules_train_as_gradient_accumulation(
    name: str, schedule: str, stages: int
) -> None:
    compare_training(BUILDERS[name], schedule, stages, sizes=[8, 8])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(BUILDERS))
def test_flush_schedule_with_clipping(name: str) -> None:
    compare_training(BUILDERS[name], "1f1b", 3, sizes=[8, 8], clip=0.1, verify="auto")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "stages", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", list(BUILDERS))
def test_2bw_trains_as_the_delayed_update(name: str, stages: int) -> None:
    compare_training(BUILDERS[name], "2bw", stages, sizes=[8] * 6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", [ADAMW, pytest.param(MOMENTUM, marks=pytest.mark.slow)])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("flush_at", [None, 2])
def test_2bw_with_clipping_flush_and_a_changing_learning_rate(
    optimizer: Any, clip: float | None, flush_at: int | None
) -> None:
    compare_training(
        models.gpt, "2bw", 3, sizes=[8] * 6,
        optimizer=optimizer, clip=clip, schedule_lr=True, flush_at=flush_at,
    )  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "2bw"])
@pytest.mark.parametrize("sizes", [[8, 8, 3], [8, 2, 8, 8], [7, 7, 1, 7]])
def test_short_minibatches(schedule: str, sizes: list[int]) -> None:
    compare_training(models.gpt, schedule, 3, sizes=sizes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["gpt", "convnet", "unet"])
def test_gradients_of_the_middle_level(name: str, schedule: str) -> None:
    model, twin = pair(BUILDERS[name])
    inputs, target = models.batch_for(model, 8, 0)
    loss_fn = models.loss_for(model)
    with pdcompile.compile(
        model, loss_fn=loss_fn, optimizer=None, stages=3, schedule=schedule,
        microbatches=4, costs="estimated",
    ) as pipe:  # fmt: skip
        for _ in range(2):
            pipe.forward_backward(inputs, target=target)
        ours = {name: p.grad.clone() for name, p in pipe.named_parameters()}
    for _ in range(2):
        for x, y in zip(inputs.tensor_split(4), target.tensor_split(4), strict=True):
            (loss_fn(twin(x), y) * (len(x) / 8)).backward()
    theirs = {name: p.grad for name, p in twin.named_parameters()}
    for one in pipe.plan.tied:  # whose stages accumulate the gradients of their own uses
        torch.testing.assert_close(ours.pop(one.fqn), theirs.pop(one.fqn))
    assert_equal_states(ours, theirs)


def test_the_model_alone_and_nothing_else() -> None:
    torch.manual_seed(0)
    model = models.ReturnsLoss(models.mlp())
    x, y = models.batch_for(model.inner, 8, 0)
    pipe = pdcompile.compile(model)
    losses = [float(pipe.step(x, y).loss) for _ in range(3)]
    assert losses[2] < losses[0]
    pipe.close()


def test_a_model_and_a_loss_function_and_nothing_else() -> None:
    torch.manual_seed(0)
    model = models.mlp()
    x, y = models.batch_for(model, 8, 0)
    pipe = pdcompile.compile(model, loss_fn=models.loss_for(model))
    losses = [float(pipe.step(x, target=y).loss) for _ in range(3)]
    assert losses[2] < losses[0]
    pipe.close()


class ReturnsItsOwn(nn.Module):
    """Returns a parameter, a buffer, views of them and a number beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.mlp()
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.count.add_(1)
        y = self.inner(x) * self.scale
        own = {"scale": self.scale, "count": self.count, "size": x.shape[0]}
        return {"y": y, "row": self.scale[None], "counts": self.count.view(1), **own}


@pytest.mark.sample(1)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_outputs_that_are_the_models_own_tensors_are_those_of_the_forward(
    microbatches: int,
) -> None:
    """Whenever they are read, also after later minibatches."""
    model, twin = pair(ReturnsItsOwn)
    x, y = models.batch_for(models.mlp(), 8, 0)
    common: dict[str, Any] = {
        "loss_fn": lambda out, target: ((out["y"] - target) ** 2).mean(),
        "optimizer": MOMENTUM,
        "microbatches": microbatches,
        "outputs": "everything",
    }
    expected = pdcompile.reference(twin, **common)
    with pdcompile.compile(model, costs="estimated", stages=3, **common) as pipe:
        results = [(pipe.step(x, target=y), expected.step(x, target=y)) for _ in range(2)]
        results.append((pipe.eval_step(x, target=y), expected.eval_step(x, target=y)))
        pipe.step(x, target=y)
        expected.step(x, target=y)
        assert (results[0][0].outputs["scale"] == 1).all()
        for ours, theirs in results:
            assert ours.outputs["size"] == theirs.outputs["size"] == 8 // microbatches
            for key in ("y", "scale", "row", "count", "counts"):
                assert torch.equal(ours.outputs[key], theirs.outputs[key]), key


class RunningNorm(nn.Module):
    """Writes buffers in forward and uses them in differentiable ops, whole and as views."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(16))
        self.register_buffer("shift", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.scale.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.shift[2:].add_(1)
        return y * self.scale + y * self.shift[None]


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_buffers_that_later_microbatches_write_before_the_backward(schedule: str) -> None:
    model, twin = pair(lambda: nn.Sequential(RunningNorm(), RunningNorm(), nn.Linear(16, 16)))
    batches = batches_for(models.mlp(), [8, 8, 3, 8])
    common: dict[str, Any] = {
        "loss_fn": nn.functional.mse_loss,
        "optimizer": MOMENTUM,
        "schedule": schedule,
        "microbatches": 4,
    }
    with pdcompile.compile(model, costs="estimated", stages=3, **common) as pipe:
        ours = train(pipe, batches, schedule_lr=False, flush_at=None)
        state = pipe.full_state_dict()
    expected = pdcompile.reference(twin, plan=pipe.plan, **common)
    assert ours == train(expected, batches, schedule_lr=False, flush_at=None)
    assert_equal_states(state, expected.full_state_dict())
