"""Tables, counters and logs that forward keeps outside of the model."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdcompile.errors import TraceError
from tests.helpers.captures import captured, rows

TABLES: dict[int, Tensor] = {}
COUNTS = {"calls": 0}
LOG: list[Tensor] = []
SCALE: Tensor | None = None


def _in_a_global_dict(self: Any, x: Tensor) -> Tensor:
    if len(x) not in TABLES:
        TABLES[len(x)] = torch.arange(len(x)) / 8
    return self.lin(x) + TABLES[len(x)][:, None]


def _in_a_global_name(self: Any, x: Tensor) -> Tensor:
    global SCALE
    if SCALE is None:
        SCALE = torch.arange(8) / 8
    return self.lin(x) * SCALE


def _in_the_class(self: Any, x: Tensor) -> Tensor:
    if type(self).table is None:
        type(self).table = torch.arange(8) / 8
    result: Tensor = self.lin(x) * type(self).table
    return result


def _model(forward: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(0)
    kind = type("Model", (nn.Module,), {"forward": forward, "table": None, "__module__": __name__})
    model: Any = kind()
    model.lin = nn.Linear(8, 8)
    made: nn.Module = model
    return made


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "forward",
    [_in_a_global_dict, _in_a_global_name, _in_the_class],
)  # fmt: skip
def test_tables_outside_of_the_model_stay_the_users(forward: Callable[..., Any]) -> None:
    model, x = _model(forward), rows(4)
    module = captured(model).train.to_module(model)
    assert type(model(x)) is Tensor  # and computes with no fake tensor of a recording
    assert torch.equal(module(x), model(x))
    assert torch.equal(module(rows(3)), model(rows(3)))


def _counts(self: Any, x: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    return self.lin(x) * (2 if COUNTS["calls"] > 1000 else 1)


def _logs(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.lin(x)
    LOG.append(y.detach())
    return y


def _keeps_the_first_batch(self: Any, x: Tensor) -> Tensor:
    if type(self).table is None:
        type(self).table = x.mean(0)
    result: Tensor = self.lin(x) + type(self).table
    return result


def test_a_count_that_no_place_shows_is_refused_by_what_it_does() -> None:
    count: ContextVar[int] = ContextVar("count", default=0)

    def forward(self: Any, x: Tensor) -> Tensor:
        count.set(count.get() + 1)
        result: Tensor = self.lin(x) * count.get()
        return result

    with pytest.raises(TraceError):
        captured(_model(forward))


@pytest.mark.parametrize(
    ("forward", "name"),
    [(_counts, r"COUNTS\['calls'\]"), (_logs, "LOG"),
     (_keeps_the_first_batch, "Model.table")],
)  # fmt: skip
def test_what_another_call_may_find_is_refused(forward: Callable[..., Any], name: str) -> None:
    model = _model(forward)
    with pytest.raises(TraceError, match=f"leaves something in {name}") as caught:
        captured(model)
    assert "test_global_state.py:" in str(caught.value.where)
    assert LOG == []
    assert type(model(rows(4))) is Tensor
    LOG.clear()


class _Keeps:
    """A loss and a hook as objects; each keeps a tensor of its last call."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.kept.append(output.detach().mean())
        return nn.functional.mse_loss(output, target)

    def hook(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.kept.append(output.detach())


class _Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        found: Tensor = nn.functional.mse_loss(output, target)
        self.last = found.detach()
        return found


def _in_its_closure() -> Callable[..., Tensor]:
    kept: list[Tensor] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        kept.append(output.detach())
        return nn.functional.mse_loss(output, target)

    return loss


def _in_its_file(output: Tensor, target: Tensor) -> Tensor:
    LOG.append(output.detach())
    return nn.functional.mse_loss(output, target)


class _Meter:
    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def update(self, value: Tensor) -> None:
        self.values.append(value)


METER = _Meter()


def _in_a_meter(output: Tensor, target: Tensor) -> Tensor:
    METER.update(output.detach())
    return nn.functional.mse_loss(output, target)


@pytest.mark.parametrize(
    ("make", "name"),
    [(_in_its_closure, "kept"), (lambda: _in_its_file, "LOG"), (_Keeps, r"_Keeps\.kept"),
     (lambda: partial(_Keeps().__call__), r"_Keeps\.kept"), (_Logging, r"_Logging\.last"),
     (lambda: _in_a_meter, r"METER\.values")],
)  # fmt: skip
def test_what_a_loss_keeps_is_refused(make: Callable[[], Any], name: str) -> None:
    """Stages do not run its Python: a log would keep what it had when the model was captured."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with pytest.raises(TraceError, match=f"leaves something in {name}") as caught:
        captured(model, target=rows(4), loss_fn=make())
    assert "test_global_state.py:" in str(caught.value.where)
    assert LOG == METER.values == []


def test_what_a_hook_keeps_in_its_object_is_refused() -> None:
    model, kept = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), _Keeps()
    model[0].register_forward_hook(kept.hook)
    with pytest.raises(TraceError, match=r"leaves something in _Keeps\.kept"):
        captured(model)
    assert kept.kept == []


class _Counts:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.mse_loss(output, target)


def test_a_loss_that_is_an_object_may_count() -> None:
    counts = _Counts()
    captured(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), target=rows(4), loss_fn=counts)
    assert counts.calls
