"""Ops whose shapes fake tensors cannot tell run once on made-up numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdcompile.errors import TraceError
from pdcompile.passes.trace import real_shapes
from tests.helpers.captures import captured, faithful, make, op_named, rows


@pytest.fixture
def library() -> Iterator[Any]:
    with torch.library._scoped_library("pdcompile_test", "FRAGMENT") as found:
        yield found


def test_a_rule_that_is_stricter_than_the_kernel() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        ends = torch.arange(1, 4, dtype=torch.int32) * 1
        ends[-1] = x.shape[0]
        found = F.grouped_mm(self.lin(x), self.experts, offs=ends)
        return found.add_(1.0)

    model = make(forward, experts=nn.Parameter(torch.randn(3, 8, 16)))
    found = faithful(model, rows(8), sizes=(4, 6))
    op = op_named(found, "grouped_mm")
    assert found.train.values[op.name].shape[1] == 16
    assert found.train.values[op.name].requires_grad


def test_an_op_without_a_shape_rule(library: Any) -> None:
    library.define("halves(Tensor x) -> (Tensor, Tensor)")
    library.impl("halves", lambda x: (x[:, :4] * 2, x[:, 4:].sum(1)), "CPU")
    library.define("drawing(Tensor x) -> Tensor")
    library.impl("drawing", lambda x: x + torch.rand(()), "CPU")

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        left, right = torch.ops.pdcompile_test.halves(x)
        return self.lin(torch.cat([left, left], 1)) + right[:, None]

    assert len(faithful(make(forward)).train.ops) == 7

    def draws(self: nn.Module, x: Tensor) -> Tensor:
        return self.lin(torch.ops.pdcompile_test.drawing(x))

    with pytest.raises(TraceError, match="no shape rule for pdcompile_test"):
        captured(make(draws))


def test_a_loss_that_reads_lengths() -> None:
    def forward(self: nn.Module, x: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        logs = self.lin(x).log_softmax(-1).transpose(0, 1)
        frames = torch.full((x.shape[0],), x.shape[1])
        return self.ctc(logs, text, frames, lengths) + F.ctc_loss(logs, text, frames, lengths)

    batch = torch.randn(4, 9, 8), torch.randint(1, 8, (4, 3)), torch.tensor([3, 2, 3, 1])
    assert faithful(make(forward, ctc=nn.CTCLoss()), *batch).train.loss is not None


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.long().flatten().unique().float(),
        lambda x: x.long().flatten().abs().bincount().float(),
    ],
    ids=["unique", "bincount"],
)
def test_shapes_that_depend_on_values_are_refused(call: Any) -> None:
    with pytest.raises(TraceError, match=r"depends on values|reads the value"):
        captured(make(lambda self, x: self.lin(x).sum() + call(x).sum()))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[x > 0] / 2,
        lambda x: x.repeat_interleave(x[:, 0].long().abs(), dim=0),
        lambda x: torch.nonzero(x) * 2,
    ],
    ids=["mask", "repeat_interleave", "nonzero"],
)
def test_sizes_that_depend_on_values_stay_open(call: Any) -> None:
    found = faithful(make(lambda self, x: self.lin(x).sum() + call(x).sum()), torch.randn(4, 8))
    assert any(value.varies for value in found.train.values.values())


def test_what_is_too_large_is_not_tried(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    model = make(lambda self, x: self.lin(torch.ops.pdcompile_test.twice(x)))
    captured(model)
    monkeypatch.setattr(real_shapes, "MAX_BYTES", 100)
    with pytest.raises(TraceError, match="no shape rule for pdcompile_test"):
        captured(model)


def test_an_error_of_the_model_stays_its_own() -> None:
    with pytest.raises(TraceError, match=r"same reduction dim"):
        captured(make(lambda self, x: self.lin(x) @ torch.ones(3, 3)))
