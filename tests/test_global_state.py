"""Tables, counters and logs that forward keeps outside of the model."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
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
