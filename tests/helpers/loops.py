"""Training loops written by hand, for comparison with `pdcompile.reference`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pdcompile
from tests.helpers.models import batch_for, loss_for

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
ADAMW: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-2)
SGD: MakeOptimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
Batches = Sequence[tuple[Tensor, Tensor]]


class Normalised(torch.optim.SGD):
    """Divides by the norm of all gradients: an update that couples all parameters."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm + 1e-6)
        return super().step(closure)


def batches(model: nn.Module, *sizes: int) -> Batches:
    return [batch_for(model, size, seed) for seed, size in enumerate(sizes)]


def same(a: nn.Module, b: nn.Module) -> None:
    """Parameters and buffers are equal to the last bit."""
    state = b.state_dict()
    assert state.keys() == a.state_dict().keys()
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def run(model: nn.Module, data: Batches, **options: Any) -> tuple[nn.Module, list[float]]:
    """Losses and trained model of the reference, on a copy."""
    model = copy.deepcopy(model)
    options = {"loss_fn": loss_for(model), "microbatches": 3, **options}
    with pdcompile.reference(model, **options) as pipe:
        losses = [pipe.step(x, target=y).loss for x, y in data]
        assert all(loss is not None and loss.done() for loss in losses)
        return pipe.to_model(), [float(loss) for loss in losses if loss is not None]


def accumulate(model: nn.Module, x: Tensor, y: Tensor, m: int, loss_fn: Any = None) -> Tensor:
    """Gradient accumulation as a user writes it; returns the loss."""
    loss_fn = loss_fn or loss_for(model)
    total: Tensor | None = None
    for part, target in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
        loss = loss_fn(model(part), target) * (len(part) / len(x))
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total


def by_hand(
    model: nn.Module, data: Batches, make: MakeOptimizer, m: int, clip: float | None = None
) -> tuple[nn.Module, list[float]]:
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        losses.append(accumulate(model, x, y, m).item())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, losses


def delayed_by_hand(
    model: nn.Module, data: Batches, lag_of: Callable[[str], int], m: int, clip: float | None
) -> nn.Module:
    """W_{t+1} = U_t(W_t, g_t(W_max(t-lag, 0))), through functional_call on explicit versions."""
    newest = copy.deepcopy(model)
    optimizer = ADAMW(newest.parameters())
    history: list[dict[str, Tensor]] = []
    for t, (x, y) in enumerate(data):
        history.append({n: p.detach().clone() for n, p in newest.named_parameters()})
        used = {
            name: history[max(t - lag_of(name), 0)][name].clone().requires_grad_()
            for name in history[0]
        }
        for part, target in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
            output = torch.func.functional_call(newest, used, (part,))
            (loss_for(model)(output, target) * (len(part) / len(x))).backward()  # type: ignore[no-untyped-call]
        for name, parameter in newest.named_parameters():
            parameter.grad = used[name].grad
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(newest.parameters(), clip)
        optimizer.step()
    return newest
