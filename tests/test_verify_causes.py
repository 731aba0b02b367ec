"""Findings of verification are the true cause, and what it takes for equal is equal."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile import CutBefore
from pdcompile.batch import example_call, resolve_batch
from pdcompile.eager.module_copies import copy_of
from pdcompile.errors import SourceError, VerifyError
from pdcompile.ir.graph import OpCost
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.codegen import generate
from pdcompile.passes.codegen.folder import stage_classes
from pdcompile.passes.verify import verify
from pdcompile.problem import StageLimits
from tests.helpers.captures import captured, rows
from tests.helpers.cuts import cut
from tests.helpers.fidelity import compare
from tests.helpers.generated import mean_square

OPTIONS: dict[str, Any] = {
    "loss_fn": mean_square,
    "optimizer": partial(torch.optim.SGD, lr=0.1),
    "microbatches": 2,
    "costs": "estimated",
}


class Layers(nn.Module):
    """Four linear layers; between the first two is what a case does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("ema", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(self.inner(torch.tanh(self.a(x)))))
        return self.d(torch.tanh(self.c(x)))  # type: ignore[no-any-return]

    def inner(self, x: Tensor) -> Tensor:
        return x


class Differentiates(Layers):
    """Model that differentiates, in evaluation only where autograd records."""

    def inner(self, x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad((self.c(x) ** 2).sum(), x, create_graph=True)
        return found


class DifferentiatesAnyway(Layers):
    def inner(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (found,) = torch.autograd.grad((self.c(x) ** 2).sum(), x, create_graph=True)
        return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("made", [Differentiates, DifferentiatesAnyway])
@pytest.mark.parametrize("checked", ["auto", "full"])
def test_a_gradient_in_forward_is_taken_in_evaluation_too(made: type[Layers], checked: Any) -> None:
    model = made()
    twin = copy_of(model)
    reference = pdcompile.reference(twin, **OPTIONS)
    with pdcompile.compile(
        model, stages=3, verify=checked, constraints=(CutBefore("b"),), **OPTIONS
    ) as pipe:
        for seed in range(2):
            batch, target = rows(8, seed=seed), rows(8, seed=seed + 9)
            ours, theirs = pipe.step(batch, target=target), reference.step(batch, target=target)
            assert float(ours.loss) == float(theirs.loss)
        found = pipe.predict(rows(4))
        assert torch.allclose(found, twin.eval()(rows(4)), atol=1e-6)


def test_a_stage_holds_what_makes_a_differentiated_tensor_need_a_gradient() -> None:
    graph = captured(DifferentiatesAnyway(), loss_fn=nn.MSELoss(), target=rows(seed=1)).train
    ops = tuple(replace(op, cost=OpCost(1.0, 1.0)) for op in graph.ops)
    problem = coarsen(
        replace(graph, ops=ops), (StageLimits(bytes_per_second=1e3),) * 2, num_microbatches=4
    )
    (item,) = (item for item in problem.items if "grad" in item.ops)
    assert {"a", "tanh", "c"} <= set(item.ops)
    assert not {"b", "d"} & set(item.ops)


class Whole(Differentiates):
    """Model in which what reads a value is opaque, and records nothing in evaluation."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.lin(x) * float(x.detach().abs().max().item())
            (found,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
            return found

    def __init__(self) -> None:
        super().__init__()
        self.part = self.Part()

    def inner(self, x: Tensor) -> Tensor:
        return self.part(x)  # type: ignore[no-any-return]


class Asks(Layers):
    def inner(self, x: Tensor) -> Tensor:
        return x * 2 if x.requires_grad else x * 3


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:captured as opaque")
@pytest.mark.parametrize(
    ("model", "said", "remedy"),
    [
        (Whole, r"evaluation runs under torch\.no_grad\(\)", "torch.enable_grad()"),
        (Asks, "something else than where autograd records", "self.training"),
    ],
)
def test_what_depends_on_autograd_is_told_as_that(
    model: type[nn.Module], said: str, remedy: str
) -> None:
    pipe = pdcompile.compile(model(), stages=2, **OPTIONS)
    with pytest.raises(VerifyError, match=said) as caught:
        pipe.prepare(rows(8), target=rows(8))
    assert remedy in str(caught.value.remedy)
    assert "test_verify_causes.py" in str(caught.value.where)


class WritesData(Layers):
    def inner(self, x: Tensor) -> Tensor:
        y = x * self.ema
        self.ema.data.mul_(0.5).add_(x.detach().mean(0))
        return y


class WritesDataOfItsOwn(Layers):
    def inner(self, x: Tensor) -> Tensor:
        y = x * self.ema.clone()
        self.ema.data.mul_(0.5).add_(x.detach().mean(0))
        return y


def test_a_write_that_autograd_does_not_see_is_told_with_its_line() -> None:
    pipe = pdcompile.compile(WritesData(), stages=2, **OPTIONS)
    with pytest.raises(VerifyError, match=r"'ema' through \.data after mul ") as caught:
        pipe.prepare(rows(8), target=rows(8))
    line = WritesData.inner.__code__.co_firstlineno + 2
    assert str(caught.value.where).endswith(f"test_verify_causes.py:{line}")
    assert "ema.clone()" in str(caught.value.remedy)
    with pdcompile.compile(WritesDataOfItsOwn(), stages=2, **OPTIONS) as pipe:
        pipe.prepare(rows(8), target=rows(8))


@pytest.mark.parametrize(
    ("wrong", "what"),
    [({"target": "torch.sigmoid"}, "output"), ({"grad_enabled": False}, "gradient")],
)
def test_a_capture_that_is_not_the_model_is_told_as_that(wrong: dict[str, Any], what: str) -> None:
    model = Layers()
    found = captured(model, loss_fn=nn.MSELoss(), target=rows(seed=1))
    first = next(op for op in found.train.ops if op.target == "torch.tanh")
    ops = tuple(replace(op, **wrong) if op is first else op for op in found.train.ops)
    found = replace(found, train=replace(found.train, ops=ops))
    plan = cut(found, [4])
    with pytest.raises(VerifyError, match=f"differ from the model: {what}.* in the capture"):
        verify(found, plan, generate(found, plan), model, *_call(model), nn.MSELoss())


class Tied(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.d.weight = self.a.weight


def _limited(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def _halved(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("after", [False, True])
def test_hooks_of_a_tied_parameter_run_once_on_the_whole_gradient(after: bool) -> None:
    model = Tied()
    weight = model.a.weight
    calls = []
    weight.register_hook(lambda gradient: calls.append(gradient.clone()))
    if after:
        weight.register_post_accumulate_grad_hook(_halved)
    else:
        weight.register_hook(_limited)
    found = captured(model, loss_fn=nn.MSELoss(), target=rows(seed=1))
    plan = cut(found, [2, 4, 6])
    assert [one.stages for one in plan.tied] == [(0, 3)]
    sources = generate(found, plan)
    report = verify(found, plan, sources, model, *_call(model), nn.MSELoss())
    assert report.differences == ()
    assert len(calls) == 2 * report.steps  # of eager and of the stages
    assert all(torch.equal(*pair) for pair in zip(calls[::2], calls[1::2], strict=True))


def _call(model: nn.Module) -> Any:
    flat = example_call(model, rows(), rows(seed=1))
    return flat, resolve_batch(flat)


@pytest.mark.parametrize("edited", [False, True])
def test_a_stage_that_raises_is_an_edit_only_where_there_was_one(edited: bool) -> None:
    model = Layers()
    found = captured(model, loss_fn=nn.MSELoss(), target=rows(seed=1))
    plan = cut(found, [4])
    sources = generate(found, plan)
    text = sources.files["stage_1.py"].replace("torch.tanh(", "torch.tahn(")
    names = ("stage_1.py",) if edited else ()
    sources = replace(sources, files={**sources.files, "stage_1.py": text}, edited=names)
    with pytest.raises(VerifyError, match="stage 1 raises in training, where the model") as caught:
        verify(found, plan, sources, model, *_call(model), nn.MSELoss())
    assert ("last edit" in str(caught.value.remedy)) == edited
    broken = replace(sources, files={**sources.files, "stage_1.py": "class Stage1(Gone): pass"})
    with pytest.raises(SourceError, match="cannot be loaded") as refused:
        stage_classes(broken)
    assert ("last edit" in str(refused.value.remedy)) == edited
    missing = replace(sources, files={**sources.files, "stage_1.py": "import gone_for_good"})
    with pytest.raises(SourceError, match="cannot be loaded") as refused:
        stage_classes(missing)
    assert ("importable" in str(refused.value.remedy)) != edited


def test_a_graph_is_compared_where_the_model_needs_autograd() -> None:
    model = Differentiates()
    flat, layout = _call(model)
    compare(model, captured(model, loss_fn=nn.MSELoss(), target=rows(seed=1)), flat, layout)
