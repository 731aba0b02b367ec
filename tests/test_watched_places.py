"""Attributes and objects in unusual places: a change is seen, and what is harmless is let be."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdcompile.errors import ConfigError
from pdcompile.reference import reference
from tests.helpers.changes import batch
from tests.helpers.pipelines import by_hand, states_equal


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


class Places(nn.Module):
    """(b, 8) -> (b, 8), reading values from everywhere."""

    kind = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.steps = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Linear(8, 8)})
        self.clamped, self.filled, self.slotted = 1.0, None, Slotted()
        self.args = Namespace(rate=1.0, epoch=0)
        self.pair = ({"k": 1.0}, 2.0)
        self.shapes: dict[str, Any] = {}
        self.register_buffer("table", torch.ones(8))

    @cached_property
    def length(self) -> float:
        return 1.5

    def helper(self, x: Tensor) -> Tensor:
        return x * 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.clamped = min(self.clamped, 1.0)
        if self.filled is None:
            self.filled = torch.arange(8.0) / 8
        if "x" not in self.shapes:
            self.shapes["x"] = 8
        x = self.first(x) * self.clamped * self.kind * self.length + self.filled
        for name in self.steps:
            x = self.steps[name](x)
        x = self.helper(x) * self.slotted.gain * self.pair[0]["k"] * getattr(self, "more", 1.0)
        x = x * self.args.rate
        out: Tensor = self.last(x) * self.table.mean() * self.table.shape[0]
        return out


class Weighted(nn.Module):
    """A loss with a buffer and a module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(()))
        self.inner = nn.MSELoss()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.inner(output, target) * self.weight
        return loss


def _reorder(model: Any) -> None:
    model.steps["a"] = model.steps.pop("a")


SEEN: dict[str, Callable[[Any, Any], Any]] = {
    "read, then assigned": lambda m, _: setattr(m, "clamped", 0.5),
    "getattr with a default": lambda m, _: setattr(m, "more", 2.0),
    "of the class": lambda m, _: setattr(type(m), "kind", 2.0),
    "a method of the class": lambda m, _: setattr(type(m), "helper", lambda self, x: x * 2),
    "a slot": lambda m, _: setattr(m.slotted, "gain", 2.0),
    "a namespace of argparse": lambda m, _: setattr(m.args, "rate", 2.0),
    "a dict in a tuple": lambda m, _: m.pair[0].update(k=2.0),
    "order of submodules": lambda m, _: _reorder(m),
    "shape of a buffer's data": lambda m, _: setattr(m.table, "data", torch.ones(4)),
    "buffer of the loss": lambda _, loss: setattr(loss, "weight", torch.tensor(2.0)),
    "module of the loss": lambda _, loss: setattr(loss, "inner", nn.L1Loss()),
    "hook of the loss": lambda _, loss: loss.register_forward_hook(lambda m, i, o: o * 2),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", SEEN.values(), ids=SEEN.keys())
def test_a_change_is_refused(change: Any) -> None:
    class Own(Places):  # changes of the class are of this one
        pass

    model, loss = Own(), Weighted()
    x, y = batch(0)
    pipe = by_hand(model, 2, x, y, loss_fn=loss, microbatches=4).prepare()
    pipe.step(x, target=y)
    change(model, loss)
    with pytest.raises(ConfigError, match="remedy"):
        pipe.step(x, target=y)


def test_what_eager_calls_fill_in_is_let_be() -> None:
    model, loss = Places(), Weighted()
    twin = copy.deepcopy(model)
    x, y = batch(0)
    options: dict[str, Any] = {"loss_fn": loss, "microbatches": 4}
    pipe = by_hand(model, 2, x, y, **options).prepare()
    eager = reference(twin, plan=pipe.plan, **options)
    for t in range(3):
        x, y = batch(t)
        with torch.no_grad():
            model(x), twin(x)
        loss.weight.mul_(0.5)
        model.epoch = twin.epoch = model.args.epoch = t
        ours, theirs = (one.step(x, target=y).loss for one in (pipe, eager))
        assert float(ours) == float(theirs)
    assert not states_equal(pipe.full_state_dict(), eager.full_state_dict())


class Aliasing(nn.Module):
    """Reads its weight under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.views = [self.first.weight.data]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x) @ self.views[0]))
        return out


def test_an_attribute_in_the_memory_of_a_parameter_is_refused() -> None:
    x, y = batch(0)
    for schedule, refused in (("1f1b", False), ("2bw", True)):
        given: dict[str, Any] = {"schedule": schedule, "microbatches": 4, "loss_fn": F.mse_loss}
        pipe = by_hand(Aliasing(), 2, x, y, **given)
        if refused:
            with pytest.raises(ConfigError, match=r"parameter first.weight(.|\n)*views"):
                pipe.prepare()
        else:
            pipe.step(x, target=y)


class ReadsParameters(nn.Module):
    """Reads parameters from a list of its own, and an LSTM, which has such a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.weights = [self.first.weight, self.last.weight]

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight))
        y, _ = self.rnn(x[:, None])
        out: Tensor = self.last(self.first(y[:, 0]))
        return out


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_parameters_in_containers_are_the_stages_own(schedule: str) -> None:
    given: dict[str, Any] = {"schedule": schedule, "microbatches": 4, "loss_fn": F.mse_loss}
    x, y = batch(0)
    pipe = by_hand(ReadsParameters(), 2, x, y, **given).prepare()
    expected = reference(ReadsParameters(), plan=pipe.plan, **given)
    for number in range(4):
        x, y = batch(number)
        losses = [float(one.step(x, target=y).loss) for one in (pipe, expected)]  # type: ignore[arg-type]
        assert losses[0] == losses[1]
    assert states_equal(pipe.full_state_dict(), expected.full_state_dict()) == []


class Counts(torch.optim.Optimizer):
    """Writes a tensor of its group in place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.param_groups[0]["t"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["t"] += 1
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-group["lr"] / float(group["t"]))


def test_groups_that_an_optimizer_writes_in_place() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "microbatches": 4, "optimizer": Counts}
    pipe = by_hand(model, 1, *batch(0), **options).prepare()
    eager = reference(twin, **options)
    for t in range(3):
        x, y = batch(t)
        assert float(pipe.step(x, target=y).loss) == float(eager.step(x, target=y).loss)
    assert float(pipe.optimizer.param_groups[0]["t"]) == 3.0
    assert not states_equal(pipe.full_state_dict(), eager.full_state_dict())
