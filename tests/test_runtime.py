"""The runtime in one process: what it trains is what the reference trains, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.cluster import Cluster
from pdcompile.errors import ClosedError, ConfigError, InputError, NotPrepared
from pdcompile.problem.constraints import Pin
from pdcompile.reference import Reference, reference
from pdcompile.runtime.pipeline import Pipeline
from tests.helpers import models
from tests.helpers.cases import case
from tests.helpers.pipelines import by_hand, states_equal

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def pair(
    model: nn.Module, schedule: str, stages: int, *, prepare: bool = True, **given: Any
) -> tuple[Pipeline, Reference, nn.Module]:
    options = {
        "loss_fn": models.loss_for(model) if not isinstance(model, models.ReturnsLoss) else None,
        "optimizer": ADAMW,
        "schedule": schedule,
        "microbatches": 4,
        **given,
    }
    twin = copy.deepcopy(model)
    inputs, target = models.batch_for(model, 8)
    if options["loss_fn"] is None:
        inputs, target = (inputs, target), None
    pipe = by_hand(model, stages, inputs, target, **options)
    plan = pipe.prepare().plan if prepare else None
    return pipe, reference(twin, plan=plan, **options), model


def train(runner: Any, model: nn.Module, sizes: list[int], *, flush_at: int = -1) -> list[float]:
    losses = []
    decay = runner.optimizer and torch.optim.lr_scheduler.ExponentialLR(runner.optimizer, 0.7)
    for t, size in enumerate(sizes):
        inputs, target = models.batch_for(model, size, t)
        losses.append(runner.step(inputs, target=target).loss)
        if decay:
            decay.step()
        if t == flush_at:
            runner.flush()
    return [float(loss) for loss in losses]


def assert_same_training(pipe: Pipeline, eager: Reference, model: nn.Module, **how: Any) -> None:
    sizes = [8, 8, 5, 8, 2, 8]
    assert train(pipe, model, sizes, **how) == train(eager, model, sizes)
    inputs, target = models.batch_for(model, 6, 99)
    ours, theirs = (p.eval_step(inputs, target=target) for p in (pipe, eager))
    assert float(ours.loss) == float(theirs.loss)
    assert torch.equal(ours.outputs, theirs.outputs)
    assert torch.equal(pipe.predict(inputs), eager.predict(inputs))
    assert not states_equal(pipe.full_state_dict(), eager.full_state_dict())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "stages", "name"),
    [
        case(name == "gpt" or schedule == "2bw", schedule, stages, name)
        for schedule, stages in (("2bw", 4), ("1f1b", 2), ("gpipe", 3))
        for name in ("unet", "gpt", "mlp", "convnet")
    ],
)
def test_trains_like_the_reference(name: str, schedule: str, stages: int) -> None:
    assert_same_training(*pair(getattr(models, name)(), schedule, stages))


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_draws_and_clips_like_the_reference(schedule: str) -> None:
    model = models.gpt(layers=1, dropout=0.2)
    assert_same_training(*pair(model, schedule, 3, seed=5, max_grad_norm=0.3))


def test_a_flush_changes_nothing() -> None:
    assert_same_training(*pair(models.mlp(), "2bw", 3), flush_at=1)


def test_outputs_are_the_models_own() -> None:
    pipe, eager, model = pair(models.mlp(), "2bw", 3)
    for t in range(3):
        inputs, target = models.batch_for(model, 7, t)
        ours, theirs = (p.step(inputs, target=target) for p in (pipe, eager))
        assert torch.equal(ours.outputs, theirs.outputs)
        assert not ours.outputs.requires_grad
    pipe.close()


@pytest.mark.parametrize("schedule", ["2bw", "stash"])
def test_outputs_may_be_written_before_the_backward_of_their_minibatch(schedule: str) -> None:
    pipe, eager, model = pair(models.mlp(), schedule, 3, microbatches=1)
    for t in range(5):
        inputs, target = models.batch_for(model, 7, t)
        ours, theirs = (p.step(inputs, target=target) for p in (pipe, eager))
        assert float(ours.loss) == float(theirs.loss)
        ours.outputs.numpy()[:] = 0
    pipe.close()


class Layers(nn.Module):
    """Returns what its two layers made, and a number of each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = self.first(x)
        last = self.last(first)
        states = torch.stack([first, last])
        return last, states, states.amax((1, 2))


def test_layers_are_no_samples_where_there_are_as_many_in_a_microbatch() -> None:
    model, x = Layers(), torch.randn(8, 4)
    with pdcompile.compile(
        model, x, schedule="forward", microbatches=4, cluster="local:2", costs="estimated"
    ) as pipe:
        _, states, largest = pipe.predict(x)
    torch.testing.assert_close(states, model(x)[1])
    torch.testing.assert_close(largest, torch.stack([model(part)[2] for part in x.split(2)]))


def test_leaving_with_microbatches_in_flight_warns() -> None:
    pipe, _, model = pair(models.mlp(), "2bw", 3)
    train(pipe, model, [8])
    with pytest.warns(RuntimeWarning, match="microbatches in flight"):
        pipe.__del__()
    pipe.close()


def test_a_model_that_returns_its_loss() -> None:
    pipe, eager, model = pair(models.returns_loss(models.unet()), "1f1b", 3)
    for t in range(3):
        batch = models.batch_for(model, 8, t)
        assert float(pipe.step(*batch).loss) == float(eager.step(*batch).loss)
    assert not states_equal(pipe.full_state_dict(), eager.full_state_dict())


def test_gradients_for_a_loop_of_ones_own() -> None:
    pipe, eager, model = pair(models.gpt(layers=1), "1f1b", 3, optimizer=None)
    mine, theirs = (torch.optim.SGD(p.parameters(), lr=0.1, momentum=0.9) for p in (pipe, eager))
    for t in range(4):
        inputs, target = models.batch_for(model, 8, t)
        for runner in (pipe, eager, pipe, eager):  # two calls accumulate
            runner.forward_backward(inputs, target=target)
        gradients = dict(eager.named_parameters())
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter.grad, gradients[name].grad), name
        assert torch.equal(pipe.clip_grad_norm_(0.5), eager.clip_grad_norm_(0.5))
        mine.step(), theirs.step(), pipe.zero_grad(), eager.zero_grad()
    inputs, _ = models.batch_for(model, 8, 9)
    assert torch.equal(pipe.predict(inputs), eager.predict(inputs))


def test_gradients_are_dropped_before_the_first_minibatch_too() -> None:
    model = models.mlp()
    inputs, target = models.batch_for(model, 8)
    model(inputs).sum().backward()
    pipe = pdcompile.compile(
        model, loss_fn=models.loss_for(model), optimizer=None, cluster=Cluster.local(2),
        microbatches=2, costs="estimated", verify="off",
    )  # fmt: skip
    pipe.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    pipe.forward_backward(inputs, target=target)
    assert all(parameter.grad is not None for parameter in model.parameters())
    pipe.close()
    unused = pdcompile.compile(models.mlp(), optimizer=None)
    unused.close()
    with pytest.raises(ClosedError):
        unused.zero_grad()


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_loaded_weights_start_a_new_history(schedule: str) -> None:
    pipe, eager, model = pair(models.gpt(layers=1), schedule, 2)
    train(pipe, model, [8, 8]), train(eager, model, [8, 8])
    state = models.gpt(layers=1, seed=3).state_dict()
    pipe.load_state_dict(state), eager.load_state_dict(state)
    assert train(pipe, model, [8, 8, 8]) == train(eager, model, [8, 8, 8])
    assert not states_equal(pipe.state_dict(), eager.state_dict())
    with pytest.raises(InputError, match="nothing called nowhere"):
        pipe.load_state_dict({"nowhere": torch.zeros(1)})
    with pytest.raises(InputError, match=r"wpe.weight is \(1,\)"):
        pipe.load_state_dict({"wpe.weight": torch.zeros(1)})


@pytest.mark.parametrize(
    "convert", [lambda value: value.to("meta"), lambda value: value.to_sparse()]
)
def test_a_state_without_dense_values_changes_nothing(convert: Callable[[Tensor], Tensor]) -> None:
    model = models.mlp()
    inputs, target = models.batch_for("mlp", 8)
    pipe = pdcompile.compile(
        model, inputs, example_target=target, loss_fn=models.loss_for("mlp"), optimizer=None,
        microbatches=4, cluster="local:2", costs="estimated", verify="off",
    )  # fmt: skip
    before = copy.deepcopy(model.state_dict())
    state = {name: torch.ones_like(value) for name, value in before.items()}
    *_, last = state
    with pytest.raises(InputError, match=f"{last} is no dense tensor with values"):
        pipe.load_state_dict(state | {last: convert(state[last])})
    assert not states_equal(model.state_dict(), before)


def test_the_model_itself_is_trained_and_the_generator_left_alone() -> None:
    pipe, _, model = pair(models.gpt(layers=1, dropout=0.2), "2bw", 2)
    before = torch.get_rng_state()
    train(pipe, model, [8, 8])
    assert torch.equal(torch.get_rng_state(), before)
    assert pipe.to_model() is model
    assert not states_equal(pipe.state_dict(), model.state_dict())


class SharesMemory(nn.Module):
    """The second stage's parameter gets the gradient that is sent back, as a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.offset = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sum(F.relu(self.first(x)), 0) + self.offset.view(4)


def test_a_gradient_under_way_is_not_added_to() -> None:
    model = SharesMemory()
    options = {"loss_fn": F.mse_loss, "optimizer": ADAMW, "schedule": "gpipe", "microbatches": 3}
    options["batch_dims"] = {"target": None}
    twin = copy.deepcopy(model)
    inputs, target = torch.randn(6, 4), torch.randn(4)
    pipe = by_hand(model, 2, inputs, target, **options)
    eager = reference(twin, **options)
    pipe.step(inputs, target=target), eager.step(inputs, target=target)
    assert "offset" not in pipe.plan.stages[0].parameters
    assert not states_equal(pipe.full_state_dict(), eager.full_state_dict())


def test_what_there_is_before_the_first_step() -> None:
    pipe, _, model = pair(models.mlp(), "1f1b", 2, prepare=False)
    for ask in (lambda: pipe.plan, pipe.explain, lambda: pipe.dump("x"), lambda: pipe.optimizer):
        with pytest.raises(NotPrepared, match="no plan yet"):
            ask()
    assert pipe.prepare() is pipe
    assert pipe.plan.num_ranks == 2
    assert (pipe.ranks, pipe.stages, pipe.needs) == ((0, 1), (0, 1), ("x", "target"))
    assert len(list(pipe.parameters())) == len(list(model.parameters()))


def test_after_close_nothing_runs() -> None:
    pipe, _, model = pair(models.mlp(), "2bw", 2)
    with pipe:
        train(pipe, model, [8])
    pipe.close()
    inputs, target = models.batch_for(model, 8)
    for call in (pipe.step, pipe.eval_step, pipe.forward_backward):
        with pytest.raises(ClosedError, match="closed"):
            call(inputs, target=target)


def test_unfit_minibatches_are_refused_before_they_run() -> None:
    pipe, eager, model = pair(models.gpt(layers=1), "1f1b", 2)
    ids, target = models.batch_for(model, 8)
    for bad, target_, words in [
        (ids.int(), target, r"int32 \(8, 16\), captured was int64 \(b, 16\)"),
        (ids[:, :5], target, r"captured was int64 \(b, 16\)"),
        (ids, None, "target is missing"),
        (None, target, "an input is missing"),
        (ids.tolist(), target, r"is a container now(.|\n)*torch.tensor\(ids\)"),
        ({"a": ids}, target, r"an input is missing(.|\n)*step\(\*\*batch\)"),
        (ids, target.tolist(), r"is a container now(.|\n)*torch.tensor\(target\)"),
        (ids, target[:3], "neither the batch size 8"),
    ]:
        with pytest.raises(InputError, match=words):
            pipe.step(bad, target=target_)
    assert float(pipe.step(ids, target=target).loss) == float(eager.step(ids, target=target).loss)


def test_what_has_no_meaning_is_refused() -> None:
    stale, _, model = pair(models.mlp(), "2bw", 2)
    inputs, target = models.batch_for(model, 8)
    with pytest.raises(ConfigError, match="older weights"):
        stale.forward_backward(inputs, target=target)
    stale.step(inputs, target=target)
    with pytest.raises(ConfigError, match="older weights"):  # step has updated: nothing to scale
        stale.clip_grad_norm_(1.0)
    homes = pdcompile.compile(
        models.mlp(), inputs, example_target=target, loss_fn=models.loss_for("mlp"),
        optimizer=ADAMW, microbatches=4, cluster="local:2", stages=1, replicas=2, updates="home",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="updates='every'"):
        homes.clip_grad_norm_(1.0)
    for made, words in [
        (lambda p: torch.optim.LBFGS(p), "closure"),
        (lambda p: 3, "returned int"),
    ]:
        pipe, _, _ = pair(models.mlp(), "1f1b", 2, prepare=False)
        pipe._options = replace(pipe._options, optimizer=made)
        with pytest.raises(ConfigError, match=words):
            pipe.step(inputs, target=target)


class Sometimes(torch.autograd.Function):
    """Adds a row; it gets a gradient where the first number is positive: a view of x's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor) -> Tensor:
        ctx.learns = bool(x[0, 0] > 0)
        return x + row

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        return gradients[0], gradients[0].view(8) if ctx.learns else None


class Learning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Sometimes.apply(x, self.row)
        return y


def test_a_gradient_that_is_sent_is_not_added_to() -> None:
    """Autograd may take a view of it for .grad: here in the second microbatch for the first time,
    before the sent one was read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Learning())
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8))
    twin = copy.deepcopy(model)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    x[:, 0] = torch.tensor([-1.0, 1.0, 1.0, -1.0])
    pipe = pdcompile.compile(
        model, loss_fn=F.mse_loss, optimizer=None, schedule="gpipe", microbatches=4,
        cluster=Cluster.local(2), constraints=[Pin("0", 0), Pin("1", 1)], costs="estimated",
        verify="off", progress=False,
    )  # fmt: skip
    pipe.forward_backward(x, target=y)
    for one, two in zip(x.split(1), y.split(1), strict=True):
        (F.mse_loss(twin(one), two) / 4).backward()
    assert len(pipe.plan.stages) == 2
    for (name, ours), theirs in zip(pipe.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
