"""Flush schedules are gradient accumulation, to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.eager.optimizers import NamedParameters
from tests.helpers.loops import (
    ADAMW,
    SGD,
    MakeOptimizer,
    accumulate,
    batches,
    by_hand,
    run,
    same,
)
from tests.helpers.models import batch_for, convnet, gpt, loss_for, mlp, unet


@pytest.mark.sample(3)
@pytest.mark.parametrize("make", [ADAMW, SGD])
@pytest.mark.parametrize("build", [gpt, mlp, convnet, unet])
def test_a_flush_schedule_is_gradient_accumulation(
    build: Callable[[], nn.Module], make: MakeOptimizer
) -> None:
    model = build()
    data = batches(model, 6, 6, 5)
    expected, losses = by_hand(model, data, make, 3)
    for schedule in ("1f1b", "gpipe"):
        trained, got = run(model, data, optimizer=make, schedule=schedule)
        same(trained, expected)
        assert got == losses


def test_clipping_is_that_of_torch() -> None:
    model = gpt()
    data = batches(model, 6, 6, 6)
    expected, _ = by_hand(model, data, ADAMW, 3, clip=0.1)
    unclipped, _ = by_hand(model, data, ADAMW, 3)
    trained, _ = run(model, data, optimizer=ADAMW, max_grad_norm=0.1)
    same(trained, expected)
    assert not torch.equal(expected.get_parameter("ln_f.weight"),
                           unclipped.get_parameter("ln_f.weight"))  # fmt: skip


def test_the_clip_norm_counts_tied_weights_once() -> None:
    model = gpt(tied=True)
    x, y = batch_for(model, 4)
    pipe = pdcompile.reference(model, loss_fn=loss_for(model), microbatches=2)
    pipe.forward_backward(x, target=y)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))
    torch.testing.assert_close(pipe.clip_grad_norm_(1e9), expected)
    before = [grad.clone() for grad in grads]
    norm = pipe.clip_grad_norm_(0.5)
    for grad, old in zip(grads, before, strict=True):
        torch.testing.assert_close(grad, old * (0.5 / norm))


def test_clipping_works_over_several_dtypes_and_without_gradients() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2).bfloat16()])
    pipe = pdcompile.reference(model, microbatches=1)
    assert pipe.clip_grad_norm_(1.0) == 0
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert float(pipe.clip_grad_norm_(1.0)) == pytest.approx(18**0.5, rel=1e-2)
    half = model.get_parameter("2.bias").grad
    assert half is not None
    assert half.dtype == torch.bfloat16
    assert float(half[0]) == pytest.approx(18**-0.5, rel=1e-2)


def test_short_minibatches_count_by_samples() -> None:
    model = mlp()
    x, y = batch_for(model, 7)
    whole = copy.deepcopy(model)
    loss_for(model)(whole(x), y).backward()  # type: ignore[no-untyped-call]
    pipe = pdcompile.reference(model, loss_fn=loss_for(model), microbatches=3)
    pipe.forward_backward(x, target=y)
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_fewer_samples_than_microbatches() -> None:
    model = mlp()
    data = batches(model, 4, 2, 1)
    expected = copy.deepcopy(model)
    optimizer = SGD(expected.parameters())
    for x, y in data:
        optimizer.zero_grad()
        accumulate(expected, x, y, min(4, len(x)))
        optimizer.step()
    same(run(model, data, optimizer=SGD, microbatches=4)[0], expected)


def test_loss_reductions() -> None:
    model = mlp()
    x, y = batch_for(model, 6)

    def gradient(reduction: object, loss_fn: object) -> tuple[Tensor, float]:
        model.zero_grad()
        pipe = pdcompile.reference(model, loss_fn=loss_fn, loss_reduction=reduction, microbatches=4)
        loss = pipe.forward_backward(x, target=y).loss
        grad = model.get_parameter("layers.0.weight").grad
        assert grad is not None
        assert loss is not None
        return grad, loss.item()

    def summed(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()

    def kept_mean(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target[:, 0].long())

    def kept_items(args: object, kwargs: object, target: Tensor) -> Tensor:
        return (target[:, 0] >= 0).sum()

    # four microbatches of 2, 2, 1, 1: the last one has nothing but an ignored item
    y[:, 0] = torch.tensor([1.0, -100, 3, 0, 2, -100])
    for reduction, loss_fn in [
        ("mean", F.mse_loss),
        ("sum", summed),
        (kept_items, kept_mean),
    ]:
        grad, loss = gradient(reduction, loss_fn)
        model.zero_grad()
        whole = loss_fn(model(x), y)  # type: ignore[operator]
        whole.backward()
        torch.testing.assert_close(grad, model.get_parameter("layers.0.weight").grad)
        assert loss == pytest.approx(whole.item(), rel=1e-5)


def test_a_learning_rate_scheduler_counts() -> None:
    model = mlp()
    data = batches(model, *[4] * 5)
    expected = copy.deepcopy(model)
    optimizer = ADAMW(expected.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for x, y in data:
        optimizer.zero_grad()
        accumulate(expected, x, y, 2)
        optimizer.step()
        scheduler.step()
    trained = copy.deepcopy(model)
    pipe = pdcompile.reference(trained, loss_fn=loss_for(model), optimizer=ADAMW, microbatches=2)
    assert pipe.optimizer is not None
    scheduler = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.5)
    for x, y in data:
        pipe.step(x, target=y)
        scheduler.step()
    same(trained, expected)


def test_parameter_groups_by_name() -> None:
    seen: list[NamedParameters] = []

    def make(parameters: NamedParameters) -> torch.optim.Optimizer:
        seen.append(parameters)
        groups = [{"params": [p for n, p in parameters.named if "bias" in n], "lr": 0.0}]
        groups.append({"params": [p for n, p in parameters.named if "weight" in n]})
        return torch.optim.SGD(groups, lr=0.1)

    model = mlp()
    trained, _ = run(model, batches(model, 4, 4), optimizer=make)
    assert [name for name, _ in seen[0].named] == [name for name, _ in model.named_parameters()]
    assert isinstance(seen[0], list)
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter, trained.get_parameter(name))
        assert moved == ("weight" in name)
