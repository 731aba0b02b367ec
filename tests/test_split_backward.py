"""A backward in two parts computes what one does as a whole, bit for bit, and early what it can."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pdcompile
from pdcompile.eager import split_backward
from pdcompile.eager.gradients import memory_of
from pdcompile.eager.split_backward import Entrance, Rest, first_part
from pdcompile.ir import stage_run
from pdcompile.runtime.stage.gradients import shared_memory
from tests.helpers import models
from tests.helpers.cases import case
from tests.helpers.launch import processes
from tests.test_opaque import Once, routed
from tests.test_recompute import assert_same, compiled, rows, trained
from tests.test_runtime import assert_same_training, pair

ZERO = {"schedule": "zb-h1"}


# -- parts of a graph --------------------------------------------------------------------------


class Scale(torch.autograd.Function):
    """A Function of Python's own that counts how often it runs backward."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        Scale.runs += 1
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Stage(nn.Module):
    """One of every kind of use of a parameter that matters; `only` names the one that is there."""

    def __init__(self, only: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.norm, self.conv = nn.LayerNorm(8), nn.Conv1d(1, 1, 3, padding=1)
        self.batch, self.group = nn.BatchNorm1d(8), nn.GroupNorm(2, 8)
        self.table = nn.Embedding(5, 8)
        self.lstm = nn.LSTM(8, 8)
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.bias = nn.Parameter(torch.randn(8))
        self.scale = nn.Parameter(torch.randn(8))
        self.only = only

    def parts(self) -> dict[str, Callable[[Tensor], Tensor]]:
        index = torch.tensor([0, 3, 1, 3, 4, 2, 2, 0])
        return {
            "linear": lambda x: self.second(torch.relu(self.first(x))),
            "norms": lambda x: self.group(self.batch(self.norm(x))),
            "convolution": lambda x: self.conv(x[:, None])[:, 0],
            "embedding": lambda x: x + self.table(index)[: len(x)],
            "recurrent": lambda x: self.lstm(x[:, None])[0][:, 0],
            "weight norm": lambda x: self.weighted(x),
            "a bias": lambda x: x + self.bias,
            "a bias that is a view": lambda x: x + self.bias.view(2, 4).reshape(8),
            "twice": lambda x: self.third(torch.tanh(self.third(x))),
            "side by side": lambda x: x @ self.scale.diag() + x * self.scale,
            "Python's": lambda x: Scale.apply(x, self.scale),  # type: ignore[no-any-return,no-untyped-call]
            "through a view": self._written,
            "tied": lambda x: x @ self.table.weight.T @ self.table.weight,
        }

    def _written(self, x: Tensor) -> Tensor:
        y = x * 2
        y[:, :4] = self.scale[:4]
        return y

    def forward(self, x: Tensor) -> Tensor:
        for name, part in self.parts().items():
            if self.only in ("", name):
                x = part(x) if name == "embedding" else x + part(x)
        return x


def gradients(stage: Stage, split: bool) -> tuple[list[Tensor], dict[str, Tensor | None], set[str]]:
    """Gradients that go back, those accumulated for three microbatches, and which parameters had
    gradients before any second part ran."""
    sent, rests = [], list[Rest]()
    for seed in range(3):
        torch.manual_seed(seed)
        entrance = Entrance(torch.randn(6, 8))
        roots: Any = [(stage(entrance.value), torch.randn(6, 8))]
        if split:
            rests.append(first_part(roots, [entrance.leaf]))
        else:
            torch.autograd.backward([roots[0][0]], [roots[0][1]])
        found = entrance.take()
        assert found is not None
        sent.append(found)
    early = {name for name, one in stage.named_parameters() if one.grad is not None}
    for rest in rests:
        rest.run()
    return sent, {name: one.grad for name, one in stage.named_parameters()}, early


EARLY = {
    "twice": {"third.weight", "third.bias"},
    "side by side": {"scale"},
    "Python's": {"scale"},
    "through a view": {"scale"},
    "tied": {"table.weight"},
}


@pytest.mark.parametrize("part", [*Stage().parts(), ""])
def test_every_use_of_a_parameter(part: str) -> None:
    """Bit for bit; what can come later does, and no Function of Python's runs twice."""
    stage = Stage(part)
    twin = copy.deepcopy(stage)
    Scale.runs = 0
    sent, found, early = gradients(stage, split=True)
    runs, Scale.runs = Scale.runs, 0
    other, expected, _ = gradients(twin, split=False)
    assert runs == Scale.runs
    for one, two in zip(sent, other, strict=True):
        assert torch.equal(one, two)
    for name, gradient in expected.items():
        assert gradient is None or torch.equal(found[name], gradient), name
        assert (gradient is None) == (found[name] is None)
    if part:
        assert early == EARLY.get(part, set())


def test_what_was_asked_for_comes_first() -> None:
    """A tied parameter that is passed on, and one whose hook the user wants to see run once."""
    stage, seen = Stage("linear"), []
    stage.second.weight.register_hook(lambda gradient: seen.append(1))
    entrance = Entrance(torch.randn(6, 8))
    roots: Any = [(stage.first.weight, torch.ones(8, 8)), (stage(entrance.value).sum(), None)]
    rest = first_part(roots, [entrance.leaf, stage.first.weight])
    assert stage.first.weight.grad is not None
    assert stage.second.weight.grad is not None
    assert stage.first.bias.grad is stage.second.bias.grad is None
    rest.run()
    assert stage.first.bias.grad is not None
    assert stage.second.bias.grad is not None
    assert seen == [1]


def test_a_root_that_only_parameters_need() -> None:
    """The first stage has no earlier one: nothing runs before the second part."""
    stage = Stage("linear")
    roots: Any = [(stage(torch.randn(6, 8)).sum(), None)]
    rest = first_part(roots, [])
    assert all(one.grad is None for one in stage.parameters())
    rest.run()
    assert stage.first.weight.grad is not None


def test_microbatches_of_one_form_are_divided_once_and_no_others_like_them() -> None:
    """Layers that change places, a branch, a frozen parameter, a hook: each as in one backward."""
    stage = Stage("linear")
    twin = copy.deepcopy(stage)
    paths: list[Callable[[Stage, Tensor], Tensor]] = [
        lambda one, x: one.second(torch.relu(one.first(x))),
        lambda one, x: one.first(torch.relu(one.second(x))),  # the same form, of other leaves
        lambda one, x: one.second(torch.relu(one.second(x))),
        lambda one, x: one.second(one.first(x)) + x,
        lambda one, x: one.second(one.first(x + x)),
    ]
    split_backward._parted.cache_clear()

    def run(one: Stage, split: bool) -> list[Tensor]:
        sent = []
        for number in range(25):
            torch.manual_seed(number)
            one.first.weight.requires_grad_(number < 10)
            if number == 15:
                one.second.weight.register_hook(lambda gradient: gradient * 2)
            entrance = Entrance(torch.randn(6, 8))
            roots: Any = [(paths[number % 5](one, entrance.value), torch.randn(6, 8))]
            if split:
                first_part(roots, [entrance.leaf]).run()
            else:
                torch.autograd.backward([roots[0][0]], [roots[0][1]])
            found = entrance.take()
            assert found is not None
            sent.append(found)
        return sent

    for ours, theirs in zip(run(stage, True), run(twin, False), strict=True):
        assert torch.equal(ours, theirs)
    for (name, ours), theirs in zip(stage.named_parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or theirs.grad is None or torch.equal(ours.grad, theirs.grad), name
    divided = split_backward._parted.cache_info()
    # Not divided again: layers that changed places, all five that come again at first and in the
    # end, and between them, of the frozen layer, the one that does not use it.
    assert (divided.hits, divided.misses) == (1 + 5 + 1 + 5, 4 + 4 + 5)


def compare(model: nn.Module, stages: int, **options: Any) -> None:
    """Losses, outputs and weights of the pipeline and of the reference, whose weights on several
    stages are summed as its plan says."""
    twin = copy.deepcopy(model)
    plan = compiled(twin, stages, **ZERO, **options).plan
    found = trained(model, stages, **ZERO, **options)
    assert_same(found, trained(twin, plan=plan, **ZERO, **options))


def test_gradients_that_are_kept_are_not_added_to() -> None:
    """A view of what is kept may become .grad, which the next microbatch adds to in place."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Shifted(), Shifted())
        for name, one in model.named_parameters():
            if "shift" in name:
                one.register_hook(lambda gradient: None)
        return model

    inputs, target = rows(0)
    pipe = pdcompile.compile(
        build(), inputs, example_target=target, loss_fn=nn.functional.mse_loss, stages=2,
        optimizer=None, microbatches=4, costs="estimated", verify="off", progress=False, **ZERO,
    )  # fmt: skip
    eager = build()
    pipe.forward_backward(inputs, target=target)
    for x, y in zip(inputs.split(2), target.split(2), strict=True):
        (nn.functional.mse_loss(eager(x), y) * 0.25).backward()
    for (_, one), two in zip(pipe.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_memory_that_other_tensors_have() -> None:
    """Bases of views do not count, unless they are asked about, too; of sparse ones all may."""
    made = torch.randn(16)
    view = made.view(4, 4)
    assert shared_memory([view]) == set()
    assert shared_memory([made, view]) == {memory_of(made)}
    del view
    assert shared_memory([made]) == set()
    other = made.detach()  # as autograd makes a .grad of a gradient that it gives to others
    assert shared_memory([made]) == shared_memory([other]) == {memory_of(made)}
    sparse = torch.eye(3).to_sparse()
    assert shared_memory([sparse]) == {memory_of(sparse)}


class Shifted(nn.Module):
    """Adds a view of a parameter, whose hook has its gradient come with the first part."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.below(x) + self.shift.view(-1, 8))


# -- training ----------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        case(stages == 3 or name == "mlp", name, stages)
        for name in ("unet", "gpt", "mlp", "convnet")
        for stages in (1, 2, 3)
    ],
)
def test_trains_like_the_reference(name: str, stages: int) -> None:
    """GPT has tied weights, the U-Net skip connections."""
    assert_same_training(*pair(getattr(models, name)(), "zb-h1", stages))


@pytest.mark.sample(1)
@pytest.mark.parametrize("again", [False, True, (True, False, True)])
def test_draws_clips_and_recomputes_like_the_reference(again: Any) -> None:
    model = models.gpt(layers=1, dropout=0.2)
    assert_same_training(*pair(model, "zb-h1", 3, seed=5, max_grad_norm=0.3, recompute=again))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_recurrent_layers_and_embeddings(autocast: str | None) -> None:
    # torch has no LSTM in bfloat16 for a CPU without instructions for it.
    lstm = autocast is None or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    kind = nn.LSTM if lstm else nn.RNN
    model = nn.Sequential(
        nn.Linear(8, 8), Sequence(kind), nn.LayerNorm(8), Sequence(kind), nn.Linear(8, 8)
    )
    compare(model, 3, autocast=autocast)


class Sequence(nn.Module):
    """Takes rows for a sequence."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent, self.places = kind(8, 8, batch_first=True), nn.Embedding(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        sequence = x[:, None, :] + self.places.weight
        return x + self.recurrent(sequence)[0].sum(1)  # type: ignore[no-any-return]


def test_gradients_for_a_loop_of_ones_own() -> None:
    pipe, eager, model = pair(models.gpt(layers=1, dropout=0.2), "zb-h1", 3, optimizer=None)
    inputs, target = models.batch_for(model, 8)
    for runner in (pipe, eager):
        for _ in range(2):
            runner.forward_backward(inputs, target=target)
    gradients = {name: parameter.grad for name, parameter in eager.named_parameters()}
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, gradients[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:captured as opaque")
def test_a_stage_with_an_opaque_module_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what it hangs onto the graph."""
    split: list[Rest] = []
    plain = stage_run.first_part

    def watched(*args: Any) -> Rest:
        split.append(plain(*args))
        return split[-1]

    monkeypatch.setattr(stage_run, "first_part", watched)
    assert_same(trained(routed(Once), stages=3, **ZERO), trained(routed(Once), **ZERO))
    assert 0 < len(split) < 3 * 3 * 4  # stages, steps, microbatches


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:captured as opaque")
def test_a_note_names_the_stages_that_are_not_split() -> None:
    def notes(**options: Any) -> list[str]:
        inputs, target = rows(0)
        pipe = pdcompile.compile(
            routed(Once), inputs, example_target=target, loss_fn=nn.functional.mse_loss, stages=2,
            microbatches=4, costs="estimated", verify="off", progress=False, **options,
        )  # fmt: skip
        return [one for one in pipe.plan.notes if "does not split its backward" in one]

    assert any("opaque module 'first'" in one for one in notes(**ZERO))
    assert notes() == []


def test_hooks_of_parameters_run_once_a_microbatch() -> None:
    counts = []
    for schedule in ("1f1b", "zb-h1"):
        model, seen = models.mlp(), list[int]()
        for one in model.parameters():
            one.register_hook(lambda gradient, s=seen: s.append(1))
        pipe, _, _ = pair(model, schedule, 2)
        seen.clear()
        inputs, target = models.batch_for(model, 8)
        pipe.step(inputs, target=target)
        counts.append(len(seen))
    assert counts[0] == counts[1] > 0


def test_parameters_come_after_what_earlier_stages_wait_for() -> None:
    """The point of it: the second part does real work on every stage."""
    found: list[int] = []
    run = Rest.run

    def watched(self: Rest) -> None:
        found.append(sum(len(leaves) for _, leaves in self))
        run(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rest, "run", watched)
        pipe, _, model = pair(models.mlp(layers=6), "zb-h1", 3)
        inputs, target = models.batch_for(model, 8)
        pipe.step(inputs, target=target)
    assert sum(found) == 4 * len(list(model.parameters()))


@pytest.mark.slow
@settings(max_examples=25, phases=[Phase.explicit, Phase.generate])
@given(
    st.lists(st.sampled_from(sorted(Stage().parts())), min_size=2, max_size=6), st.integers(1, 4)
)
def test_any_stack_of_parts(names: list[str], microbatches: int) -> None:
    compare(nn.Sequential(*map(Stage, names)), 2, microbatches=microbatches)


@pytest.mark.slow
def test_two_ranks_train_like_the_reference(tmp_path: Path) -> None:
    from tests.test_runtime_distributed import BITWISE

    head, _, _ = BITWISE.partition('compare(models.gpt(layers=2, dropout=0.1), "2bw"')
    script = (
        head
        + """
compare(models.gpt(layers=2, dropout=0.1), "zb-h1", max_grad_norm=0.3)
compare(models.convnet(), "zb-h1", recompute=(True, False))
compare(models.unet(), "zb-h1")
"""
    )
    run = processes(script, 2, tmp_path)
    assert run.code == 0, run
