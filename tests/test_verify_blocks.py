"""Verification block by block: models without memory, and models that do not fit."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from torch import nn

from pdcompile.batch import example_call, resolve_batch
from pdcompile.errors import VerifyError
from pdcompile.passes import verify as package
from pdcompile.passes.codegen import generate
from pdcompile.passes.trace import capture
from pdcompile.passes.verify import verify
from pdcompile.passes.verify.distinct_blocks import verify_blocks
from tests.helpers import models
from tests.helpers.cuts import cut

ROOM = 1 << 30


@cache
def captured(layers=3):
    """(model on the meta device, flat, layout, capture) of a small GPT with dropout."""
    model = models.gpt(dropout=0.1, layers=layers)
    inputs, target = models.batch_for(model, 4)
    model = model.to("meta")
    flat = example_call(model, inputs, target)
    layout = resolve_batch(flat)
    found = capture(model, flat, layout, models.token_loss, microbatch_size=2)
    return model, flat, layout, found


def given(positions=(3,), layers=3):
    model, flat, layout, found = captured(layers)
    plan = cut(found, list(positions))
    return found, plan, generate(found, plan), model, flat, layout, models.token_loss


def test_equal_layers_are_compared_once_without_memory_for_the_model():
    arguments = given()
    report = verify_blocks(*arguments, budget=ROOM)
    assert report.blocks == "3 of 3 Block as 1 distinct block"
    assert report.differences == ()
    # 12 parameters and the input, once for three layers
    assert [row.gradients for row in report.rows] == [13, 0]
    assert "equal eager bit for bit" in str(report)
    assert "the loss" in report.left_out
    assert "values that blocks hand to each other" in report.left_out
    assert all(parameter.is_meta for parameter in arguments[3].parameters())


def test_a_block_that_is_cut_is_listed_and_the_others_are_compared():
    found, plan, sources, *rest = given(positions=(12,))
    report = verify_blocks(found, plan, sources, *rest, budget=ROOM)
    assert report.blocks == "2 of 3 Block as 1 distinct block"
    assert "blocks.0 (cut between stages)" in report.left_out


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("F.gelu(", "F.relu(", "output"),
        ("F.gelu(", "(lambda t: F.gelu(t).detach())(", "gradient"),
        ("self.drop(", "nn.Identity()(", "output"),
    ],
)
def test_a_block_that_computes_something_else_is_named(old, new, what):
    found, plan, sources, *rest = given()
    text = sources.files["stage_1.py"]
    assert old in text
    files = {**sources.files, "stage_1.py": text.replace(old, new)}
    wrong = dataclasses.replace(sources, files=files)
    with pytest.raises(
        VerifyError, match=r"first at block 'blocks\.0' \(Block, \S*models\.py:\d+\)"
    ):
        verify(found, plan, wrong, *rest, mode="blocks")
    edited = dataclasses.replace(wrong, edited=("stage_1.py",))
    report = verify(found, plan, edited, *rest, mode="blocks")
    assert report.differences[0].what == what
    assert {one.mode for one in report.differences} >= {"train"}


def test_no_room_for_a_block_leaves_nothing_verified():
    report = verify_blocks(*given(), budget=1000)
    assert report.unverified
    assert "more than half of the free memory" in report.unverified


def test_which_form_is_chosen(monkeypatch):
    meta = given()
    assert "pdcompile verify" in verify(*meta).unverified
    assert verify(*meta, mode="full").blocks

    model = models.mlp()
    inputs, target = models.batch_for(model, 4)
    flat = example_call(model, inputs, target)
    layout = resolve_batch(flat)
    found = capture(model, flat, layout, models.square_loss, microbatch_size=2)
    plan = cut(found, [5])
    real = (found, plan, generate(found, plan), model, flat, layout, models.square_loss)
    assert not verify(*real).blocks
    monkeypatch.setattr(package, "fits", lambda model, graph: False)
    # A chain of torch's own layers has no blocks, which is said instead of "equal".
    assert "nothing could be compared" in verify(*real).unverified


def test_a_model_with_memory_is_compared_with_its_own_weights():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x, scale=1.0, *, mask=None):
            self.calls += 1
            x = x + scale * torch.tanh(self.lin(x))
            return (x if mask is None else x * mask), {"norm": x.norm()}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x, mask):
            norms = []
            for layer in self.layers:
                x, more = layer(x, 0.5, mask=mask)
                norms.append(more["norm"])
            return {"loss": x.square().mean() + sum(norms)}

    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flat = example_call(model, {"x": torch.randn(4, 8), "mask": torch.ones(4, 8)})
    layout = resolve_batch(flat)
    found = capture(model, flat, layout, None, microbatch_size=2)
    plan = cut(found, [1])
    report = verify_blocks(
        found, plan, generate(found, plan), model, flat, layout, None, budget=ROOM
    )
    assert report.differences == ()
    assert "2 of 3 Layer" in report.blocks
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
