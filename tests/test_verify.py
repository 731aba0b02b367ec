"""Stages against eager: every model, many cuts, training and evaluation, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import pytest
import torch

from pdcompile.batch import BatchLayout, FlatCall, example_call, resolve_batch
from pdcompile.errors import VerifyError
from pdcompile.graph import Capture
from pdcompile.passes.codegen import generate
from pdcompile.passes.trace import capture
from pdcompile.passes.verify import verify
from pdcompile.stage import Sources
from tests.helpers import models
from tests.helpers.cuts import cut

MODELS = {
    "gpt": lambda: models.gpt(dropout=0.1, layers=2),
    "gpt_untied": lambda: models.gpt(tied=False, layers=2),
    "gpt_returns_loss": lambda: models.returns_loss(models.gpt(dropout=0.1, layers=2)),
    "mlp": models.mlp,
    "convnet": models.convnet,
    "unet": models.unet,
}


@cache
def captured(name: str) -> tuple[torch.nn.Module, FlatCall, BatchLayout, Capture]:
    model = MODELS[name]()
    if isinstance(model, models.ReturnsLoss):
        flat = example_call(model, models.batch_for(model, 6))
    else:
        inputs, target = models.batch_for(model, 6)
        flat = example_call(model, inputs, target)
    layout = resolve_batch(flat)
    return model, flat, layout, capture(model, flat, layout, loss_of(model), microbatch_size=3)


def loss_of(model: torch.nn.Module):
    return None if isinstance(model, models.ReturnsLoss) else models.loss_for(model)


def num_ops(found: Capture) -> int:
    return sum(op.region == "forward" for op in found.train.ops)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_equal_eager(name, num_stages):
    model, flat, layout, found = captured(name)
    count = num_ops(found)
    plan = cut(found, [count * k // num_stages for k in range(1, num_stages)])
    report = verify(found, plan, generate(found, plan), model, flat, layout, loss_of(model))
    assert report.differences == ()
    assert report.exact
    assert report.gradients == len(list(model.parameters()))


@pytest.mark.parametrize("position", range(1, 36, 5))
def test_every_cut_through_a_block_equals_eager(position):
    model, flat, layout, found = captured("gpt")
    plan = cut(found, [position])
    report = verify(found, plan, generate(found, plan), model, flat, layout, models.token_loss)
    assert not report.differences


def test_the_model_is_left_as_it_was():
    model, flat, layout, found = captured("convnet")
    plan = cut(found, [4])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.head.weight.grad = torch.full_like(model.head.weight, 3.0)
    model.eval()
    generator = torch.get_rng_state()
    verify(found, plan, generate(found, plan), model, flat, layout, models.class_loss)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert model.head.weight.grad.eq(3.0).all()
    assert not model.training
    assert torch.equal(torch.get_rng_state(), generator)
    model.zero_grad()
    model.train()


def edited(found: Capture, plan, old: str, new: str, file: str = "stage_1.py") -> Sources:
    sources = generate(found, plan)
    assert old in sources.files[file]
    text = sources.files[file].replace(old, new)
    return dataclasses.replace(sources, files={**sources.files, file: text}, edited=(file,))


def test_an_edit_that_changes_the_result_is_reported_by_name():
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    sources = edited(found, plan, "torch.relu(x)", "torch.relu(x) * 2")
    report = verify(found, plan, sources, model, flat, layout, models.square_loss)
    kinds = {(one.mode, one.what) for one in report.differences}
    assert {("train", "output"), ("train", "loss"), ("train", "gradient")} <= kinds
    assert "layers.0.weight" in {one.name for one in report.differences}
    assert "edited (stage_1.py)" in str(report)
    assert json.loads(report.to_json())["edited"] == ["stage_1.py"]


def test_an_edit_that_changes_nothing_is_no_difference():
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    sources = edited(found, plan, "torch.relu(x)", "torch.relu(x) * 1")
    assert not verify(found, plan, sources, model, flat, layout, models.square_loss).differences


def test_the_same_change_in_generated_sources_is_an_error():
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    sources = dataclasses.replace(
        edited(found, plan, "torch.relu(x)", "torch.relu(x) * 2"), edited=()
    )
    with pytest.raises(VerifyError, match="the generated stages differ from the model"):
        verify(found, plan, sources, model, flat, layout, models.square_loss)


def test_a_stage_that_raises_is_named():
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    sources = edited(found, plan, "torch.relu(x)", "torch.relu(y)")
    with pytest.raises(VerifyError, match="stage 1 raises NameError"):
        verify(found, plan, sources, model, flat, layout, models.square_loss)


def test_a_wrong_edge_is_noticed():
    """Without its gradient an edge would leave the first stage untrained, silently."""
    model, flat, layout, found = captured("mlp")
    values = {
        name: dataclasses.replace(value, needs_gradient=False)
        for name, value in found.train.values.items()
    }
    broken = dataclasses.replace(found, train=dataclasses.replace(found.train, values=values))
    plan = cut(broken, [5])
    with pytest.raises(VerifyError, match=r"gradient 'layers\.0\.weight' of stage 0"):
        verify(broken, plan, generate(broken, plan), model, flat, layout, models.square_loss)


def test_a_model_on_meta_is_reported_as_not_verified():
    _, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    meta = models.mlp().to("meta")
    report = verify(found, plan, generate(found, plan), meta, flat, layout, models.square_loss)
    assert "not verified" in str(report)
