"""Numbers for a log: plain floats, counted between two looks."""

from __future__ import annotations

import json

import pytest
import torch

import pdcompile
from pdcompile.batch.step_result import LazyLoss, StepResult
from pdcompile.errors import ConfigError


def result(loss: float) -> StepResult:
    return StepResult(LazyLoss(lambda: torch.tensor(loss)), lambda: None)


def test_numbers_since_the_last_look() -> None:
    seconds = iter([10.0, 14.0, 20.0, 21.0, 30.0])
    meter = pdcompile.Meter(clock=lambda: next(seconds))
    assert meter.scalars() == {}
    meter.add(result(3.0), samples=8, tokens=64)
    meter.add(result(2.5), samples=8, tokens=64)
    found = meter.scalars()
    assert found == {
        "loss": 2.5, "step_seconds": 2.0, "samples_per_second": 4.0, "tokens_per_second": 32.0
    }  # fmt: skip
    assert json.loads(json.dumps(found)) == found
    meter.add(result(2.0))
    assert meter.scalars() == {"loss": 2.0, "step_seconds": 1.0}
    assert meter.scalars() == {}


def test_only_a_look_waits_for_a_loss() -> None:
    asked = []
    lazy = LazyLoss(lambda: asked.append(1) or torch.tensor(1.0))
    meter = pdcompile.Meter()
    meter.add(StepResult(lazy, lambda: None), samples=1)
    assert not asked
    assert meter.scalars()["loss"] == 1.0
    assert asked == [1]


@pytest.mark.parametrize("number", [-1, 1.5, True, "8"])
def test_what_is_no_count_is_refused(number: object) -> None:
    with pytest.raises(ConfigError, match="is no count"):
        pdcompile.Meter().add(result(1.0), samples=number)  # type: ignore[arg-type]
