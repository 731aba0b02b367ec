"""Values and parameters that get no gradient: over messages too that is not a gradient of zeros."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.problem.constraints import CutBefore
from pdcompile.runtime.stage.gradients import absent, is_absent
from tests.helpers import models
from tests.helpers.alike import PLANNED, close


class Mixed(torch.autograd.Function):
    """x / 2 + y, which gives x a gradient where the sum of y is positive, and none elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.gives = bool(y.sum() > 0)
        return x / 2 + y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient / 2 if ctx.gives else None, gradient


class Sometimes(nn.Module):
    """`first` trains where Mixed lets it; `scale` is used on both sides of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.scale
        mixed: Tensor = Mixed.apply(h * self.scale, x)  # type: ignore[no-untyped-call]
        return self.second(mixed)


def batch(signs: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """A microbatch of two samples for each sign, which is that of the sum of its inputs."""
    torch.manual_seed(seed)
    rows = [sign * torch.rand(2, 4) for sign in signs]
    return torch.cat(rows), torch.randn(2 * len(signs), 4)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "1f1b", "stages": 3, "max_grad_norm": 0.5},
        {"schedule": "zb-h1", "stages": 2, "recompute": True},
        {"schedule": "2bw", "stages": 2},
        {"replicas": 2, "stages": 1},
        {"replicas": (2, 1)},
    ],
    ids=["1f1b", "zb-h1", "2bw", "replicas", "replicas of a stage"],
)
def test_none_stays_none(given: dict[str, Any]) -> None:
    """Weight decay and moments go on with zeros, and leave alone what has no gradient."""
    torch.manual_seed(0)
    model = Sometimes()
    common: dict[str, Any] = {
        "loss_fn": nn.functional.mse_loss, "microbatches": 2,
        "optimizer": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5),
        **{name: given[name] for name in ("schedule", "max_grad_norm") if name in given},
    }  # fmt: skip
    expected = pdcompile.reference(deepcopy(model), **common)
    x, y = batch([1, 1], 0)
    stages = given.get("stages", 2)
    cuts = [CutBefore("apply")] if stages == 2 else [CutBefore("apply"), CutBefore("second")]
    pipe = pdcompile.compile(
        model, x, example_target=y, constraints=cuts if stages > 1 else (),
        **{**common, **PLANNED, **given},
    )  # fmt: skip
    before = model.first.weight.detach().clone()
    for t, signs in enumerate([[-1, -1], [1, -1], [-1, -1], [-1, 1]]):
        x, y = batch(signs, t)
        for one in (pipe, expected):
            one.step(x, target=y)
        pipe.flush()
        if t == 0:
            assert torch.equal(model.first.weight, before)
    if "replicas" in given:
        close(pipe.full_state_dict(), expected.full_state_dict())
    else:
        for name, value in expected.full_state_dict().items():
            assert torch.equal(pipe.full_state_dict()[name], value), name
    pipe.close()


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64],
    ids=str,
)
def test_what_says_so_is_no_gradient(dtype: torch.dtype) -> None:
    like = torch.ones(3, 2, dtype=dtype)
    assert is_absent(absent(like))
    assert is_absent(absent(like).clone().t())
    assert is_absent(absent(like[0, 0]))
    assert not is_absent(absent(like[:0]))
    zeros = torch.zeros(1, dtype=dtype)
    infinity = zeros.real.reciprocal()
    for value in (zeros, infinity, infinity - infinity, like * float("nan"), like):
        assert not is_absent(value)
    assert not is_absent(absent(like)[1:])


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    """Over the tokens that are not 0; 0/0 without any, and its gradient nan."""
    counts = (target != 0).float()
    each = nn.functional.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return (each * counts).sum() / counts.sum()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "1f1b", "max_grad_norm": 0.5},
        {"schedule": "zb-h1"},
        {"schedule": "2bw"},
        {"schedule": "gpipe", "recompute": True},
        {"replicas": (2, 1)},
    ],
    ids=["1f1b", "zb-h1", "2bw", "recompute", "replicas"],
)
def test_a_microbatch_of_no_items_has_no_gradients(given: dict[str, Any]) -> None:
    model = models.gpt(layers=2)
    common: dict[str, Any] = {
        "loss_fn": masked_mean, "microbatches": 4,
        "loss_reduction": lambda args, kwargs, target: int((target != 0).sum()),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        **{name: given[name] for name in ("schedule", "max_grad_norm") if name in given},
    }  # fmt: skip
    expected, plain = pdcompile.reference(deepcopy(model), **common), deepcopy(model)
    x, y = models.batch_for(model, 8)
    pipe = pdcompile.compile(
        model, x, example_target=y.clamp(min=1), **{**common, **PLANNED, "stages": 2, **given}
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for t in range(3):
        x, y = models.batch_for(model, 8, t)
        y = y.clamp(min=1)
        y[2:4] = 0  # the second microbatch
        y[5, 3:] = 0
        found, theirs = pipe.step(x, target=y).loss, expected.step(x, target=y).loss
        assert float(found) == pytest.approx(float(theirs), rel=1e-6)
        optimizer.zero_grad()
        loss = masked_mean(plain(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        if "max_grad_norm" in given:
            nn.utils.clip_grad_norm_(plain.parameters(), given["max_grad_norm"])
        optimizer.step()
    pipe.flush()
    ours, reference = pipe.full_state_dict(), expected.full_state_dict()
    assert all(value.isfinite().all() for value in ours.values())
    for name, value in ours.items():
        torch.testing.assert_close(value, reference[name])
        if given.get("schedule") != "2bw":  # whose gradients are of older weights
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
    pipe.close()
