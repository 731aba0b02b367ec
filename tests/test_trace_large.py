"""Capture of very large models: what is recorded less often, and when that is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdcompile.batch import example_call, resolve_batch
from pdcompile.ir.graph import Capture
from pdcompile.passes import trace
from pdcompile.passes.trace import attempt
from tests.helpers.captures import make


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """(training, batch size) of every recording."""
    seen: list[tuple[bool, int]] = []
    plain = attempt.record

    def record(subject: Any, call: Any, *args: Any, training: bool, **kwargs: Any) -> Any:
        seen.append((training, len(next(iter(call.leaves.values())))))
        return plain(subject, call, *args, training=training, **kwargs)

    monkeypatch.setattr(attempt, "record", record)
    return seen


def capture(model: nn.Module, batch: int = 1) -> Capture:
    flat = example_call(model, torch.ones(batch, 8))
    return trace.capture(model, flat, resolve_batch(flat, 0), None)


class _Own(nn.Linear):
    def train(self, mode: bool = True) -> _Own:
        self.out_scale = 1.0 if mode else 2.0
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.out_scale


def test_evaluation_is_recorded_where_changing_the_mode_does_something() -> None:
    found = capture(nn.Sequential(_Own(8, 8)).train(), 4)
    assert found.train.ops[-1].args[1] == 1.0
    assert found.eval.ops[-1].args[1] == 2.0


def test_forward_runs_at_three_sizes_in_both_modes(
    modes: list[tuple[bool, int]],
) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return torch.dropout(self.lin(x).view(len(x), 2, 4).flatten(1), 0.5, self.training).sum()

    found = capture(make(forward), 4)
    assert modes == [(mode, n) for mode in (True, False) for n in (4, 120, 1)]
    for graph in (found.train, found.eval):
        assert (graph.sizes.smallest, graph.sizes.largest) == (1, 120)


def test_one_sample_is_recorded_at_three_sizes(modes: list[tuple[bool, int]]) -> None:
    few = capture(make(lambda self, x: self.lin(x).view(len(x), 2, 4).flatten(1).sum())).train
    assert [size for _, size in modes] == [1, 60, 17] * 2
    assert (few.sizes.smallest, few.sizes.largest) == (1, 60)


def test_what_differs_at_two_sizes_is_not_recorded_at_a_third(
    modes: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dimension of one sample has no place in the order of strides."""
    monkeypatch.setattr(attempt, "MANY_OPS", 0)
    found = capture(make(lambda self, x: self.lin(x).t().contiguous().sum()))
    assert modes == [(mode, n) for mode in (True, False) for n in (1, 60, 1)]
    for graph in (found.train, found.eval):
        assert graph.sizes.is_one
        assert "stride_order of the result 't'" in graph.sizes.above


def test_two_samples_are_enough_for_a_model_that_refuses_one() -> None:
    found = capture(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), 6)
    assert (found.train.sizes.smallest, found.train.sizes.largest) == (2, 120)
    assert "more than 1 value" in found.train.sizes.below


def test_what_the_upper_end_cannot_do_the_usual_sizes_may(
    modes: list[tuple[bool, int]],
) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.lin(x).sum() if len(x) <= 50 else x.sum()

    found = capture(make(forward), 2).train
    assert [size for _, size in modes][:2] == [2, 120]
    assert found.sizes.largest == 33


def test_two_sizes_alone_do_not_say_that_a_number_is_linear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any two squares lie on a line."""
    monkeypatch.setattr(attempt, "MANY_OPS", 0)
    found = capture(make(lambda self, x: self.lin(x).sum() * torch.ones(len(x) ** 2).sum()), 16)
    assert (found.train.sizes.smallest, found.train.sizes.largest) == (16, 16)


@pytest.mark.sample(6)
@pytest.mark.parametrize("size", [2, 5, 9, 34])
@pytest.mark.parametrize("divisor", [2, 3, 4, 8])
def test_divisibility_that_no_question_shows_is_seen(size: int, divisor: int) -> None:
    """Padding to a multiple, by a number that Python has made plain."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        padded = nn.functional.pad(self.lin(x), (0, 0, 0, -int.__int__(len(x)) % divisor))
        return padded.mean() if int.__int__(len(x)) % divisor else x.sum()

    found = capture(make(forward), size)
    for graph in (found.train, found.eval):
        alike = {bool(n % divisor) for n in range(graph.sizes.smallest, graph.sizes.largest or 0)}
        assert len(alike) <= 1, graph.sizes


def test_what_we_ask_of_sizes_is_no_question_of_the_model(modes: list[tuple[bool, int]]) -> None:
    """A mask is known or not by the bytes of the tensors that it is made of."""
    from transformers.utils import import_utils

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        mask = torch.ones(len(x), 8)
        for _ in range(6):
            mask = mask.cumsum(1)
        assert not import_utils.is_tracing(mask)  # type: ignore[no-untyped-call]
        return (self.lin(x) * mask * (len(x) != 1)).sum()

    assert capture(make(forward), 64).train.sizes.smallest == 2
    assert modes == [(mode, n) for mode in (True, False) for n in (64, 1080, 1, 2, 3)]


def repeats_unless_single(self: nn.Module, x: Tensor) -> Tensor:
    mask = torch.ones(1, 8)
    return (self.lin(x) * (mask if len(x) == 1 else mask.expand(len(x), -1))).sum()


@pytest.mark.parametrize("many", [0, 1000])
def test_a_model_that_is_another_one_for_a_single_sample(
    many: int, modes: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "MANY_OPS", many)
    found = capture(make(repeats_unless_single)).train
    assert (found.sizes.smallest, found.sizes.largest) == (1, 1)
    assert "expand" in found.sizes.above
    assert modes[-1] == (False, 1)
    assert found.batch_size == 1
    assert [op.target for op in found.ops if op.target == "expand"] == []


def test_with_more_samples_it_is_captured_without_the_single_one() -> None:
    found = capture(make(repeats_unless_single), 4).train
    assert found.sizes.smallest > 1
    assert found.sizes.largest is not None
    assert found.sizes.largest >= 4
