"""Schedules that update after every microbatch, against their recurrences, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.plan import Plan
from tests.helpers import models

pytestmark = pytest.mark.usefixtures("one_capture_a_model")

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
SIZES = (4, 4, 3, 4, 4, 2, 4, 4, 4)


def options_of(model: nn.Module, schedule: str, **given: Any) -> dict[str, Any]:
    return {
        "loss_fn": models.loss_for(model), "optimizer": ADAMW, "schedule": schedule,
        "microbatches": 1, "costs": "estimated", "verify": "off", "progress": False, **given,
    }  # fmt: skip


def prepared(model: nn.Module, depths: Sequence[int], **options: Any) -> Any:
    """A pipeline of the model, with a warm-up of one's own where depths are given."""
    x, y = models.batch_for(model, SIZES[0])
    if depths:
        plan = prepared(copy.deepcopy(model), (), **options).plan
        training = replace(plan.training, warmup=tuple(depths))
        options["plan"] = replace(plan, training=training, forecast=None)
    return pdcompile.compile(model, **options).prepare(x, target=y)


def train(pipe: Any, model: nn.Module, events: Callable[[int, Any], None]) -> list[Any]:
    """A loss for each minibatch, while the learning rate changes; `events(t, pipe)` after it."""
    found: list[Any] = []
    decay = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.9)
    for t, size in enumerate(SIZES):
        x, y = models.batch_for(model, size, t)
        found.append(pipe.step(x, target=y).loss)
        decay.step()
        events(t, pipe)
    pipe.flush()
    return [float(loss) for loss in found]


def nothing(_: int, __: Any) -> None:
    """Between the steps."""


def compare(
    model: nn.Module,
    schedule: str,
    stages: int,
    depths: Sequence[int] = (),
    events: Callable[[int, Any], None] = nothing,
    **given: Any,
) -> Plan:
    twin, options = copy.deepcopy(model), options_of(model, schedule, **given)
    with prepared(model, depths, stages=stages, **options) as pipe:
        ours, plan, state = train(pipe, model, events), pipe.plan, pipe.full_state_dict()
    expected = pdcompile.reference(twin, plan=plan, **options)
    assert ours == train(expected, twin, events)
    equal_states(state, expected.full_state_dict())
    return plan


def equal_states(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


UNTIED: dict[str, Callable[[], nn.Module]] = {
    "mlp": models.mlp,
    "convnet": models.convnet,
    "unet": models.unet,
    "gpt": partial(models.gpt, tied=False, dropout=0.1),
}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["stash", "vsync"])
@pytest.mark.parametrize("name", UNTIED)
def test_trains_as_its_recurrence(name: str, schedule: str, stages: int) -> None:
    torch.manual_seed(0)
    plan = compare(UNTIED[name](), schedule, stages)
    assert plan.training.num_microbatches == 1
    assert plan.training.warmup == tuple(reversed(range(stages)))
