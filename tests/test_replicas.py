"""Stages with replicas, running: what the reference computes, up to the order of sums."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pdcompile
from pdcompile.cluster import Cluster
from pdcompile.errors import ConfigError
from pdcompile.options import Options
from pdcompile.options.option_checks import check_options
from tests.helpers.alike import CLOSE, PLANNED, close
from tests.helpers.models import batch_for, convnet, gpt, loss_for, mlp, unet


def pair(model: nn.Module, **given: Any) -> tuple[Any, Any]:
    """A pipeline in this process and its reference."""
    common: dict[str, Any] = {
        "loss_fn": loss_for(model), "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "microbatches": 4, "schedule": given.pop("schedule", "1f1b"),
        "max_grad_norm": given.pop("max_grad_norm", None),
    }  # fmt: skip
    expected = pdcompile.reference(deepcopy(model), **common)
    x, y = batch_for(model, 8)
    return pdcompile.compile(model, x, example_target=y, **common, **PLANNED, **given), expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "2bw"])
@pytest.mark.parametrize(
    ("build", "replicas"),
    [
        (mlp, (3, 1)),
        (unet, (1, 2, 1)),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((mlp, (2, 1)), (mlp, (2, 2)), (gpt, (4,)), (unet, (1, 3)))
        ),
    ],
)
def test_training_is_that_of_the_reference(
    build: Any, replicas: tuple[int, ...], schedule: str
) -> None:
    """Clipping, short minibatches with fewer microbatches than replicas, evaluation, outputs."""
    model = build()
    pipe, expected = pair(model, replicas=replicas, schedule=schedule, max_grad_norm=0.3)
    assert tuple(stage.replicas for stage in pipe.plan.stages) == replicas
    assert pipe.ranks == tuple(range(sum(replicas)))
    for t, size in enumerate((8, 8, 1, 5, 8)):
        x, y = batch_for(model, size, t)
        ours, theirs = (one.step(x, target=y) for one in (pipe, expected))
        assert float(ours.loss) == pytest.approx(float(theirs.loss), abs=2e-5)
        torch.testing.assert_close(ours.outputs, theirs.outputs, **CLOSE)
        if t == 2:
            torch.testing.assert_close(pipe.predict(x), expected.predict(x), **CLOSE)
    close(pipe.full_state_dict(), expected.full_state_dict())
    found = pipe.eval_step(x, target=y)
    assert float(found.loss) == pytest.approx(float(expected.eval_step(x, target=y).loss), abs=2e-5)
    assert pipe.to_model() is model
    close(dict(model.state_dict()), expected.full_state_dict())


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize(
    "replicas",
    [(2, 2), (1, 2), pytest.param((2, 1, 3), marks=pytest.mark.slow),
     pytest.param((3, 2), marks=pytest.mark.slow)],
)  # fmt: skip
def test_tied_weights_on_replicated_stages(schedule: str, replicas: tuple[int, ...]) -> None:
    """Gradients are chained by microbatch, and every replica of a copy gets the new weights."""
    model = gpt(layers=len(replicas), tied=True)
    pipe, expected = pair(model, replicas=replicas, schedule=schedule, max_grad_norm=0.3)
    assert [one.stages for one in pipe.plan.tied] == [(0, len(replicas) - 1)]
    for t, size in enumerate((8, 3, 8, 8)):
        x, y = batch_for(model, size, t)
        ours, theirs = (one.step(x, target=y) for one in (pipe, expected))
        assert float(ours.loss) == pytest.approx(float(theirs.loss), abs=2e-5)
    close(pipe.full_state_dict(), expected.full_state_dict())
    if schedule == "1f1b":
        for one in (pipe, expected):
            one.forward_backward(x, target=y)
            one.optimizer.step()
            one.zero_grad()
        torch.testing.assert_close(pipe.predict(x), expected.predict(x), **CLOSE)
        close(pipe.full_state_dict(), expected.full_state_dict())


@pytest.mark.sample(1)
@pytest.mark.parametrize("replicas", [(1, 2), (2, 1)])
def test_short_minibatches_leave_a_replica_out_for_long(replicas: tuple[int, ...]) -> None:
    """It waits for its last send when the minibatch of that is long over."""
    options: dict[str, Any] = {
        "loss_fn": nn.functional.mse_loss, "schedule": "2bw", "microbatches": 2,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
    }  # fmt: skip
    models = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    pipe = pdcompile.compile(
        models[0], stages=2, replicas=replicas, cluster=Cluster.local(3), costs="estimated",
        **options,
    )  # fmt: skip
    x = torch.randn(4, 4)
    pipe.prepare(x, target=x)
    eager = pdcompile.reference(models[1], plan=pipe.plan, **options)
    for size in (4, 1, 1, 1, 4, 4):
        ours, theirs = (one.step(x[:size], target=x[:size]) for one in (pipe, eager))
        assert float(ours.loss) == pytest.approx(float(theirs.loss))
    pipe.close()


def test_draws_are_those_of_the_microbatches() -> None:
    model = gpt(layers=1, dropout=0.3)
    pipe, expected = pair(model, replicas=(2, 2))
    for t in range(3):
        x, y = batch_for(model, 8, t)
        ours, theirs = (one.step(x, target=y) for one in (pipe, expected))
        assert float(ours.loss) == pytest.approx(float(theirs.loss), abs=2e-5)
    close(pipe.full_state_dict(), expected.full_state_dict())


def test_losses_are_those_of_their_minibatch_in_any_order() -> None:
    """Each is the sum of parts from all replicas, also where an earlier one was never read."""
    model = mlp()
    pipe, expected = pair(model, replicas=2, stages=1)
    losses = []
    for t in range(5):
        x, y = batch_for(model, 8, t)
        losses.append([one.step(x, target=y).loss for one in (pipe, expected)])
    for t in (1, 4, 3):
        ours, theirs = losses[t]
        assert float(ours) == pytest.approx(float(theirs), abs=2e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_gradients_without_an_update_accumulate(schedule: str) -> None:
    model = mlp()
    pipe, expected = pair(model, replicas=(2, 1), schedule=schedule)
    for t in range(2):
        x, y = batch_for(model, 8, t)
        pipe.forward_backward(x, target=y)
        expected.forward_backward(x, target=y)
    gradients = {name: parameter.grad for name, parameter in expected.named_parameters()}
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], **CLOSE)
    norms = [float(one.clip_grad_norm_(0.01)) for one in (pipe, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for one in (pipe, expected):
        one.optimizer.step()
        one.zero_grad()
        one.step(x, target=y)
    close(pipe.full_state_dict(), expected.full_state_dict())


class Rare(nn.Module):
    """A layer that a part of the microbatches uses: the others have no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) if x.mean() > 1e9 else x


def test_a_parameter_that_no_microbatch_uses_has_no_gradient() -> None:
    """Weight decay would move it if it had one of zeros."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Rare(), nn.Linear(4, 1))
    first, rare = (weight.detach().clone() for weight in (model[0].weight, model[1].lin.weight))
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    pipe = pdcompile.compile(
        model, x, example_target=y, loss_fn=nn.functional.mse_loss, replicas=2, stages=1,
        optimizer=partial(torch.optim.SGD, lr=0.1, weight_decay=0.5), microbatches=4, **PLANNED,
    )  # fmt: skip
    pipe.step(x, target=y)
    assert torch.equal(model[1].lin.weight, rare)
    assert not torch.equal(model[0].weight, first)


@pytest.mark.slow
def test_buffers_of_replicas_become_their_mean_where_they_are_read() -> None:
    """Each replica's statistics are of its own microbatches until then."""
    model = convnet()
    alone = [deepcopy(model), deepcopy(model)]
    pipe, _ = pair(model, replicas=2, stages=1)
    x, y = batch_for(model, 8)
    pipe.step(x, target=y)
    pipe.clip_grad_norm_(1.0)  # reads gradients alone
    assert pipe.unsettled
    for n, part in enumerate(x.tensor_split(4)):
        alone[n % 2].train()(part)
    found = pipe.full_state_dict()
    for name, value in alone[0].named_buffers():
        other = alone[1].get_buffer(name)
        mean = (value + other) / 2 if value.is_floating_point() else value
        torch.testing.assert_close(found[name], mean)
    # They go on from there, and a loaded state is that of all replicas.
    pipe.step(x, target=y)
    pipe.load_state_dict(found)
    close(pipe.full_state_dict(), found)
    pipe.predict(x)
    assert torch.equal(pipe.full_state_dict()["bn1.running_mean"], found["bn1.running_mean"])


def test_a_note_names_buffers_that_replicas_write_apart() -> None:
    """Training reads of them what is of the microbatches of one replica."""
    pipe, _ = pair(convnet(), replicas=(1, 2))
    (note,) = [note for note in pipe.plan.notes if "replicas of stage" in note]
    assert "2 replicas of stage 1" in note
    assert "'bn2.running_mean'" in note
    for model, given in ((convnet(), {"stages": 2}), (mlp(), {"replicas": (1, 2)})):
        assert not any("replicas of stage" in n for n in pair(model, **given)[0].plan.notes)


def test_equal_buffers_of_replicas_stay_as_they_are() -> None:
    """A third of three equal numbers' sum need not be that number."""
    number = torch.tensor(13421774 * 2.0**-27)
    assert (number + number + number) / 3 != number
    model = convnet()
    assert model.bn1.running_mean is not None
    model.bn1.momentum = 0.0
    model.bn1.running_mean.fill_(float(number))
    pipe, _ = pair(model, replicas=3, stages=1)
    x, y = batch_for(model, 8)
    pipe.step(x, target=y)
    found = pipe.full_state_dict()["bn1.running_mean"]
    assert torch.equal(found, torch.full_like(found, float(number)))


def test_the_planner_decides() -> None:
    x, y = batch_for(mlp(), 8)
    given = {"loss_fn": loss_for("mlp"), "microbatches": 4, "cluster": Cluster.local(4), **PLANNED}
    for replicas, stages in (("equal", None), ("any", None), ("any", 2), (2, None), (4, 1)):
        pipe = pdcompile.compile(
            mlp(), x, example_target=y, replicas=replicas, stages=stages, **given
        )
        counts = [stage.replicas for stage in pipe.plan.stages]
        assert stages in (None, len(counts))
        if isinstance(replicas, int):
            assert set(counts) == {replicas}
        pipe.step(x, target=y)


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "two", (), (2, 0), [2, 1], None])
def test_what_is_no_number_of_replicas(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="replicas"):
        check_options(Options(replicas=wrong))


def test_counts_that_contradict_each_other() -> None:
    x, y = batch_for(mlp(), 8)
    given: dict[str, Any] = {"loss_fn": loss_for("mlp"), "microbatches": 4, **PLANNED}
    for options in (
        {"replicas": (2, 1), "stages": 3},
        {"replicas": (2, 1), "cluster": Cluster.local(4)},
        {"replicas": 2, "stages": 2, "cluster": Cluster.local(3)},
    ):
        with pytest.raises(ConfigError, match="stages"):
            pdcompile.compile(mlp(), x, example_target=y, **given, **options)


def test_a_given_plan_has_the_counts_that_are_asked_for() -> None:
    plan = pair(mlp(), replicas=(2, 1))[0].plan
    for counts in ((1, 2), 1, 2, "equal"):
        with pytest.raises(ConfigError, match=r"the plan has replicas=\(2, 1\), but the options"):
            pair(mlp(), plan=plan, replicas=counts)
    for counts in ((2, 1), None, "any"):
        assert pair(mlp(), plan=plan, replicas=counts)[0].plan.stages == plan.stages
    alike = pair(mlp(), replicas=(2, 2))[0].plan
    assert pair(mlp(), plan=alike, replicas="equal")[0].plan.stages == alike.stages


def test_a_hook_on_an_accumulated_gradient_is_refused() -> None:
    """Each replica accumulates a part of it."""
    model = mlp(layers=2)
    pipe, _ = pair(model, replicas=(1, 2))
    x, y = batch_for(model, 8)
    model.layers[0].weight.register_post_accumulate_grad_hook(lambda _: None)
    pipe.step(x, target=y)
    handle = model.layers[1].weight.register_post_accumulate_grad_hook(lambda _: None)
    before = pipe.position
    with pytest.raises(ConfigError, match="accumulates a part"):
        pipe.step(x, target=y)
    handle.remove()
    assert pipe.position == before
    pipe.step(x, target=y)


class Scaled(nn.Module):
    """A buffer that forward only reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.first(x) * self.scale)
        return found


def test_buffers_that_an_edited_stage_writes_become_their_mean(tmp_path: Path) -> None:
    """Nor is it known where the backward of an edited stage ends: a checkpoint has its own."""
    torch.manual_seed(0)
    model = Scaled()
    expected = pdcompile.reference(
        deepcopy(model), loss_fn=nn.functional.mse_loss, microbatches=4,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )  # fmt: skip
    x, y = torch.randn(4, 4), torch.randn(4, 1)
    given: dict[str, Any] = {
        "example_target": y, "loss_fn": nn.functional.mse_loss, "replicas": 2, "stages": 1,
        "microbatches": 4, "optimizer": partial(torch.optim.SGD, lr=0.1), **PLANNED,
    }  # fmt: skip
    pdcompile.compile(model, x, **given).dump(str(tmp_path))
    file = tmp_path / "stage_0.py"
    head, forward, body = file.read_text().partition("    def forward(self, x):\n")
    assert forward
    write = "        self.scale.add_(x.detach().mean(0))\n"
    given_x = "x.clone().requires_grad_()"
    again = f"torch.utils.checkpoint.checkpoint(self.first, {given_x}, use_reentrant=True)"
    body = body.replace("self.first(x)", f"{again} + 0 * self.first(x)")
    file.write_text(f"{head}{forward}{body}")
    pipe = pdcompile.compile(model, x, sources=tmp_path, allow_edited=True, **given)
    pipe.step(x, target=y)
    expected.step(x, target=y)
    close(pipe.full_state_dict(), expected.full_state_dict())
    file.write_text(f"{head}{forward}{write}{body}")
    pipe = pdcompile.compile(Scaled(), x, sources=tmp_path, allow_edited=True, **given)
    pipe.step(x, target=y)
    torch.testing.assert_close(pipe.full_state_dict()["scale"], 1 + x.sum(0) / 2)
