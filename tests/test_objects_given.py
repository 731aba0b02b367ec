"""Objects among a call's arguments: what forward reads of them is compared at later calls."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.cluster import Cluster
from pdcompile.errors import InputError


class Mode(Enum):
    ADDS = 1
    LEAVES = 2


def double(x: Tensor) -> Tensor:
    return 2 * x


def triple(x: Tensor) -> Tensor:
    return 3 * x


class Inner:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


class Settings:
    """Its text says nothing about what is in it."""

    kind = "tanh"

    def __init__(self) -> None:
        self.scale, self.inner, self.table = 2.0, Inner(), {"gain": [1.0]}
        self.mode, self.function, self.weight = Mode.ADDS, double, torch.ones(4)
        self.calls, self.log, self.unread = 0, list[int](), 0

    @property
    def twice(self) -> float:
        return 2 * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, settings: Settings) -> Any:
        settings.calls += 1
        settings.log.append(settings.calls)
        x = self.first(x) * settings.twice * settings.inner.gain * settings.table["gain"][0]
        x = torch.tanh(x) if settings.kind == "tanh" else x
        x = x + 1 if settings.mode is Mode.ADDS else x
        x = x + getattr(settings, "shift", 0)
        return settings.function(self.last(x * settings.weight))


X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.zeros(8, 2)


@pytest.fixture
def called() -> tuple[pdcompile.Pipeline, Settings]:
    torch.manual_seed(0)
    pipe = pdcompile.compile(
        Model(), cluster=Cluster.local(2), costs="estimated", progress=False, microbatches=2,
        loss_fn=F.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.0),
    )  # fmt: skip
    settings = Settings()
    pipe.step(X, settings, target=Y)
    return pipe, settings


CHANGES: dict[str, Callable[[Any], Any]] = {
    "scale": lambda s: setattr(s, "scale", 3.0),
    "inner.gain": lambda s: setattr(s.inner, "gain", 2.0),
    "table": lambda s: s.table["gain"].__setitem__(0, 2.0),
    "kind": lambda s: setattr(s, "kind", "none"),
    "mode": lambda s: setattr(s, "mode", Mode.LEAVES),
    "shift": lambda s: setattr(s, "shift", 1.0),
    "function": lambda s: setattr(s, "function", triple),
    "weight": lambda s: setattr(s, "weight", torch.zeros(4)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CHANGES)
def test_what_forward_reads_of_an_object_is_not_changed_in_silence(
    name: str, called: tuple[pdcompile.Pipeline, Settings]
) -> None:
    pipe, settings = called
    CHANGES[name](settings)
    for call in (partial(pipe.step, target=Y), partial(pipe.eval_step, target=Y), pipe.predict):
        with pytest.raises(InputError, match="forward reads this attribute of an argument") as told:
            call(X, settings)
        assert told.value.where == f"settings.{name}"


def test_counters_and_what_forward_does_not_read_may_change(
    called: tuple[pdcompile.Pipeline, Settings],
) -> None:
    pipe, settings = called
    settings.calls, settings.unread = 70, 5
    settings.log.append(7)
    settings.inner, settings.table = Inner(), {"gain": [1.0]}  # the same values
    settings.weight = torch.ones(4)
    first = float(pipe.step(X, settings, target=Y).loss)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = F.mse_loss(Model()(X, settings), Y)
    assert first == pytest.approx(float(expected))
