"""Differences from one full-batch step that are meant, and options that do not fit the loss."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pdcompile
from pdcompile.batch import example_call, resolve_batch
from pdcompile.cluster import Cluster
from pdcompile.passes.codegen import generate
from pdcompile.passes.trace import capture
from pdcompile.passes.verify import verify
from pdcompile.passes.verify.full_batch import full_batch_notes
from tests.helpers import models
from tests.helpers.cuts import cut


def told(model, inputs, target, loss_fn, reduction="mean", most=None):
    """(notes, hints) for a minibatch in microbatches of two."""
    flat = example_call(model, inputs, target)
    layout = resolve_batch(flat)
    graph = capture(model, flat, layout, loss_fn, microbatch_size=2).train
    return full_batch_notes(model, graph, flat, layout, loss_fn, reduction, most=most)


def summed(output, target):
    return (output - target).square().sum()


def mean(output, target):
    return (output - target).square().mean()


def spread(output, target):
    return mean(output, target) + output.std()


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [4, 5, 7])
@pytest.mark.parametrize(("loss_fn", "fits"), [(mean, "mean"), (summed, "sum")])
def test_the_reduction_that_fits_is_told(rows, loss_fn, fits):
    model = models.mlp()
    inputs, target = models.batch_for(model, rows)
    assert told(model, inputs, target, loss_fn, fits) == ((), ())
    wrong = "sum" if fits == "mean" else "mean"
    notes, hints = told(model, inputs, target, loss_fn, wrong)
    assert notes == ()
    assert len(hints) == 1
    assert f"loss_reduction={fits!r} would agree" in hints[0]


def test_a_mean_over_tokens_is_told():
    model = models.gpt(layers=1)
    inputs, target = models.batch_for(model, 4)
    target = target.clone()
    target[:2, 4:] = -100

    def loss_fn(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)

    hints = told(model, inputs, target, loss_fn)[1]
    # 2 * 4 of 2 * 4 + 2 * 16 tokens count in the first microbatch
    assert "a mean over targets of which samples have unlike numbers" in hints[0]
    assert told(model, inputs, target, loss_fn, lambda a, k, t: (t != -100).sum())[1] == ()


def test_a_loss_that_is_not_linear_in_the_batch_is_told():
    model = models.mlp()
    inputs, target = models.batch_for(model, 6)
    notes, hints = told(model, inputs, target, spread)
    assert notes == ()
    assert len(hints) == 1
    assert "not linear in the batch" in hints[0]
    with pytest.warns(UserWarning, match="not linear in the batch.*microbatches=1 keeps"):
        pipe = pdcompile.compile(
            model, inputs, example_target=target, loss_fn=spread, microbatches=3,
            cluster=Cluster.local(2), costs="estimated",
        )  # fmt: skip
    pipe.close()


def test_batch_norm_is_named_and_hides_no_wrong_reduction():
    model = models.convnet()
    inputs, target = models.batch_for(model, 6)
    notes, hints = told(model, inputs, target, models.class_loss)
    assert hints == ()
    expected = "batch norm takes the statistics of each microbatch, 2 of the minibatch's 6 samples"
    assert any(f"{expected} (bn1, bn2)" in note for note in notes)
    assert any("buffers are written once a microbatch" in note for note in notes)
    _, hints = told(model, inputs, target, lambda o, t: F.cross_entropy(o, t, reduction="sum"))
    assert "loss_reduction='sum' would agree" in hints[0]


def test_dropout_is_off_while_gradients_are_compared():
    model = models.gpt(dropout=0.5, layers=1)
    inputs, target = models.batch_for(model, 4)
    notes, hints = told(model, inputs, target, models.token_loss)
    assert notes == hints == ()


@pytest.mark.filterwarnings("ignore:captured as opaque")
def test_models_that_draw_which_layers_train_are_compared_in_evaluation():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            x = self.layers[0](x)
            for layer in self.layers:
                if self.training and torch.rand([]) < 0.5:
                    continue
                x = x + layer(x)
            return x

    inputs, target = torch.randn(4, 6), torch.randn(4, 6)
    notes, hints = told(nn.Sequential(Dropping()), inputs, target, summed, "mean")
    assert notes == ()
    assert "loss_reduction='sum' would agree" in hints[0]


def test_what_cannot_be_asked_is_said():
    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.lin(x) + torch.rand_like(x)

    notes, hints = told(Noisy(), torch.ones(4, 4), torch.zeros(4, 4), mean)
    assert hints == ()
    assert any("were not compared: the model draws random numbers" in note for note in notes)


def test_one_microbatch_leaves_nothing_to_compare():
    model = models.mlp()
    inputs, target = models.batch_for(model, 2)
    assert told(model, inputs, target, summed) == ((), ())


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_compile_warns_of_a_wrong_reduction_and_the_command_lists_it(mode):
    model = models.mlp()
    inputs, target = models.batch_for(model, 4)
    flat = example_call(model, inputs, target)
    layout = resolve_batch(flat)
    found = capture(model, flat, layout, summed, microbatch_size=2)
    plan = cut(found, [5])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = verify(found, plan, generate(found, plan), model, flat, layout, summed, mode=mode)
    assert [str(w.message) for w in caught] == (list(report.notes) if mode == "auto" else [])
    assert "loss_reduction='sum' would agree" in str(report)
    assert not report.differences
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(torch.ones(8), torch.ones(8)))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x * self.weight).abs()).sum()


def test_complex_gradients_are_compared_whole() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Casting complex")
        pipe = pdcompile.compile(
            _Complex(), (torch.randn(4, 8),), loss_reduction="sum", stages=1, microbatches=2,
            costs="estimated", verify="full", optimizer=None,
        )  # fmt: skip
    pipe.close()


class Recomputing(nn.Module):
    """A checkpointed layer whose parameters are read elsewhere too, as `again` says."""

    def __init__(self, again, reentrant):
        super().__init__()
        self.first, self.layer, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.again, self.reentrant = again, reentrant

    def inside(self, x):
        return checkpoint(lambda t: self.layer(t).tanh(), x, use_reentrant=self.reentrant)

    def forward(self, x):
        x = self.inside(self.first(x).tanh())
        if self.again == "outside":
            x = self.layer(x)
        elif self.again == "in another region":
            x = self.inside(x)
        elif self.again == "without gradients":
            with torch.no_grad():
                x = x + self.layer(x.detach())
        return self.last(x)


@pytest.mark.sample(1)
@pytest.mark.parametrize("again", ["outside", "in another region"])
def test_reentrant_regions_that_share_parameters_are_named(again):
    batches = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(2)]
    flat = example_call(Recomputing(again, True), *batches[0])
    notes, _ = told(Recomputing(again, True), *batches[0], mean)
    assert [note for note in notes if "layer.weight, layer.bias: used in a region" in note]
    assert told(Recomputing(again, False), *batches[0], mean) == ((), ())
    pipe = pdcompile.compile(
        Recomputing(again, True), flat.leaves["x"], example_target=batches[0][1], loss_fn=mean,
        costs="estimated", cluster=pdcompile.Cluster.local(2), microbatches=4, optimizer=None,
    )  # fmt: skip
    assert (
        "use_reentrant=True eager adds the gradient of the region to .grad apart" in pipe.explain()
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("again", ["", "without gradients"])
def test_reentrant_regions_with_parameters_of_their_own_are_exact(again):
    assert told(Recomputing(again, True), torch.randn(8, 4), torch.randn(8, 4), mean) == ((), ())
