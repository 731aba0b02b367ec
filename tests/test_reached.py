"""Variables that functions of the user name: a change between calls is told once, or refused."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdcompile.errors import ConfigError
from pdcompile.runtime.pipeline import Pipeline
from pdcompile.runtime.watch.reached import Reach
from tests.helpers.changes import batch
from tests.helpers.pipelines import by_hand

SCALE, UNNAMED, COLUMN = 1.0, 1.0, list(range(100))
ARRAY = numpy.ones(1)
TABLE: dict[str, float] = {"gain": 1.0}
first = 0.0
SETTINGS = Namespace(rate=1.0, epoch=0)
OTHER = ModuleType("other")
vars(OTHER).update(rate=1.0, unused=0, __file__=__file__)


class Reading(nn.Module):
    """(b, 8) -> (b, 8), of globals that its methods and a function name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.last(self.first(x))) * TABLE["gain"] * OTHER.rate

    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALE * helper()


def helper() -> float:
    rate: float = SETTINGS.rate * len(COLUMN) / 100 * float(ARRAY[0])
    return rate


class Weighted:
    """A loss that is an object, counts its calls, and has settings."""

    def __init__(self) -> None:
        self.weight, self.calls, self.unread = 1.0, 0, 1.0
        self.settings = Namespace(power=1.0)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(output, target) * self.weight * self.settings.power

    def method(self, output: Tensor, target: Tensor) -> Tensor:
        return self(output, target)


def trained(loss_fn: Any) -> tuple[Pipeline, Callable[[], float]]:
    """A pipeline, and a step of it."""
    x, y = batch(0)
    plain = partial(torch.optim.SGD, lr=0.0)
    pipe = by_hand(Reading(), 2, x, y, loss_fn=loss_fn, microbatches=4, optimizer=plain).prepare()
    return pipe, lambda: float(pipe.step(x, target=y).loss)


def told(step: Callable[[], float]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return [str(one.message) for one in caught if "stages were made" in str(one.message)]


def closures(table: dict[str, float], *, number: float = 1.0) -> tuple[Any, Any]:
    """A loss, and what changes the number in its closure."""

    def change() -> None:
        nonlocal number
        number = 0.5

    return lambda o, y: F.mse_loss(o, y) * table["kl"] * number, change


def keyword(output: Tensor, target: Tensor, weights: list[float]) -> Tensor:
    return F.mse_loss(output, target) * weights[0]


def test_a_closure_that_changes_is_told_once() -> None:
    table = {"kl": 1.0}
    loss_fn, change = closures(table)
    _, step = trained(loss_fn)
    first = step()
    assert told(step) == []
    table["kl"] = 0.5
    (said,) = told(step)
    assert "table['kl'] was {'kl': 1.0} when the stages were made and is {'kl': 0.5} now" in said
    assert "closures.<locals>.<lambda> (test_reached.py:" in said
    assert "keep the former value" in said
    assert "pass it as a tensor" in said
    assert "compile the model anew" in said
    change()
    (said,) = told(step)
    assert said.startswith("number was 1.0 when the stages were made and is 0.5 now")
    table["kl"] = 0.25
    assert told(step) == []
    assert step() == first


def test_arguments_of_a_partial_function_are_told() -> None:
    weights = [1.0]
    loss_fn = partial(keyword, weights=weights)
    _, step = trained(loss_fn)
    weights[0] = 0.5
    (said,) = told(step)
    assert said.startswith("weights[0] was [1.0] ")
    loss_fn = partial(keyword, weights=weights)
    _, step = trained(loss_fn)
    loss_fn.keywords["weights"] = [2.0]
    assert len(told(step)) == 1


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m.setitem(globals(), "SCALE", 0.5), "SCALE"),
        (lambda m: m.setitem(TABLE, "gain", 0.5), "TABLE['gain']"),
        (lambda m: m.setattr(SETTINGS, "rate", 0.5), "SETTINGS.rate"),
        (lambda m: m.setattr(OTHER, "rate", 0.5), "OTHER.rate"),
        (lambda m: m.setitem(globals(), "ARRAY", ARRAY * 2), "ARRAY"),
        (lambda m: m.setattr(SETTINGS, "epoch", 1), ""),
        (lambda m: m.setattr(OTHER, "unused", 1), ""),
        (lambda m: m.setitem(globals(), "first", 1.0), ""),  # forward has self.first
        (lambda m: m.setitem(globals(), "UNNAMED", 0.5), ""),
    ],
)
def test_globals_of_forward_are_told(
    change: Callable[[Any], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, step = trained(F.mse_loss)
    change(monkeypatch)
    assert [one.partition(" was ")[0] for one in told(step)] == [name] * bool(name)


def _power(loss: Weighted) -> None:
    loss.settings.power = 2.0


@pytest.mark.parametrize("method", [False, True])
@pytest.mark.parametrize("change", [lambda loss: setattr(loss, "weight", 0.5), _power])
def test_what_an_object_reads_is_refused(method: bool, change: Callable[[Any], None]) -> None:
    loss = Weighted()
    _, step = trained(loss.method if method else loss)
    step()
    loss.unread = 0.5
    assert told(step) == []
    change(loss)
    with pytest.raises(ConfigError, match=r"was 1.0 (.|\n)*loss_fn.(.|\n)*as a tensor") as caught:
        step()
    assert "register_buffer" not in str(caught.value)


def test_an_object_may_count_its_calls() -> None:
    """A call of it by the user, beside the pipeline, is no reason to refuse the next step."""
    loss = Weighted()
    _, step = trained(loss)
    first = step()
    loss(*batch(1))
    assert len(told(step)) == 1
    assert step() == first


def test_a_tensor_in_the_target_is_the_remedy() -> None:
    x, y = batch(0)
    loss_fn = lambda o, given: F.mse_loss(o, given["y"]) * given["kl"]  # noqa: E731
    target = {"y": y, "kl": torch.tensor(1.0)}
    plain = partial(torch.optim.SGD, lr=0.0)
    pipe = by_hand(Reading(), 2, x, target, loss_fn=loss_fn, microbatches=4, optimizer=plain)
    whole = float(pipe.step(x, target=target).loss)
    half = float(pipe.step(x, target=target | {"kl": torch.tensor(0.5)}).loss)
    assert half == whole / 2


def test_long_containers_and_installed_functions_are_left_out() -> None:
    found = {one.name for one in Reach([("helper", helper)], []).found}
    assert found == {"ARRAY", "SETTINGS.rate"}
    assert Reach([("F.mse_loss", F.mse_loss), ("torch", torch)], []).found == []


def test_functions_that_name_each_other() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return bool(n and even(n - 1) and SCALE)

    assert [one.name for one in Reach([("loss_fn", even)], []).found] == ["SCALE"]


class Deciding(nn.Module):
    """Decides by values, which makes it opaque."""

    def forward(self, x: Tensor) -> Tensor:
        return x * SCALE if (x > -100).any() else x


def test_globals_of_an_opaque_module_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Deciding(), nn.Linear(8, 8))
    x, y = batch(0)
    plain = partial(torch.optim.SGD, lr=0.0)
    pipe = by_hand(model, 1, x, y, loss_fn=F.mse_loss, microbatches=1, optimizer=plain).prepare()
    first = float(pipe.step(x, target=y).loss)
    monkeypatch.setitem(globals(), "SCALE", 0.5)
    assert told(lambda: float(pipe.step(x, target=y).loss)) == []
    assert float(pipe.step(x, target=y).loss) == float(F.mse_loss(model(x), y).detach()) != first
