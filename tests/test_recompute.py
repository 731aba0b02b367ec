"""Stages that recompute train what stages do that keep their activations, bit for bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import ConfigError, InfeasibleError
from pdcompile.passes.costs.rehearsal.live_storages import LiveStorages
from pdcompile.reference import reference
from pdcompile.runtime.pipeline import Pipeline
from pdcompile.runtime.stage.compute import Compute
from tests.helpers import models
from tests.helpers.cases import case
from tests.helpers.launch import processes
from tests.helpers.pipelines import by_hand, states_equal
from tests.test_opaque import Once, routed
from tests.test_runtime import assert_same_training, pair

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
pytestmark = pytest.mark.filterwarnings("ignore:captured as opaque")
SLOW = pytest.mark.slow


# -- the same bits ---------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "stages", "name"),
    [
        case(name == "gpt" or schedule == "2bw", schedule, stages, name)
        for schedule, stages in (("1f1b", 2), ("gpipe", 3), ("2bw", 3))
        for name in ("gpt", "convnet", "unet")
    ],
)
def test_trains_like_the_reference(name: str, schedule: str, stages: int) -> None:
    assert_same_training(*pair(getattr(models, name)(), schedule, stages, recompute=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_draws_and_clips_like_the_reference(schedule: str) -> None:
    model = models.gpt(layers=1, dropout=0.2)
    assert_same_training(*pair(model, schedule, 3, seed=5, max_grad_norm=0.3, recompute=True))


def test_gradients_for_a_loop_of_ones_own() -> None:
    pipe, eager, model = pair(
        models.gpt(layers=1, dropout=0.2), "1f1b", 3, optimizer=None, recompute=True
    )
    inputs, target = models.batch_for(model, 8)
    for runner in (pipe, eager):
        for _ in range(2):
            runner.forward_backward(inputs, target=target)
    gradients = {name: parameter.grad for name, parameter in eager.named_parameters()}
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, gradients[name])


class Awkward(nn.Module):
    """Model with all that a second run could get wrong.

    Buffers that are read and written (spectral norm, a counter that scales), an input that is
    written in place on whichever stage reads it first, a matmul that rounds otherwise where
    nothing requires a gradient, dropout.
    """

    captured_once = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("scale", torch.ones(8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        y = self.drop(self.first(x))
        self.scale.mul_(0.9).add_(y.detach().abs().mean(0))
        y = self.norm(y * self.scale.clone())
        y.add_(1)
        z = self.second(y)
        z.relu_()
        z = z[:, None] @ torch.stack([z, z * 2], 2)
        return self.head(y + z.sum((1, 2))[:, None])  # type: ignore[no-any-return]


def rows(seed: int, count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 8, generator=generator), torch.randn(count, 8, generator=generator)


def compiled(model: nn.Module, stages: int, **given: Any) -> Pipeline:
    options: dict[str, Any] = {
        "loss_fn": F.mse_loss, "optimizer": ADAMW, "microbatches": 4, "stages": stages, **given
    }  # fmt: skip
    inputs, target = rows(0)
    return pdcompile.compile(
        model, inputs, example_target=target, costs="estimated", verify="off", progress=False,
        **options,
    )  # fmt: skip


def trained(model: nn.Module, stages: int = 0, **given: Any) -> tuple[list[Any], Any]:
    """Losses, outputs and the state after three steps; of the reference without `stages`."""
    options: dict[str, Any] = {
        "loss_fn": F.mse_loss, "optimizer": ADAMW, "microbatches": 4, **given
    }  # fmt: skip
    runner: Any = compiled(model, stages, **given) if stages else reference(model, **options)
    found: list[Any] = []
    for t in range(3):
        inputs, target = rows(t)
        result = runner.step(inputs, target=target)
        found += [float(result.loss), result.outputs]
    runner.flush()
    return found, runner.full_state_dict()


def assert_same(ours: tuple[list[Any], Any], theirs: tuple[list[Any], Any]) -> None:
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert not states_equal(ours[1], theirs[1])


@SLOW
@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
@given(
    st.sampled_from(["gpipe", "1f1b", "2bw"]),
    st.lists(st.booleans(), min_size=1, max_size=3),
    st.sampled_from([None, "bfloat16"]),
    st.integers(1, 4),
)
def test_any_stages_may_recompute(
    schedule: str, again: list[bool], autocast: str | None, microbatches: int
) -> None:
    options: dict[str, Any] = {
        "schedule": schedule, "autocast": autocast, "microbatches": microbatches
    }  # fmt: skip
    found = trained(Awkward(), stages=len(again), recompute=again, **options)
    # A weight may be used on two stages, which the plan's reference sums apart.
    plan = compiled(Awkward(), len(again), recompute=again, **options).plan
    kept = replace(plan, stages=tuple(replace(one, recompute=False) for one in plan.stages))
    for one in (plan, kept):
        assert_same(trained(Awkward(), plan=one, **options), found)


@pytest.mark.slow
def test_the_callers_tensors_are_written_as_without_recomputation() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target.add_(1))

    found = []
    for again in (False, True):
        inputs, target = rows(0)
        pipe = compiled(Awkward(), 2, loss_fn=loss_fn, microbatches=2, recompute=again)
        loss = float(pipe.step(inputs, target=target).loss)
        found.append((inputs, target, loss, pipe.full_state_dict()))
    (inputs, target, loss, state), (*ours, our_loss, our_state) = found
    assert torch.equal(ours[0], inputs)
    assert torch.equal(ours[1], target)
    assert our_loss == loss
    assert not states_equal(our_state, state)


class Force(nn.Module):
    """A gradient inside of forward: the first run needs autograd, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = torch.tanh(self.second(torch.tanh(self.first(x)))).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.head(torch.tanh(self.head(force)))  # type: ignore[no-any-return]


def test_a_gradient_inside_of_forward() -> None:
    assert_same(trained(Force(), 2, recompute=True), trained(Force()))


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=SLOW), "2bw"])
def test_replicas_may_recompute(schedule: str) -> None:
    options: dict[str, Any] = {
        "stages": 2, "schedule": schedule, "replicas": (2, 1), "cluster": pdcompile.Cluster.local(3)
    }  # fmt: skip
    kept = trained(Awkward(), **options)
    assert_same(trained(Awkward(), recompute=True, **options), kept)


def test_several_stages_of_a_rank_may_recompute() -> None:
    model = models.gpt(layers=1, dropout=0.2)
    inputs, target = models.batch_for(model, 8)
    states = []
    for again in (False, True):
        pipe = by_hand(
            copy.deepcopy(model), 4, inputs, target, ranks=(0, 1, 0, 1), schedule="gpipe",
            loss_fn=models.loss_for(model), optimizer=ADAMW, microbatches=4, recompute=again,
        )  # fmt: skip
        losses = [float(pipe.step(inputs, target=target).loss) for _ in range(2)]
        states.append((losses, pipe.full_state_dict()))
    assert_same(*states)


@SLOW
def test_two_ranks_train_like_the_reference(tmp_path: Path) -> None:
    from tests.test_runtime_distributed import BITWISE

    head, _, _ = BITWISE.partition('compare(models.gpt(layers=2, dropout=0.1), "2bw"')
    script = (
        head
        + """
for schedule in ("gpipe", "1f1b", "2bw"):
    compare(models.gpt(layers=2, dropout=0.1), schedule, max_grad_norm=0.3, recompute=True)
compare(models.convnet(), "1f1b", recompute=(True, False))
compare(models.unet(), "2bw", recompute=True)
"""
    )
    run = processes(script, 2, tmp_path)
    assert run.code == 0, run


# -- opaque modules --------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=SLOW), "2bw"])
def test_opaque_modules_run_again_on_their_own_draws(schedule: str) -> None:
    options: dict[str, Any] = {"schedule": schedule}
    kept = trained(routed(Once), **options)
    assert_same(trained(routed(Once), stages=3, recompute=True, **options), kept)


def looks(module: nn.Module, args: Any, output: Tensor) -> None:
    output.mean()


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True])
def test_hooks_of_opaque_modules_are_refused_by_name(before: bool) -> None:
    def pipeline(recompute: bool) -> Pipeline:
        model = routed(Once)
        few = model.first.few
        if before:
            few.register_forward_pre_hook(lambda module, args: None)
        few.register_forward_hook(looks)
        return compiled(model, 2, recompute=recompute)

    pipeline(recompute=False)
    name = "few: .*<lambda>" if before else "few: looks"
    with pytest.raises(ConfigError, match=f"{name} of the opaque module 'first' would run twice"):
        pipeline(recompute=True)


# -- memory ----------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gpt", "convnet"])
def test_between_forward_and_backward_a_stage_keeps_its_inputs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = getattr(models, name)()
    inputs, target = models.batch_for(model, 8)
    pipe = by_hand(
        model, 3, inputs, target, loss_fn=models.loss_for(model), optimizer=None,
        microbatches=4, schedule="gpipe", recompute=True,
    ).prepare()  # fmt: skip
    outputs = pipe.step(inputs, target=target).outputs
    held: list[int] = []
    plain = Compute.backward
    with LiveStorages([inputs, target, *model.parameters(), *model.buffers()]) as live:

        def backward(self: Compute, *args: Any, **given: Any) -> Any:
            held.append(live.now_bytes)
            return plain(self, *args, **given)

        monkeypatch.setattr(Compute, "backward", backward)
        pipe.step(inputs, target=target)
    written = sum(b.numel() * b.element_size() for b in model.buffers()) if name == "convnet" else 0
    losses = 5 * 4
    # In one process a value is sent without a copy, and the outputs are kept.
    expected = sum(edge.bytes for edge in pipe.plan.edges) + written
    assert held[0] == 4 * expected + outputs.numel() * 4 + losses


# -- what is asked for -----------------------------------------------------------------------


@pytest.mark.slow
def test_auto_recomputes_where_memory_is_short() -> None:
    model = models.gpt(layers=4)
    inputs, target = models.batch_for(model, 8)

    def planned(**options: Any) -> Pipeline:
        return pdcompile.compile(
            copy.deepcopy(model), inputs, example_target=target, loss_fn=models.loss_for(model),
            optimizer=partial(torch.optim.SGD, lr=0.1), stages=2, microbatches=4,
            schedule="gpipe", outputs="none", costs="estimated", verify="off", progress=False,
            **options,
        )  # fmt: skip

    def most(pipe: Pipeline) -> int:
        assert pipe.plan.forecast is not None
        return max(ledger.total_bytes for ledger in pipe.plan.forecast.ledgers)

    plain, every = planned(), planned(recompute=True)
    assert all(stage.recompute for stage in every.plan.stages)
    limit = (most(plain) + 2 * most(every)) // 3
    assert most(every) < limit < most(plain)
    with pytest.raises(InfeasibleError):
        planned(memory=limit)
    auto = planned(memory=limit, recompute="auto")
    assert most(auto) <= limit
    assert any(stage.recompute for stage in auto.plan.stages)
    assert not any(stage.recompute for stage in planned(recompute="auto").plan.stages)
    losses = [float(pipe.step(inputs, target=target).loss) for pipe in (plain, every, auto)]
    assert len(set(losses)) == 1


def test_a_given_plan_keeps_its_choice() -> None:
    plan = compiled(Awkward(), 2, recompute=(True, False)).plan
    again = compiled(Awkward(), 2, plan=plan).plan
    assert [stage.recompute for stage in again.stages] == [True, False]
    for other in (True, False):
        with pytest.raises(ConfigError, match=r"recompute=\(True, False\), but the options"):
            compiled(Awkward(), 2, plan=plan, recompute=other)
