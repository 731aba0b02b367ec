"""Packed sequences, and Python that computes with sizes that depend on values: both are opaque."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import pdcompile
from pdcompile.errors import TraceError
from tests.helpers.captures import captured, faithful, make

pytestmark = pytest.mark.usefixtures("captured_anew")

X = torch.randn(4, 7, 8, generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([7, 2, 5, 1])


def _encoded(self: nn.Module, x: Tensor, lengths: Tensor) -> tuple[PackedSequence, Any]:
    packed = pack_padded_sequence(self.lin(x), lengths.cpu(), True, enforce_sorted=False)
    return self.rnn(packed)  # type: ignore[no-any-return]


def _last(self: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    _, state = _encoded(self, x, lengths)
    return (state[0] if isinstance(state, tuple) else state)[-1]


def _whole_length(self: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    out, _ = _encoded(self, x, lengths)
    return pad_packed_sequence(out, True, total_length=x.size(1))[0]


def _mean(self: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    out, found = pad_packed_sequence(_encoded(self, x, lengths)[0], True)
    mask = torch.arange(out.size(1))[None] < found[:, None]
    return (out * mask.unsqueeze(-1)).sum(1) / lengths[:, None]


def _attention(self: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    out, _ = pad_packed_sequence(_encoded(self, x, lengths)[0], True, padding_value=-1.0)
    late = torch.arange(out.shape[1]).expand(len(x), out.shape[1]) >= lengths[:, None]
    weights = out.sum(-1).masked_fill(late, float("-inf")).softmax(1)
    return (weights.unsqueeze(-1) * out).sum(1)


CASES: list[tuple[Callable[..., Any], Callable[[], nn.Module]]] = [
    (_last, lambda: nn.LSTM(8, 8, 2, dropout=0.1, bidirectional=True)),
    (_whole_length, lambda: nn.GRU(8, 8)),
    (_mean, lambda: nn.RNN(8, 8, nonlinearity="relu")),
    (_attention, lambda: nn.LSTM(8, 12, proj_size=8)),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("forward", "rnn"), CASES)
def test_packed_sequences_stay_inside_of_an_opaque_module(
    forward: Callable[..., Any], rnn: Callable[[], nn.Module]
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.encoder = nn.Linear(8, 8), make(forward, rnn=rnn())

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.encoder(self.first(x), lengths)  # type: ignore[no-any-return]

    with pytest.warns(UserWarning, match="captured as opaque"):
        graph = faithful(Model(), X, LENGTHS, sizes=(1, 4)).train
    assert [op.module_path for op in graph.ops if op.opaque] == ["encoder"]
    assert graph.sizes.smallest == 1


def test_packed_sequences_at_the_root_are_refused() -> None:
    with pytest.raises(TraceError, match="depends on values"):
        captured(make(_last, rnn=nn.LSTM(8, 8)), X, LENGTHS)


@pytest.mark.slow
def test_samples_of_all_lengths_on_two_stages(tmp_path: Path) -> None:
    encoder = make(_mean, rnn=nn.LSTM(8, 8, 2, dropout=0.5, bidirectional=True))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = encoder, nn.Linear(16, 16)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.head(self.encoder(x, lengths))  # type: ignore[no-any-return]

    model = Model()
    options: dict[str, Any] = {"microbatches": 2, "optimizer": None}
    with pytest.warns(UserWarning, match="captured as opaque"):
        pipe = pdcompile.compile(
            model, (X, LENGTHS), loss_fn=nn.MSELoss(), example_target=X[:, 0].repeat(1, 2),
            stages=2, costs="estimated", **options,
        )  # fmt: skip
    reference = pdcompile.reference(model, loss_fn=nn.MSELoss(), **options)
    for lengths in (LENGTHS, torch.tensor([1, 1, 1, 1]), torch.tensor([3, 7, 7, 2])):
        losses = [float(p.step(X, lengths, target=X[:, 0].repeat(1, 2)).loss)
                  for p in (pipe, reference)]  # fmt: skip
        assert losses[0] == losses[1]
    pipe.dump(str(tmp_path))
    text = (tmp_path / "pipeline.py").read_text(encoding="utf-8")
    assert '"lengths": torch.tensor([7, 2], dtype=torch.int64)' in text  # not made up: zero fails


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "of",
    [lambda n: n, lambda n: min(n, 5), lambda n: max(n, 1), lambda n: 1 if n > 20 else 2],
    ids=["passed_on", "at_most", "at_least", "compared"],
)
def test_what_python_computes_from_such_a_size_is_refused(of: Callable[[int], int]) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.lin(x)
        return h * torch.ones(of(h[h[..., 0] > 0].shape[0])).sum()

    with pytest.raises(TraceError, match="depends on values"):
        captured(make(forward), X)
