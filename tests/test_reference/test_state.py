"""State in and out, copies, closing."""

from __future__ import annotations

import copy

import pytest
import torch

import pdcompile
from pdcompile.errors import ClosedError, InputError
from tests.helpers.loops import (
    SGD,
    same,
)
from tests.helpers.models import batch_for, gpt, loss_for, mlp


def test_state() -> None:
    model = gpt(tied=True)
    pipe = pdcompile.reference(model, loss_fn=loss_for(model), optimizer=SGD, microbatches=1)
    full = pipe.full_state_dict()
    assert full.keys() == model.state_dict().keys() == pipe.state_dict().keys()
    assert "lm_head.weight" in full
    x, y = batch_for(model, 2)
    pipe.step(x, target=y)
    assert torch.equal(pipe.state_dict()["wte.weight"], model.wte.weight)
    assert not torch.equal(full["wte.weight"], model.wte.weight)
    pipe.load_state_dict({"ln_f.bias": torch.ones(32)})
    assert model.ln_f.bias.eq(1).all()
    pipe.load_state_dict(full)
    assert torch.equal(full["wte.weight"], model.wte.weight)
    with pytest.raises(InputError, match="nothing called other"):
        pipe.load_state_dict({"other": torch.ones(1)})
    with pytest.raises(InputError, match="does not fit"):
        pipe.load_state_dict({"ln_f.bias": torch.ones(3)})


def test_keep_model_trains_a_copy() -> None:
    model = mlp()
    before = copy.deepcopy(model)
    pipe = pdcompile.reference(
        model, loss_fn=loss_for(model), optimizer=SGD, microbatches=1, keep_model=True
    )
    x, y = batch_for(model, 2)
    pipe.step(x, target=y)
    same(model, before)
    name = "layers.0.weight"
    assert not torch.equal(pipe.to_model().get_parameter(name), model.get_parameter(name))


def test_after_close() -> None:
    model = mlp()
    with pdcompile.reference(model, loss_fn=loss_for(model), microbatches=1) as pipe:
        pass
    x, y = batch_for(model, 2)
    for call in (pipe.step, pipe.eval_step, pipe.forward_backward):
        with pytest.raises(ClosedError):
            call(x, target=y)
    assert pipe.to_model() is model
