"""Inputs with one row for several samples: what eager broadcasts, and microbatches cannot cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdcompile.errors import InputError
from pdcompile.reference import reference
from tests.helpers.pipelines import by_hand

WIDTH = 4
BIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "added": lambda bias: bias,
    "summed": lambda bias: bias.sum(),
    "averaged": lambda bias: bias.sum() / bias.shape[0],
    "expanded": lambda bias: bias.expand(bias.shape[0], -1).sum(),
}


class Biased(nn.Module):
    captured_once = True

    def __init__(self, made: str) -> None:
        super().__init__()
        self.named = made
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.made = BIASES[made]

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))) + self.made(bias)


def rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def pair(model: Callable[[], nn.Module], inputs: Any, microbatches: int) -> tuple[Any, Any]:
    """A pipeline and the reference, both after an evaluation of the example."""
    options: dict[str, Any] = {
        "loss_fn": nn.functional.mse_loss,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "microbatches": microbatches,
    }
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(model())
    target = rows(inputs[0].shape[0], 9)
    pipe = by_hand(made[0], 2, inputs, target, **options).prepare()
    eager = reference(made[1], **options)
    for each in (pipe, eager):
        each.eval_step(*inputs, target=target)
    return pipe, eager


@pytest.mark.sample(2)
@pytest.mark.parametrize("call", ["step", "eval_step", "predict", "forward_backward"])
@pytest.mark.parametrize("made", list(BIASES))
def test_one_row_for_several_samples_is_refused(made: str, call: str) -> None:
    for each in pair(lambda: Biased(made), (rows(8), rows(8, 2)), 4):
        target = {} if call == "predict" else {"target": rows(8)}
        with pytest.raises(InputError, match="one row for 8 samples") as caught:
            getattr(each, call)(rows(8), rows(1), **target)
        assert caught.value.where == "bias"
        assert "expand()" in str(caught.value.remedy)
        getattr(each, call)(rows(8), rows(1).expand(8, WIDTH), **target)  # the remedy


@pytest.mark.sample(1)
@pytest.mark.parametrize("samples", [2, 4, 8])
def test_one_row_of_the_target_is_refused(samples: int) -> None:
    pipe, eager = pair(
        lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)), (rows(8),), 4
    )
    for each in (pipe, eager):
        with pytest.raises(InputError, match=f"one row for {samples} samples") as caught:
            each.step(rows(samples), target=rows(1))
        assert caught.value.where == "target"
    losses = [float(each.step(rows(1), target=rows(1)).loss) for each in (pipe, eager)]
    assert losses[0] == losses[1]  # a minibatch of one sample


@pytest.mark.sample(2)
@pytest.mark.parametrize("made", list(BIASES))
def test_one_microbatch_gets_the_row_whole_or_refuses_it(made: str) -> None:
    pipe, eager = pair(lambda: Biased(made), (rows(8), rows(8, 2)), 1)
    expected = float(eager.step(rows(8), rows(1), target=rows(8)).loss)
    if made in ("added", "summed"):
        assert float(pipe.step(rows(8), rows(1), target=rows(8)).loss) == expected
    else:  # the stages count the microbatch's samples for it
        with pytest.raises(InputError, match="one row for 8 samples"):
            pipe.step(rows(8), rows(1), target=rows(8))


def test_an_example_of_one_sample_does_not_make_rows_that_are_shared() -> None:
    pipe, eager = pair(lambda: Biased("averaged"), (rows(1), rows(1)), 1)
    with pytest.raises(InputError, match="one row for 8 samples"):
        pipe.step(rows(8), rows(1), target=rows(8))
    losses = [float(each.step(rows(1), rows(1), target=rows(1)).loss) for each in (pipe, eager)]
    assert losses[0] == losses[1]


def test_a_row_that_was_shared_at_first_stays_shared() -> None:
    pipe, eager = pair(lambda: Biased("summed"), (rows(8), rows(1)), 4)
    for samples in (8, 3, 1):
        losses = [
            float(each.step(rows(samples), rows(1), target=rows(samples)).loss)
            for each in (pipe, eager)
        ]
        assert losses[0] == losses[1]
    with pytest.raises(InputError, match=r"captured was float32 \(1, 4\)") as caught:
        pipe.step(rows(8), rows(8), target=rows(8))
    assert caught.value.where == "bias"
