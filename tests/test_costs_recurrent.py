"""What an LSTM keeps on a CPU: parts of whole pages, in closed form all the same."""

from __future__ import annotations

from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.batch import example_call, resolve_batch
from pdcompile.passes.costs import CostedOp, GraphIndex
from pdcompile.passes.costs.rehearsal.kept_storages import kept_storages
from pdcompile.passes.costs.symbolic import SymbolicCosts
from pdcompile.passes.costs.workspaces import Workspace, workspace
from pdcompile.passes.trace import capture

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"input_size": 24, "hidden_size": 40, "batch_first": True},
    "both directions, two layers": {
        "input_size": 40, "hidden_size": 24, "num_layers": 2, "bidirectional": True, "bias": False
    },
    "rows that fall on the same sets of the cache": {"input_size": 8, "hidden_size": 64},
}  # fmt: skip


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if i == 0 else pytest.param(name, marks=pytest.mark.slow)
        for i, name in enumerate(LAYERS)
    ],
)
def test_an_lstm_has_a_closed_form_that_holds_at_other_sizes(name: str) -> None:
    model = Reader(**LAYERS[name])
    costs = costs_of(model, torch.randint(0, 11, (4, 9)))
    assert costs.symbols == ("b", "s")
    assert costs.symbolic_share == 1.0
    op = next(op for op in costs.ops if op.target == "torch.nn.LSTM")
    assert op.saved_bytes.has(sympy.ceiling)
    for b, s in ((3, 31), (11, 14)):
        flat = example_call(model, torch.randint(0, 11, (b, s)), None)
        graph = capture(model, flat, resolve_batch(flat), lambda out, _: out.sum()).train
        assert (b, s) not in costs.fitted
        real = kept_storages(graph, b).new()
        found = next(one for one in costs.at(b, s).ops if one.name == op.name)
        assert found.saved_bytes == real[op.name]


@pytest.mark.slow
def test_a_kernel_that_keeps_something_else_is_a_number() -> None:
    model = Reader(**LAYERS["plain"])
    ids = torch.randint(0, 11, (4, 9))
    with torch.backends.mkldnn.flags(enabled=False):
        costs = costs_of(model, ids)
    op = next(op for op in costs.ops if op.target == "torch.nn.LSTM")
    assert not op.symbolic
    assert isinstance(op.saved_bytes, int)


def test_pages_are_whole_and_only_plain_lstms_have_them() -> None:
    assert Workspace(((8, 8),), 1, 1).bytes == 7 * 4096
    assert Workspace(((256, 256),), 1, 64).bytes == 414 * 4096  # as oneDNN 3 has it
    model = nn.GRU(4, 4)
    flat = example_call(model, torch.randn(3, 2, 4), None)
    graph = capture(model, flat, resolve_batch(flat, 1), lambda out, _: out[0].sum()).train
    index = GraphIndex.of(graph, 2)
    assert [workspace(CostedOp(op, index)) for op in graph.ops] == [None] * len(graph.ops)
