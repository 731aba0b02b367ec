"""Models that hold results of a call can be copied, and trained on a copy."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import pdcompile
from pdcompile.eager.module_copies import copy_of
from pdcompile.errors import InputError
from tests.helpers.captures import make, rows
from tests.helpers.generated import mean_square


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_results_of_a_call_are_copied_without_their_history() -> None:
    model: Any = make(lambda self, x: self.lin(x), normed=nn.utils.weight_norm(nn.Linear(8, 8)))
    model.kept = {"last": [model.lin(rows())]}
    twin: Any = copy_of(model)
    assert torch.equal(twin.kept["last"][0], model.kept["last"][0])
    assert not twin.kept["last"][0].requires_grad
    assert torch.equal(twin.normed(rows()), model.normed(rows()))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_keep_model_with_the_old_weight_norm() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    reference = pdcompile.reference(
        model, loss_fn=mean_square, optimizer=None, microbatches=2, keep_model=True
    )
    reference.forward_backward(rows(), target=rows(seed=1))
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_copied_is_named() -> None:
    model: Any = make(lambda self, x: self.lin(x))
    model.lock = threading.Lock()
    with pytest.raises(InputError, match="the model cannot be copied") as caught:
        copy_of(model)
    assert "lock" in caught.value.message
    assert "keep_model=False" in str(caught.value)
