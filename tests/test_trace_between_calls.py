"""State that models keep from call to call: captured where no call can tell, refused where one
can."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from pdcompile.errors import TraceError
from tests.helpers.captures import captured, faithful, make


def _last_result(self: nn.Module, x: Tensor) -> Tensor:
    self.last = self.lin(x)
    return self.last


def _made_new_before_use(self: nn.Module, x: Tensor) -> Tensor:
    self.kept["state"] = torch.zeros(len(x), 8)
    y = self.lin(x) + self.kept["state"]
    self.kept["state"] = y
    return y


def _table(self: nn.Module, x: Tensor) -> Tensor:
    if self.last is None:
        self.last = torch.arange(x.shape[1]).float()
    return self.lin(x) + self.last


def _table_by_length(self: nn.Module, x: Tensor) -> Tensor:
    if x.shape[1] not in self.kept:
        angles = torch.arange(x.shape[1]).float()
        self.kept[x.shape[1]] = (angles.cos(), angles.sin())
    cos, sin = self.kept[x.shape[1]]
    return self.lin(x) * cos[None, : x.shape[1]] + sin


def _flag_that_follows_the_mode(self: nn.Module, x: Tensor) -> Tensor:
    if self.training == self.flag:
        self.flag = not self.training
    return self.lin(x) / 2 if self.flag else self.lin(x)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "forward",
    [_last_result, _made_new_before_use, _table, _table_by_length, _flag_that_follows_the_mode],
)
def test_captured(forward: Any) -> None:
    model = make(forward, last=None, kept={}, flag=False)
    faithful(model)
    assert (model.last, model.kept, model.flag) == (None, {}, False)


class Cached(nn.Module):
    """Evaluation computes a table from a parameter once; `train()` forgets it, if `clears`."""

    def __init__(self, *, clears: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
        self.cache: dict[str, Tensor] = {}
        self.clears = clears

    def train(self, mode: bool = True) -> Cached:
        if self.clears:
            self.cache.clear()
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.lin(x) + self.bias.mean(0)
        if "cpu" not in self.cache:
            self.cache["cpu"] = self.bias.mean(0)
        return self.lin(x) + self.cache["cpu"]


def test_a_cache_of_parameters_that_training_clears() -> None:
    found = faithful(Cached(clears=True))
    assert [op.target.rpartition(".")[2] for op in found.eval.ops].count("mean") == 1


def test_a_cache_of_parameters_that_outlives_training() -> None:
    with pytest.raises(TraceError, match="changes the Python attribute cache"):
        captured(Cached(clears=False))


def _shape_of_the_last(self: nn.Module, x: Tensor) -> Tensor:
    old, self.last = self.last, self.lin(x)
    return self.last * 2 if old is not None and len(old) != len(x) else self.last


def _sum_over_calls(self: nn.Module, x: Tensor) -> Tensor:
    y = self.lin(x)
    self.last = y if self.last is None else self.last.detach() + y
    return y


def _left_in_training_for_evaluation(self: nn.Module, x: Tensor) -> Tensor:
    y = self.lin(x)
    if self.training:
        self.last = y.detach()
    elif self.last is not None:
        y = y * 2
    return y


def _size_of_the_first_batch(self: nn.Module, x: Tensor) -> Tensor:
    if self.last is None:
        self.last = x.shape[0]
    return self.lin(x) / self.last


def _flag_that_training_keeps(self: nn.Module, x: Tensor) -> Tensor:
    self.flag = self.flag or not self.training
    return self.lin(x) / 2 if self.flag else self.lin(x)


def _table_of_a_parameter(self: nn.Module, x: Tensor) -> Tensor:
    if self.last is None:
        self.last = self.lin.weight.detach().sum(0)
    return self.lin(x) + self.last


def _table_that_is_written(self: nn.Module, x: Tensor) -> Tensor:
    if self.last is None:
        self.last = torch.zeros(8)
    self.last += 1
    return self.lin(x) + self.last


def _random_table(self: nn.Module, x: Tensor) -> Tensor:
    if self.last is None:
        self.last = torch.rand(8)
    return self.lin(x) + self.last


def _table_for_one_batch_size(self: nn.Module, x: Tensor) -> Tensor:
    if self.last is None:
        self.last = torch.ones(x.shape[0])
    return self.lin(x) + self.last.sum()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "forward",
    [
        _shape_of_the_last,
        _sum_over_calls,
        _left_in_training_for_evaluation,
        _size_of_the_first_batch,
        _flag_that_training_keeps,
        _table_of_a_parameter,
        _table_that_is_written,
        _random_table,
        _table_for_one_batch_size,
    ],
)
def test_refused(forward: Any) -> None:
    model = make(forward, last=None, flag=False)
    with pytest.raises(TraceError, match="changes the Python attribute") as caught:
        captured(model)
    assert "test_trace_between_calls.py" in (caught.value.where or "")
    assert (model.last, model.flag) == (None, False)


def _writes_an_array(self: nn.Module, x: Tensor) -> Tensor:
    self.table[0] += 1
    return self.lin(x) + torch.from_numpy(self.table)


def _replaces_an_array(self: nn.Module, x: Tensor) -> Tensor:
    self.table = self.table * 2
    return self.lin(x) + torch.as_tensor(self.table)


@pytest.mark.parametrize("forward", [_writes_an_array, _replaces_an_array])
def test_state_in_an_array_is_refused(forward: Any) -> None:
    table = numpy.ones(8, dtype=numpy.float32)
    with pytest.raises(TraceError, match="changes the Python attribute table"):
        captured(make(forward, table=table))
    assert table.tolist() == [1.0] * 8
