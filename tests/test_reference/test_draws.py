"""Random draws of the reference: named streams, the caller's generator untouched."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pdcompile
from pdcompile.eager.randomness import evaluation_minibatch, seed_of
from tests.helpers.loops import (
    ADAMW,
    SGD,
    batches,
    run,
    same,
)
from tests.helpers.models import batch_for, gpt, loss_for


def test_dropout_by_hand() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.3))
    x, y = torch.randn(5, 8), torch.randn(5, 8)

    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(F.dropout(output, 0.1), target)

    expected = copy.deepcopy(model)
    for minibatch in range(2):
        for i, (a, b) in enumerate(zip(x.tensor_split(2), y.tensor_split(2), strict=True)):
            hidden = expected[0](a)
            torch.manual_seed(seed_of(9, minibatch, i, "1", 0))
            hidden = expected[2](F.dropout(hidden, 0.5))
            torch.manual_seed(seed_of(9, minibatch, i, "3", 0))
            hidden = F.dropout(hidden, 0.3)
            torch.manual_seed(seed_of(9, minibatch, i, "loss_fn", 0))
            (noisy(hidden, b) * (len(a) / 5)).backward()  # type: ignore[no-untyped-call]
    pipe = pdcompile.reference(model, loss_fn=noisy, microbatches=2, seed=9)
    for _ in range(2):
        pipe.forward_backward(x, target=y)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_dropout_depends_on_the_seed_and_not_on_the_global_generator() -> None:
    model = gpt(dropout=0.3)
    data = batches(model, 4, 4)
    torch.manual_seed(1)
    first, losses = run(model, data, optimizer=ADAMW)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again, _ = run(model, data, optimizer=ADAMW)
    assert torch.equal(torch.get_rng_state(), before)
    same(first, again)
    assert run(model, data, optimizer=ADAMW, seed=1)[1] != losses


def test_every_minibatch_and_microbatch_draws_afresh() -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * torch.randn_like(x)

    x = torch.zeros(4, 1)
    pipe = pdcompile.reference(
        Noise(), loss_fn=lambda out, target: out.mean(), microbatches=4, optimizer=SGD
    )
    with torch.no_grad():
        pipe.to_model().scale.requires_grad_()
    outputs = [pipe.forward_backward(x).outputs, pipe.forward_backward(x).outputs]
    outputs += [pipe.predict(x), pipe.predict(x)]
    assert len(set(torch.cat(outputs).flatten().tolist())) == 16
    generator = torch.Generator().manual_seed(seed_of(0, evaluation_minibatch(1), 2, "", 0))
    assert torch.equal(outputs[3][2], torch.randn(1, generator=generator))


def test_activation_checkpointing_changes_nothing() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.again = True

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = (
                checkpoint(self.inner, ids, use_reentrant=False) if self.again else self.inner(ids)
            )
            return out

    inner = gpt(dropout=0.3)
    model = Checkpointed(inner)
    x, y = batch_for("gpt", 4)
    gradients = []
    for model.again in (True, False):
        inner.zero_grad()
        pipe = pdcompile.reference(model, loss_fn=loss_for(inner), microbatches=2)
        pipe.forward_backward(x, target=y)
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
