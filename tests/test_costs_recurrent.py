"""Bytes that an LSTM keeps on a CPU, whose kernel has parts of whole pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.passes.costs.symbolic import SymbolicCosts


class Reader(nn.Module):
    """Token ids (b, s) -> logits (b, s, 5)."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        width = sizes["hidden_size"] * (2 if sizes.get("bidirectional") else 1)
        self.table = nn.Embedding(11, sizes["input_size"])
        self.lstm = nn.LSTM(**sizes)
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor) -> Tensor:
        given = self.table(ids)
        if not self.lstm.batch_first:
            given = given.transpose(0, 1)
        found, _ = self.lstm(given)
        return self.head(found if self.lstm.batch_first else found.transpose(0, 1))  # type: ignore[no-any-return]


def costs_of(model: nn.Module, ids: Tensor) -> SymbolicCosts:
    return pdcompile.symbolic_costs(
        model, ids, example_target=ids, loss_fn=lambda out, ids: out.square().mean() + ids.sum() * 0
    )


def test_what_onednn_rounds_up_to_pages_is_a_number() -> None:
    sizes = {"input_size": 24, "hidden_size": 40, "batch_first": True}
    costs = costs_of(Reader(**sizes), torch.randint(0, 11, (4, 9)))
    op = next(op for op in costs.ops if op.target == "torch.nn.LSTM")
    assert not op.symbolic
    assert isinstance(op.saved_bytes, int)
    assert costs.symbols == ("b", "s")
    assert 0 < costs.symbolic_share < 1
