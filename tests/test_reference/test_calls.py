"""Modes, buffers, outputs and models of several kinds."""

from __future__ import annotations

import copy
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import ConfigError
from tests.helpers.loops import (
    ADAMW,
    SGD,
    accumulate,
    batches,
    by_hand,
    run,
    same,
)
from tests.helpers.models import batch_for, convnet, gpt, loss_for, mlp, returns_loss


def test_batch_norm_advances_once_a_microbatch() -> None:
    model = convnet()
    trained, _ = run(model, batches(model, 6, 6), optimizer=SGD, microbatches=3)
    assert trained.get_buffer("bn1.num_batches_tracked") == 6


def tracked(model: nn.Module) -> list[float]:
    return [model.get_buffer(f"{name}.num_batches_tracked").item() for name in ("bn1", "bn2")]


def test_modes_are_kept() -> None:
    model = convnet()
    model.bn1.eval()
    before = model.bn1.running_mean.clone()  # type: ignore[union-attr]
    x, y = batch_for(model, 4)
    pipe = pdcompile.reference(model, loss_fn=loss_for(model), optimizer=SGD, microbatches=2)
    pipe.step(x, target=y)
    assert torch.equal(model.bn1.running_mean, before)  # type: ignore[arg-type]
    assert model.bn2.num_batches_tracked == 2
    pipe.eval_step(x, target=y)
    assert model.bn2.num_batches_tracked == 2
    assert (model.training, model.bn1.training) == (True, False)

    model.eval()
    model.bn2.train()  # a model that is evaluated with statistics of the batch
    pipe = pdcompile.reference(model, loss_fn=loss_for(model), optimizer=None, microbatches=2)
    pipe.predict(x)
    assert tracked(model) == [0, 4]
    pipe.step(x, target=y)
    assert tracked(model) == [2, 6]

    evaluated = convnet().eval()
    pipe = pdcompile.reference(evaluated, loss_fn=loss_for(model), optimizer=SGD, microbatches=1)
    pipe.step(x, target=y)
    assert evaluated.bn1.num_batches_tracked == 1
    assert not evaluated.training


def test_evaluation_is_plain_eval_on_the_newest_weights() -> None:
    model = gpt(dropout=0.4)
    x, y = batch_for(model, 5)
    pipe = pdcompile.reference(
        model, loss_fn=loss_for(model), optimizer=ADAMW, schedule="2bw", microbatches=2
    )
    for _ in range(3):
        pipe.step(x, target=y)
    expected = copy.deepcopy(model).eval()
    with torch.no_grad():
        parts = [expected(part) for part in x.tensor_split(2)]
        losses = [
            loss_for(model)(part, target) * (len(part) / 5)
            for part, target in zip(parts, y.tensor_split(2), strict=True)
        ]
    result = pipe.eval_step(x, target=y)
    assert torch.equal(result.outputs, torch.cat(parts))
    assert result.loss is not None
    assert result.loss.item() == (losses[0] + losses[1]).item()
    assert torch.equal(pipe.predict(x), torch.cat(parts))
    assert not pipe.predict(x).requires_grad


Output = namedtuple("Output", ["loss", "logits", "extra"])


class OwnLoss(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.kind = kind

    def forward(self, x: Tensor, *, target: Tensor | None = None) -> Any:
        logits = self.linear(x)
        loss = None if target is None else F.cross_entropy(logits, target)
        if self.kind is dict:
            return {"loss": loss, "logits": logits, "extra": (None, 3)}
        return Output(loss, logits, (None, 3))


@pytest.mark.parametrize("kind", [dict, Output])
def test_models_with_their_own_loss(kind: type) -> None:
    model = OwnLoss(kind)
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    pipe = pdcompile.reference(model, {"x": x, "target": y}, optimizer=None, microbatches=2)
    result = pipe.step_call((x,), {"target": y})
    loss = F.cross_entropy(model.linear(x), y)
    assert result.loss is not None
    assert result.loss.item() == pytest.approx(loss.item())
    output = Output(**result.outputs) if kind is dict else result.outputs
    torch.testing.assert_close(output.logits, model.linear(x).detach())
    assert not output.logits.requires_grad
    assert float(output.loss) == result.loss.item()
    assert output.extra == (None, 3)
    assert pipe.eval_step(x).loss is None
    with pytest.raises(ConfigError, match="no loss in it"):
        pipe.step(x)
    with pytest.raises(ConfigError, match="no loss_fn"):
        pipe.step(x, target=y)


def test_the_loss_of_the_model_is_an_output_like_others_beside_a_loss_fn() -> None:
    """It is stacked, one a microbatch: only what was differentiated is summed up."""
    model = OwnLoss(Output)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    pipe = pdcompile.reference(
        model, loss_fn=lambda out, _: out.loss + out.logits.mean(), optimizer=None, microbatches=2
    )
    result = pipe.step_call((x,), {"target": y}, y)
    parts = [F.cross_entropy(model.linear(x[i : i + 2]), y[i : i + 2]) for i in (0, 2)]
    torch.testing.assert_close(result.outputs.loss, torch.stack(parts).detach())
    assert result.loss is not None
    assert result.loss.item() == pytest.approx(
        sum(map(torch.Tensor.item, parts)) / 2 + model.linear(x).mean().item(), rel=1e-5
    )


def test_a_model_that_returns_the_loss() -> None:
    inner = mlp()
    model = returns_loss(copy.deepcopy(inner))
    x, y = batch_for(model, 5)
    pipe = pdcompile.reference(model, optimizer=None, microbatches=2)
    result = pipe.step(x, y)
    expected = accumulate(inner, x, y, 2)
    assert result.loss is not None
    assert torch.equal(result.loss.wait(), expected)
    assert torch.equal(result.outputs, expected)
    for p, q in zip(inner.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    assert float(pipe.predict(x, y)) == pytest.approx(float(expected))


def test_gradients_only() -> None:
    model = mlp()
    x, y = batch_for(model, 4)
    expected = copy.deepcopy(model)
    pipe = pdcompile.reference(model, loss_fn=loss_for(model), optimizer=None, microbatches=2)
    for call in (pipe.forward_backward, pipe.step):  # without optimizer, step is the same
        call(x, target=y)
        accumulate(expected, x, y, 2)
        for (name, p), q in zip(pipe.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]
    pipe.zero_grad()
    assert all(p.grad is None for p in pipe.parameters())


def test_step_starts_from_zero_gradients_even_after_a_failure() -> None:
    model = mlp()
    (x, y), = batches(model, 4)  # fmt: skip
    fail = True

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if fail and output.shape[0] == 1:
            raise ArithmeticError("boom")
        return F.mse_loss(output, target)

    trained = copy.deepcopy(model)
    pipe = pdcompile.reference(
        trained, loss_fn=loss_fn, optimizer=SGD, microbatches=3, schedule="2bw"
    )
    with pytest.raises(ArithmeticError):
        pipe.step(x, target=y)
    same(trained, model)
    assert all(p.grad is None for p in trained.parameters())
    fail = False
    pipe.step(x, target=y)
    same(trained, by_hand(model, [(x, y)], SGD, 3)[0])


def test_frozen_and_unused_parameters_stay() -> None:
    model = mlp()
    model.layers[0].requires_grad_(False)
    model.unused = nn.Linear(2, 2)
    trained, _ = run(model, batches(model, 4, 4, 4), optimizer=ADAMW, schedule="2bw")
    for name in ("layers.0.weight", "unused.weight"):
        assert torch.equal(model.get_parameter(name), trained.get_parameter(name))
    assert not torch.equal(
        model.get_parameter("layers.1.weight"), trained.get_parameter("layers.1.weight")
    )


def test_a_model_without_parameters() -> None:
    pipe = pdcompile.reference(nn.ReLU(), loss_fn=F.mse_loss, optimizer=ADAMW, microbatches=2)
    assert pipe.optimizer is not None  # a learning-rate scheduler works all the same
    assert sum(p.numel() for group in pipe.optimizer.param_groups for p in group["params"]) == 0
    result = pipe.step(torch.ones(4, 2), target=torch.zeros(4, 2))
    assert result.loss is not None
    assert float(result.loss) == 1.0


def test_autocast_is_around_forward_and_loss() -> None:
    model = mlp()
    x, y = batch_for(model, 4)
    expected = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = expected(x)
        loss = F.mse_loss(output, y)
    loss.backward()  # type: ignore[no-untyped-call]
    for chosen in (torch.bfloat16, "bfloat16"):
        model.zero_grad()
        pipe = pdcompile.reference(
            model, loss_fn=F.mse_loss, optimizer=None, microbatches=1, autocast=chosen
        )
        result = pipe.forward_backward(x, target=y)
        assert result.outputs.dtype == torch.bfloat16
        assert torch.equal(result.outputs, output)
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
