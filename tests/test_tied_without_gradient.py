"""Parameters with several readers, none of which surely hands a gradient back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.coarsen.spans import NO_GRADIENT, Groups, join_spans
from tests.helpers.captures import captured, make, rows

Forward = Callable[..., Any]


def _detached(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x) + self.weight.detach()
    return self.second(h) * self.weight.detach()


def _once_surely(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x) + self.weight.detach()
    return self.second(h) * self.weight


def _model(forward: Forward) -> nn.Module:
    return make(forward, weight=nn.Parameter(torch.ones(8)), second=nn.Linear(8, 8))


def _joined(graph: OpGraph) -> int:
    groups = Groups(len(graph.ops) + 1)
    join_spans(graph, groups)
    return groups.reasons[NO_GRADIENT]


@pytest.mark.slow
def test_their_readers_stay_together() -> None:
    assert _joined(captured(_model(_detached)).train) == 1


def test_one_reader_that_surely_does_is_enough() -> None:
    graph = captured(_model(_once_surely)).train
    assert _joined(graph) == 0


def test_weight_decay_leaves_them_alone_as_in_the_reference() -> None:
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "microbatches": 2}
    model = _model(_detached)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)

    eager = pdcompile.reference(model, optimizer=optimizer, keep_model=True, **options)
    pipe = pdcompile.compile(
        model, (rows(),), example_target=rows(seed=1), optimizer=optimizer, keep_model=True,
        stages=2, costs="estimated", **options,
    )  # fmt: skip
    for step in range(2):
        ours = pipe.step(rows(seed=step), target=rows(seed=5))
        assert float(ours.loss) == float(eager.step(rows(seed=step), target=rows(seed=5)).loss)
    assert torch.equal(pipe.full_state_dict()["weight"], torch.ones(8))
    pipe.close()
