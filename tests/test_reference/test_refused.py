"""Refusals of the reference, and what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import ConfigError, InputError
from pdcompile.reference import Reference
from tests.helpers.loops import (
    SGD,
    batches,
    by_hand,
    run,
    same,
)
from tests.helpers.models import mlp


def make(**options: Any) -> Reference:
    made: Reference = pdcompile.reference(
        **{"model": mlp(), "loss_fn": F.mse_loss, "optimizer": SGD, "microbatches": 2, **options}
    )
    return made


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"microbatches": "auto"}, "planner's choice"),
        ({"microbatches": 0}, "from 1 up"),
        ({"microbatches": True}, "from 1 up"),
        ({"schedule": "auto"}, "planner's choice"),
        ({"schedule": "fast"}, "is not available"),
        ({"schedule": "stash", "microbatches": 2}, "every microbatch is a minibatch"),
        ({"schedule": "stash", "microbatches": 1}, "depends on the plan"),
        ({"schedule": "vsync", "microbatches": 1}, "depends on the plan"),
        ({"schedule": "stash", "microbatches": 1, "max_grad_norm": 1.0}, "all stages"),
        ({"schedule": "2bw", "optimizer": None}, "without updates"),
        ({"max_grad_norm": 0}, "max_grad_norm=0 is not a positive"),
        ({"loss_reduction": "median"}, "'median'"),
        ({"loss_fn": 3}, "cannot be called"),
        ({"optimizer": 3}, "cannot be called"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)])}, "an instance of SGD"),
        ({"optimizer": lambda parameters: 1}, "returned int"),
        ({"optimizer": torch.optim.LBFGS}, "closure"),
        ({"grad_scaler": "fp16"}, "grad_scaler"),
        ({"autocast": "float"}, "not a dtype"),
        ({"autocast": "fp16"}, r"not a dtype(.|\n)*float16 \(--autocast bfloat16\)"),
        ({"nonsense": 1}, "nonsense"),
        ({"model": 3}, "must be a torch.nn.Module"),
        ({"model": nn.DataParallel(mlp())}, "wrapped"),
        ({"model": torch.compile(mlp(), backend="eager")}, "wrapped"),
        ({"model": nn.Linear(2, 2, device="meta")}, "meta device"),
        ({"model": nn.LazyLinear(2)}, "no shape yet"),
    ],
)
def test_options_without_meaning(options: dict[str, Any], said: str | None) -> None:
    if said is None:
        make(**options)
        return
    with pytest.raises(ConfigError, match=said):
        make(**options)


def test_forward_backward_needs_the_newest_weights() -> None:
    pipe = make(schedule="2bw")
    with pytest.raises(ConfigError, match="older weights"):
        pipe.forward_backward(torch.ones(2, 16), target=torch.ones(2, 16))


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (lambda out, target: out, "shape"),
        (lambda out, target: out.sum().item(), "type float"),
        (lambda out, target: out.detach().sum(), "trainable"),
        (None, "no loss in it"),
    ],
)
def test_losses_without_a_gradient(loss_fn: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(loss_fn=loss_fn).step(torch.ones(2, 16))


def test_minibatches_that_do_not_fit() -> None:
    x = torch.ones(4, 16)
    pipe = make()
    with pytest.raises(InputError, match="missing"):
        pipe.step(target=x)
    with pytest.raises(InputError, match="neither the batch size"):
        pipe.step(x, target=torch.ones(3, 16))
    with pytest.raises(InputError, match="no samples"):
        pipe.step(x[:0], target=x[:0])
    with pytest.raises(InputError, match="example_inputs"):
        make(example_inputs=[x])


def test_batch_dims_reach_every_minibatch() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            out: Tensor = self.linear(x.transpose(0, 1)) * scale
            return out

    model = Scaled()
    pipe = make(model=model, batch_dims={"x": 1, "scale": None})
    for size in (4, 3):  # the second one is as long as `scale` by chance
        x, scale = torch.randn(3, size, 1).expand(3, size, 3), torch.arange(3.0)
        outputs = pipe.eval_step(x, scale, target=torch.zeros(size, 3, 3)).outputs
        torch.testing.assert_close(outputs, model(x, scale).detach())


def test_another_mode_of_the_caller_changes_nothing() -> None:
    model = mlp()
    data = batches(model, 4)
    with torch.no_grad():
        trained, losses = run(model, data, optimizer=SGD)
    expected, by_loop = by_hand(model, data, SGD, 3)
    same(trained, expected)
    assert losses == by_loop
