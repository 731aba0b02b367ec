"""Modules whose code depends on data are opaque, and train as in eager, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import TraceError
from tests.helpers.captures import captured, make, rows
from tests.helpers.pipelines import states_equal

Forward = Callable[[Any, Tensor], Tensor]


def _dropped_layers(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        if self.training and torch.rand([]) < 0.4:
            continue
        x = x + F.dropout(layer(x), 0.2, self.training)
    return x


def _other_parameters(self: Any, x: Tensor) -> Tensor:
    if not torch.isfinite(x).all() or (x > 2).any():
        x = torch.clamp(x, min=-1, max=1)
    one, two = self.layers[0](x).tanh(), self.layers[1](x).tanh()
    return one if x.mean() > 0 else two


def _until_a_value_is_reached(self: Any, x: Tensor) -> Tensor:
    for _ in range(9):
        if x.norm() < 1.5:
            break
        x = torch.tanh(self.layers[0](x)) / 2
    return x


def _experts_that_are_hit(self: Any, x: Tensor) -> Tensor:
    weights, chosen = self.layers[0](x).softmax(-1).topk(2, -1)
    mask = F.one_hot(chosen, 8).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        slot, row = torch.where(mask[expert[0]])
        scaled = self.layers[1 + int(expert[0]) % 2](x[row]) * weights[row, slot, None]
        out.index_add_(0, row, scaled)
    return out


def _gradients_by_transforms(self: Any, x: Tensor) -> Tensor:
    slopes = torch.func.grad(lambda row: torch.tanh(self.layers[0](row)).sum())
    return torch.func.vmap(slopes)(x) + x


def _size_of_the_example(self: Any, x: Tensor) -> Tensor:
    first = (x == x.amax(1, keepdim=True)).float().argmax(1)
    mask = F.one_hot(first, x.shape[1]).bool()
    return self.layers[0](x) * x[mask].view(len(x), -1)


FORWARDS = [_dropped_layers, _other_parameters, _until_a_value_is_reached, _experts_that_are_hit,
            _gradients_by_transforms, _size_of_the_example]  # fmt: skip


def _model(forward: Forward) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    return nn.Sequential(nn.Linear(8, 8), make(forward, layers=layers), nn.Linear(8, 8))


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:captured as opaque", "ignore:the loss is not linear")
@pytest.mark.parametrize("forward", FORWARDS)
def test_trains_as_the_reference(forward: Forward) -> None:
    model = _model(forward)
    options: dict[str, Any] = {
        "loss_fn": nn.MSELoss(), "microbatches": 2, "seed": 3,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
    }  # fmt: skip
    eager = pdcompile.reference(model, keep_model=True, **options)
    pipe = pdcompile.compile(
        model, (rows(),), example_target=rows(seed=9), stages=2, keep_model=True,
        costs="estimated", **options,
    )  # fmt: skip
    ops = pipe._running.compiled.capture.train.ops
    assert [op.module_path for op in ops if op.opaque] == ["1"]
    for step, scale in enumerate((0.1, 1.0, 4.0, 1.0)):  # ways and experts of all kinds
        x, target = scale * rows(seed=step), rows(seed=9)
        ours, theirs = pipe.step(x, target=target), eager.step(x, target=target)
        assert float(ours.loss) == float(theirs.loss)
        mine = {name: p.grad is None for name, p in pipe.named_parameters()}
        assert mine == {name: p.grad is None for name, p in eager.named_parameters()}
    assert not states_equal(pipe.full_state_dict(), eager.full_state_dict())
    pipe.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("forward", FORWARDS)
def test_at_the_root_it_is_refused_with_the_line(forward: Forward) -> None:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    with pytest.raises(TraceError) as caught:
        captured(make(forward, layers=layers))
    assert "test_data_dependent.py:" in str(caught.value.where)
    assert caught.value.remedy
