"""Models that are another computation at every batch size: captured for the one that runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import InputError
from tests.helpers.captures import captured, faithful, make, rows
from tests.helpers.pipelines import states_equal

Forward = Callable[..., Any]


def _rows_in_a_loop(self: nn.Module, x: Tensor) -> Tensor:
    return self.second(torch.stack([self.lin(row) * i for i, row in enumerate(x)]))


def _in_reverse(self: nn.Module, x: Tensor) -> Tensor:
    return self.second(torch.stack(list(self.lin(x))[::-1]))


def _twice(self: nn.Module, x: Tensor) -> Tensor:
    parts = list(self.lin(x))
    return self.second(torch.stack([*parts, parts[0]])[1:])


def _batch_as_float(self: nn.Module, x: Tensor) -> Tensor:
    return self.second(self.lin(x) + x.shape[0] * 0.5)


def _batch_squared(self: nn.Module, x: Tensor) -> Tensor:
    return self.second(self.lin(x) * torch.ones(x.shape[0] ** 2).sum())


FORWARDS = [_rows_in_a_loop, _in_reverse, _twice, _batch_as_float, _batch_squared]


@pytest.mark.parametrize("forward", FORWARDS)
def test_it_is_the_model_at_this_size(forward: Forward) -> None:
    model = make(forward, second=nn.Linear(8, 8))
    with pytest.warns(UserWarning, match=r"of 4 samples: .*test_trace_one_size.py:\d+"):
        found = faithful(model, sizes=(4,))
    for graph in (found.train, found.eval):
        assert (graph.sizes.smallest, graph.sizes.largest) == (4, 4)
        assert not any(op.opaque for op in graph.ops)


def test_training_is_that_of_the_reference_and_short_minibatches_are_refused() -> None:
    model = make(_rows_in_a_loop, second=nn.Linear(8, 8))
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "microbatches": 2, "seed": 3}
    optimizer = partial(torch.optim.SGD, lr=0.1)
    eager = pdcompile.reference(model, optimizer=optimizer, keep_model=True, **options)
    with pytest.warns(UserWarning, match="of 4 samples"):
        pipe = pdcompile.compile(
            model, (rows(8),), example_target=rows(8, seed=9), stages=2, keep_model=True,
            costs="estimated", optimizer=optimizer, **options,
        )  # fmt: skip
    for step in range(2):
        x, target = rows(8, seed=step), rows(8, seed=step + 9)
        ours, theirs = pipe.step(x, target=target), eager.step(x, target=target)
        assert float(ours.loss) == float(theirs.loss)
    assert not states_equal(pipe.full_state_dict(), eager.full_state_dict())
    with pytest.raises(InputError, match=r"one of 3, .* right for 4 alone: forward runs other"):
        pipe.step(rows(6), target=rows(6))
    pipe.close()


class _Loop(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(8, width)
        self.back = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.back(self.inner(row)) for row in x])


def test_a_small_module_is_rather_kept_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8), _Loop(8))
    with pytest.warns(UserWarning, match="kept whole as one op: '2'"):
        found = faithful(model)
    assert found.train.sizes.smallest == 1
    assert [op.opaque for op in found.train.ops] == [False, False, True]


def test_a_large_module_is_not() -> None:
    model = nn.Sequential(nn.Linear(8, 8), _Loop(512), nn.Linear(8, 8))
    with pytest.warns(UserWarning, match="of 4 samples"):
        found = captured(model)
    assert not any(op.opaque for op in found.train.ops)
