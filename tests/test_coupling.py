"""Optimizers whose update of one stage depends on another's gradients are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pdcompile.errors import ConfigError
from pdcompile.runtime.watch.optimizer_watch import refuse_coupled
from tests.helpers import models
from tests.helpers.changes import batch
from tests.helpers.loops import Normalised
from tests.helpers.pipelines import by_hand

PARAMETERS = {f"layers.{i}.weight": nn.Parameter(torch.ones(9, 5)) for i in range(4)}
STAGES = [["layers.0.weight", "layers.1.weight"], ["layers.2.weight"], ["layers.3.weight"]]


class ClipsLarge(torch.optim.SGD):
    """Clips by a norm that only large gradients exceed."""

    def step(self, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(held, 100.0)
        return super().step(closure)


def _hooked(parameters: Any) -> torch.optim.Optimizer:
    held = list(parameters)
    optimizer = torch.optim.SGD(held, lr=0.1)

    def before(*_: Any) -> None:
        present = [p.grad for p in held if p.grad is not None]
        total = torch.stack([gradient.norm() for gradient in present]).norm()
        for gradient in present:
            gradient.div_(total)

    optimizer.register_step_pre_hook(before)
    return optimizer


class Noisy(torch.optim.SGD):
    """Adds noise: what is drawn depends on the order of parameters."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(torch.randn_like(parameter.grad))
        return super().step(closure)


class Own(torch.optim.SGD):
    """Somebody's class, which updates each parameter by itself."""


@pytest.mark.parametrize(
    "build", [partial(Normalised, lr=0.1), partial(ClipsLarge, lr=0.1), _hooked]
)
def test_coupled_updates_are_refused(build: Any) -> None:
    with pytest.raises(ConfigError, match=r"depends on gradients of other(.|\n)*max_grad_norm"):
        refuse_coupled(build, PARAMETERS, STAGES)
    refuse_coupled(build, PARAMETERS, [list(PARAMETERS)])  # one stage has all
    model = models.mlp(layers=4, width=8)
    pipe = by_hand(model, 2, *batch(0), loss_fn=F.mse_loss, microbatches=4, optimizer=build)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match="depends on gradients"):
        pipe.prepare()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "build",
    [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(Own, lr=0.1),
     partial(torch.optim.Adafactor, lr=0.1), partial(torch.optim.AdamW, foreach=True),
     partial(torch.optim.Muon, lr=0.1)],
)  # fmt: skip
def test_other_updates_are_not(build: Any, recwarn: pytest.WarningsRecorder) -> None:
    refuse_coupled(build, PARAMETERS, STAGES)
    assert not list(recwarn)


def test_what_cannot_be_tried_is_told() -> None:
    with pytest.warns(UserWarning, match="draws random numbers"):
        refuse_coupled(partial(Noisy, lr=0.1), PARAMETERS, STAGES)
    with pytest.raises(ConfigError, match="parts of a stage would draw others"):
        refuse_coupled(partial(Noisy, lr=1e-9), PARAMETERS, STAGES, parts=True)
    with pytest.warns(UserWarning, match=r"cannot be run on small copies(.|\n)*no embedding"):
        refuse_coupled(_wants_shapes, PARAMETERS, STAGES)
    state = torch.get_rng_state()
    refuse_coupled(partial(Own, lr=0.1), PARAMETERS, STAGES)
    assert torch.equal(torch.get_rng_state(), state)


def _wants_shapes(parameters: Any) -> torch.optim.Optimizer:
    if all(parameter.shape != (9, 5) for parameter in parameters):
        raise KeyError("no embedding")
    return Own(parameters, lr=0.1)


def test_step_hooks_of_several_stages_are_told_of() -> None:
    def build(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    model = models.mlp(layers=4, width=8)
    x, y = batch(0)
    pipe = by_hand(model, 2, x, y, loss_fn=F.mse_loss, microbatches=4, optimizer=build)
    with pytest.warns(UserWarning, match="once a stage"):
        pipe.step(x, target=y)
