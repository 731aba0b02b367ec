"""Values that are not finite are named: the op, the stage, the microbatch."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import ConfigError, NonFiniteError
from tests.helpers import models
from tests.helpers.pipelines import by_hand


class Log(nn.Module):
    """Takes a logarithm, of 0 where a sample says so, in its second half."""

    captured_once = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu() * 0 + x
        masked = torch.softmax(y.masked_fill(y < -50.0, float("-inf")), -1)
        return self.second(masked) + torch.log(y.clamp(min=0)).sum()


def mean_difference(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).mean()


def pipe_of(model: nn.Module, inputs: Tensor, **options: Any) -> Any:
    return by_hand(model, 2, inputs, inputs, microbatches=4, schedule="1f1b",
                   loss_fn=mean_difference, **options).prepare()  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [0.0, math.nan])
def test_the_first_op_is_named(value: float) -> None:
    inputs = torch.rand(8, 4) + 1
    pipe = pipe_of(Log(), inputs, detect_nonfinite=True)
    pipe.step(inputs, target=inputs)
    inputs[5] = value
    with pytest.raises(NonFiniteError) as caught:
        pipe.step(inputs, target=inputs)
    note = "".join(caught.value.__notes__)
    assert "of minibatch 1, microbatch 2" in note
    assert "stage_1.py:" in note or value != 0
    if value == 0:
        assert caught.value.message == (
            "sum made infinity, in a result of shape (); before, of finite values, log made "
            "infinity, in a result of shape (2, 4)"
        )
    else:
        assert caught.value.message == (
            "x has NaN at [1, 0] and 3 other places: sum made NaN, in a result of shape ()"
        )
        assert caught.value.where == "x"


class Masked(nn.Module):
    """Has infinity in its forward, as masks do, and a weight in each half."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, extra: Tensor) -> Tensor:
        mask = torch.full((4, 4), float("-inf")).triu(1)
        return self.second(torch.softmax(self.first(x) @ mask.exp(), -1)) + extra


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["x", "extra", "target", "first.weight", "second.bias"])
def test_an_input_or_weight_that_has_nan_is_named(name: str) -> None:
    """Wherever it comes in, and whatever else of the forward has infinity."""
    model = Masked()
    given = {"x": torch.rand(8, 4), "extra": torch.rand(8, 4), "target": torch.rand(8, 4)}
    pipe = by_hand(
        model, 2, (given["x"], given["extra"]), given["target"], microbatches=4, schedule="1f1b",
        loss_fn=lambda y, t: (y - t).mean(), detect_nonfinite=True,
    ).prepare()  # fmt: skip

    def step() -> None:
        pipe.step(given["x"], given["extra"], target=given["target"])

    step()
    tensors = given | dict(model.named_parameters())
    with torch.no_grad():
        tensors[name][-1] = math.nan
    with pytest.raises(NonFiniteError, match=rf"{name} has NaN at \[\d.* made NaN") as caught:
        step()
    assert caught.value.where == name


def test_a_gradient_is_named() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.sqrt(self.first(x) * 0))

    inputs = torch.rand(8, 4)
    with pytest.raises(NonFiniteError, match=r"made (NaN|infinity)") as caught:
        pipe_of(Root(), inputs, detect_nonfinite=True).step(inputs, target=inputs)
    assert "backward of minibatch 0, microbatch 0" in "".join(caught.value.__notes__)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gpt", "convnet"])
def test_what_is_finite_trains_alike(name: str) -> None:
    states = []
    inputs, target = models.batch_for(name, 8)
    for detects in (False, True):
        torch.manual_seed(0)
        options = {"microbatches": 4, "schedule": "1f1b", "loss_fn": models.loss_for(name)}
        model = getattr(models, name)()
        pipe = by_hand(model, 2, inputs, target, detect_nonfinite=detects, **options).prepare()
        for _ in range(2):
            pipe.step(inputs, target=target)
        states.append(pipe.full_state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_without_it_a_line_says_how_to_find_out() -> None:
    inputs = torch.rand(8, 4) + 1
    pipe = pipe_of(Log(), inputs)
    inputs[5] = 0.0
    result = pipe.step(inputs, target=inputs)
    with pytest.warns(RuntimeWarning, match=r"detect_nonfinite=True\) names the op"):
        assert not math.isfinite(float(result.loss))
    inputs[5] = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe_of(Log(), inputs).step(inputs, target=inputs).loss.item()


def test_it_is_yes_or_no() -> None:
    with pytest.raises(ConfigError, match="detect_nonfinite"):
        pdcompile.compile(Log(), detect_nonfinite="loss")  # type: ignore[arg-type]
