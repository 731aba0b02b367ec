"""Draws of a step while other threads draw: the same numbers, and the others' stay theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pdcompile
from pdcompile.cluster import Cluster
from pdcompile.eager.own_draws import OwnDraws
from pdcompile.errors import TraceError

pytestmark = pytest.mark.usefixtures("captured_anew")


class Checkpointed(nn.Module):
    """A branch on values makes it one opaque op, which runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(4, 4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return checkpoint(self.again, F.dropout(x, 0.1), use_reentrant=False)

    def again(self, x: Tensor) -> Tensor:
        return F.dropout(self.drop(self.inner(F.dropout(x, 0.2))), 0.3)


class Inline(nn.Module):
    """Calls the given function in its forward."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Recurrent(nn.Module):
    """Two draws in one op."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, 3, dropout=0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def attention(x: Tensor) -> Tensor:
    heads = x.view(1, 1, -1, 4)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).view(-1, 4)


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "modules": lambda: nn.Dropout(0.3),
    "functions": lambda: Inline(lambda x: x * torch.rand_like(x) + torch.randperm(4)),
    "attention": lambda: Inline(attention),
    "several draws in one op": Recurrent,
    "opaque and checkpointed": Checkpointed,
}


@contextmanager
def drawing_beside() -> Iterator[list[Tensor]]:
    """Another thread draws from torch's default generator all the time."""
    drawn, stop = list[Tensor](), threading.Event()

    def draw() -> None:
        while not stop.is_set():
            drawn.append(torch.rand(3))

    thread = threading.Thread(target=draw, name="the-drawing-one")
    thread.start()
    try:
        yield drawn
    finally:
        stop.set()
        thread.join()


@pytest.mark.sample(1)
@pytest.mark.parametrize("middle", MIDDLES)
def test_a_thread_that_draws_while_steps_run_changes_nothing(middle: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), MIDDLES[middle](), nn.Dropout(0.2), nn.Linear(4, 2))

    options: dict[str, Any] = {
        "loss_fn": F.mse_loss, "optimizer": partial(torch.optim.SGD, lr=0.1), "microbatches": 4,
    }  # fmt: skip
    x, y = torch.linspace(-1, 1, 32).view(8, 4), torch.zeros(8, 2)
    alone, beside = (pdcompile.reference(model(), **options) for _ in range(2))
    expected = [float(alone.step(x, target=y).loss) for _ in range(3)]
    pipe = pdcompile.compile(
        model(), cluster=Cluster.local(2), costs="estimated", progress=False, **options
    ).prepare(x, target=y)
    torch.manual_seed(5)
    with drawing_beside() as drawn:
        assert [float(pipe.step(x, target=y).loss) for _ in range(3)] == expected
        assert [float(beside.step(x, target=y).loss) for _ in range(3)] == expected
    torch.manual_seed(5)  # nor has the thread drawn other numbers than by itself
    assert all(torch.equal(one, torch.rand(3)) for one in drawn)


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],  # takes no generator
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "factories": lambda x: torch.cat([torch.rand(4), torch.randn(4), torch.randint(1, 9, (4,))]),
    "alike": lambda x: torch.rand_like(x) + torch.randn_like(x) + torch.randint_like(x, 3, 9),
    "in place": lambda x: x.detach().clone().normal_().exponential_().uniform_().geometric_(0.4),
    "distributions": lambda x: torch.poisson(x.exp()) + torch.binomial(x.exp(), x.sigmoid()),
    "samples": lambda x: (torch.multinomial(x.exp(), 2), torch.randperm(9), x.exp().bernoulli(0.4)),
    "normal": lambda x: torch.normal(x, 2.0) + torch.normal(0.0, 1.0, (4,)),
    "after one seed": lambda x: (torch.rand(3), torch.native_dropout(x, 0.4, True), torch.rand(3)),
    "a generator of its own": lambda x: torch.rand(3, generator=torch.Generator().manual_seed(3)),
}  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", DRAWS)
def test_own_draws_are_those_of_the_default_generator(name: str) -> None:
    own, x = OwnDraws(), torch.linspace(-1, 1, 20).view(5, 4)
    torch.manual_seed(7)
    expected = DRAWS[name](x)
    own.generator.manual_seed(7)
    state = torch.get_rng_state()
    with own:
        found = DRAWS[name](x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_thread_that_draws_during_a_capture_is_named() -> None:
    pipe = pdcompile.compile(
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)), cluster=Cluster.local(1),
        costs="estimated", progress=False, loss_fn=F.mse_loss,
    )  # fmt: skip
    x = torch.zeros(2, 4)
    with drawing_beside(), pytest.raises(TraceError, match="may draw meanwhile") as caught:
        pipe.prepare(x, target=x)
    assert "the-drawing-one" in str(caught.value.message)
    assert "prepare" in str(caught.value.remedy)
