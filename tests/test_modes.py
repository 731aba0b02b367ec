"""Training and evaluation mode: a model trains as after its own train(), and modules stay put."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdcompile.eager.modes import apply_overrides, in_mode, modes_after_switch, modes_in
from pdcompile.errors import ConfigError
from pdcompile.reference import reference
from tests.helpers.changes import batch
from tests.helpers.pipelines import by_hand, states_equal


class FrozenNorm(nn.Module):
    """Its train() keeps the batch norm in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out


class Merging(FrozenNorm):
    """Merges a tensor into its weights for evaluation."""

    def train(self, mode: bool = True) -> Merging:
        if mode != self.training:
            self.first.weight.data += -1.0 if mode else 1.0
        super().train(mode)
        return self


class Scaling(nn.Module):
    """Its train() sets an attribute that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), 1.0

    def train(self, mode: bool = True) -> Scaling:
        self.scale = 1.0 if mode else 0.5
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x))) * self.scale
        return out


def by_loop(model: nn.Module) -> list[float]:
    """Losses of three steps as a user writes them, from ``model.train()`` on."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for t in range(3):
        x, y = batch(t)
        optimizer.zero_grad()
        total = 0.0
        for part, goal in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = F.mse_loss(model(part), goal) / 4
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
    return losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("prepare", [lambda m: m, nn.Module.eval, nn.Module.train],
                         ids=["as constructed", "eval()", "train()"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:the model's train")
def test_an_overridden_train_is_honoured(prepare: Callable[[Any], Any]) -> None:
    model = prepare(FrozenNorm())
    eager, twin = copy.deepcopy(model), copy.deepcopy(model)
    expected = by_loop(eager)
    options: dict[str, Any] = {
        "loss_fn": F.mse_loss, "microbatches": 4,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }  # fmt: skip
    for runner in (by_hand(model, 2, *batch(0), **options).prepare(), reference(twin, **options)):
        found = [float(runner.step(batch(t)[0], target=batch(t)[1]).loss) for t in range(3)]
        assert found == pytest.approx(expected, rel=1e-6)
        assert not states_equal(runner.full_state_dict(), dict(eager.state_dict()))


def test_a_model_as_constructed_is_told_of() -> None:
    model = FrozenNorm()
    with pytest.warns(UserWarning, match=r"puts norm \(1 modules\) into evaluation mode"):
        apply_overrides(model)
    assert model.training
    assert not model.norm.training
    apply_overrides(model)  # nothing is left to be told


def test_weights_that_a_switch_writes_are_refused() -> None:
    for model in (Merging().train(), Merging().eval()):
        with pytest.raises(ConfigError, match=r"merge their weights(.|\n)*first.weight"):
            apply_overrides(model)


def test_attributes_that_a_switch_sets_are_of_each_mode() -> None:
    model = Scaling()
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "microbatches": 4}
    pipe, eager = by_hand(model, 2, *batch(0), **options).prepare(), reference(twin, **options)
    for t in range(4):
        x, y = batch(t)
        for runner in (pipe, eager):
            runner.step(x, target=y)
        for one in (model, twin) if t % 2 else ():
            one.eval()
        ours, theirs = (runner.eval_step(x, target=y) for runner in (pipe, eager))
        assert torch.equal(ours.outputs, theirs.outputs)
        for one in (model, twin) if t == 1 else ():
            one.train()
    assert not states_equal(pipe.full_state_dict(), eager.full_state_dict())
    model.scale = 2.0
    with pytest.raises(ConfigError, match=r"forward reads this attribute(.|\n)*scale"):
        pipe.step(x, target=y)


def test_a_switch_there_and_back_leaves_everything() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    with in_mode(model, False):
        assert not any(module.training for module in model.modules())
    assert (model.training, model[1].training) == (True, False)
    assert modes_in(model, True)[model[1]] is False
    assert modes_after_switch(model, True)[model[1]] is True
