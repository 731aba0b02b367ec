"""Stumbles of beginners: the error says what was left out."""

from __future__ import annotations

import warnings
from collections import UserDict
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import ConfigError, InputError, PdcompileError, TraceError


class Tagger(nn.Module):
    """Returns its own loss, a mean over the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def tagging(reduction: Any) -> tuple[Any, nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, ids = Tagger(), torch.randint(0, 9, (4, 5))
    labels = ids.clone()
    labels[0, 2:] = -100
    pipe = pdcompile.compile(
        model, loss_reduction=reduction, stages=2, cluster="1x2", microbatches=2, optimizer=None,
        keep_model=True, costs="estimated",
    )  # fmt: skip
    return pipe, model, {"ids": ids, "labels": labels}


def test_a_model_with_a_loss_of_its_own_may_count_its_items() -> None:
    pipe, model, call = tagging(lambda args, kwargs, target: (args[1] != -100).sum())
    assert float(pipe.step(**call).loss) == pytest.approx(float(model(**call)["loss"]))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        result: Tensor = self.lin(x)
        return result if mask is None else result * mask


def test_a_tensor_in_the_place_of_none_is_told_as_one() -> None:
    options = {"loss_fn": nn.functional.mse_loss, "costs": "estimated", "microbatches": 2}
    pipe, x = pdcompile.compile(Masked(), cluster="local:1", **options), torch.randn(4, 8)
    pipe.step(x, None, target=x)
    with pytest.raises(InputError, match="this input is a tensor now, and was None") as caught:
        pipe.step(x, torch.ones(4, 8), target=x)
    assert caught.value.remedy == "pass None as before, or a tensor in every call"


def test_a_minibatch_of_one_sample_takes_one_microbatch() -> None:
    pipe = pdcompile.compile(nn.Linear(8, 8), loss_fn=nn.functional.mse_loss, microbatches=2)
    with pytest.raises(ConfigError, match="2 microbatches of a minibatch of 1") as caught:
        pipe.step(torch.randn(1, 8), target=torch.randn(1, 8))
    assert caught.value.remedy == "microbatches=1, or a larger minibatch"


def test_a_reduction_that_raises_is_named_with_what_it_was_given() -> None:
    pipe, _, call = tagging(lambda args, kwargs, target: kwargs["labels"].numel())
    with pytest.raises(ConfigError, match="loss_reduction fails: KeyError") as caught:
        pipe.step(**call)
    assert "2 positional arguments" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (torch.randn(4, 8), "the target is missing: loss_fn raised"),
        ({"x": torch.randn(4, 8)}, r"step\(\*\*batch\)"),
    ],
)
def test_the_remedy_names_what_was_forgotten(given: Any, remedy: str) -> None:
    pipe = pdcompile.compile(nn.Linear(8, 8), loss_fn=nn.functional.mse_loss, costs="estimated")
    with pytest.raises(PdcompileError, match=remedy) as caught:
        pipe.step(given)
    if isinstance(given, torch.Tensor):
        assert (caught.value.code, caught.value.where) == ("PDC-INPUT", "target")


def test_a_loss_of_each_sample_is_refused_before_anything_is_said_of_sizes() -> None:
    """Also where a microbatch of one sample has a loss of one number."""
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    pipe = pdcompile.compile(nn.Linear(8, 8), loss_fn=loss_fn, costs="estimated", microbatches=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TraceError, match=r"of shape \(1,\)(.|\n)*reduce it"):
            pipe.step(torch.randn(8, 8), target=torch.zeros(8, dtype=torch.int64))


def test_a_batch_norm_without_momentum_says_so() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 8))
    pipe = pdcompile.compile(model, loss_fn=nn.functional.mse_loss, costs="estimated")
    with pytest.warns(UserWarning, match=r"\(BatchNorm1d with momentum=None\)$"):
        pipe.prepare(torch.randn(4, 8), target=torch.randn(4, 8))


@pytest.mark.parametrize(
    ("given", "target", "remedy"),
    [
        ([1.0, 2.0], torch.ones(2, 8), "argument 0 is a list of numbers: pass a tensor"),
        (torch.ones(4, 8), [[1.0] * 8] * 4, "the target is a list of numbers: pass a tensor"),
    ],
)
def test_lists_of_numbers_are_no_tensors(given: Any, target: Any, remedy: str) -> None:
    pipe = pdcompile.compile(nn.Linear(8, 8), loss_fn=nn.functional.mse_loss, costs="estimated")
    with pytest.raises(PdcompileError, match=remedy):
        pipe.step(given, target=target)


@pytest.mark.parametrize(
    ("given", "remedy"), [(5, r"=\(x,\)"), ([torch.ones(4, 8)], r"=tuple\(x\)"), ("x", r"=\(x,\)")]
)
def test_an_example_of_another_type_is_refused_at_once(given: Any, remedy: str) -> None:
    said = f"of type {type(given).__name__}: it is to be a tensor, a tuple .* remedy: .*{remedy}"
    with pytest.raises(InputError, match=f"(?s){said}"):
        pdcompile.compile(nn.Linear(8, 8), given, loss_fn=nn.functional.mse_loss)


class Keeping(nn.Module):
    """Keeps what it computed in a list of its class."""

    seen: ClassVar[list[Tensor]] = []

    def __init__(self, stacks: bool) -> None:
        super().__init__()
        self.stacks, self.layer = stacks, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.seen.append(h)
        return torch.stack(self.seen[-2:]).mean(0) if self.stacks else h + self.seen[0]


@pytest.mark.parametrize("stacks", [True, False])
def test_a_model_that_keeps_tensors_from_call_to_call(stacks: bool) -> None:
    Keeping.seen.clear()
    pipe = pdcompile.compile(
        Keeping(stacks), loss_fn=nn.functional.mse_loss, costs="estimated", microbatches=2
    )
    with pytest.raises(TraceError, match=r"leaves something in Keeping\.seen") as caught:
        pipe.step(torch.ones(4, 8), target=torch.ones(4, 8))
    assert "test_first_steps.py:" in str(caught.value.where)
    assert "registered buffer" in str(caught.value.remedy)


def test_a_batch_of_a_class_of_dicts_passed_whole() -> None:
    pipe = pdcompile.compile(nn.Linear(8, 8), loss_fn=nn.functional.mse_loss, costs="estimated")
    with pytest.raises(InputError, match=r"step\(\*\*batch\)"):
        pipe.step(UserDict(x=torch.ones(4, 8)), target=torch.ones(4, 8))


class Choosing(nn.Module):
    """Takes a second argument that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.layer(x)
        return out if mask is None else out * mask


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("whole", "remedy"),
    [(lambda x: {"x": x}, r"step\(\*\*batch\)"), (lambda x: (x, x), "target=y")],
)
def test_a_batch_passed_whole(whole: Any, remedy: str, first: bool) -> None:
    x = torch.ones(4, 8)
    pipe = pdcompile.compile(Choosing(), loss_fn=nn.functional.mse_loss, costs="estimated")
    if not first:
        pipe.step(x=x, target=x)
    with pytest.raises(PdcompileError, match=remedy):
        pipe.step(whole(x), target=x)


@pytest.mark.parametrize(
    ("loss_fn", "message", "remedy"),
    [
        (lambda out, y: (out - y).sum().item(), r"loss_fn reads .* \(item\)", "without item()"),
        (lambda out, y: 1.0, "returned a Python number", "without item()"),
        (
            lambda out, y: float((out - y).sum()),
            r"loss_fn reads .* \(__float__\)",
            "without item()",
        ),
        (lambda out, y: out - y, r"a tensor of shape \(4, 8\)", "loss.mean()"),
        (lambda out, y: None, "returned None", "return the loss"),
        (lambda out, y: ((out - y).sum(), out), "returned a tuple", "the loss alone"),
        (lambda out, y: torch.tensor(1.0), "the loss is a constant", "from the model's output"),
    ],
)
def test_a_loss_that_cannot_be_differentiated(loss_fn: Any, message: str, remedy: str) -> None:
    pipe = pdcompile.compile(nn.Linear(8, 8), loss_fn=loss_fn, costs="estimated")
    with pytest.raises(PdcompileError, match=message) as caught:
        pipe.step(torch.ones(4, 8), target=torch.zeros(4, 8))
    assert remedy in str(caught.value.remedy)


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def frozen() -> nn.Module:
    return nn.Linear(8, 8).requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "loss_fn", "message"),
    [
        (frozen, nn.functional.mse_loss, "no parameter required a gradient"),
        (Plain, nn.functional.mse_loss, "no parameters"),
        (lambda: nn.Linear(8, 8), lambda out, y: (out.detach() - y).mean(), "any parameter"),
    ],
)
def test_training_that_trains_nothing_is_refused_and_evaluation_is_not(
    model: Any, loss_fn: Any, message: str
) -> None:
    x = torch.ones(4, 8)
    pipe = pdcompile.compile(model(), loss_fn=loss_fn, costs="estimated", microbatches=2)
    for train in (pipe.step, pipe.forward_backward):
        with pytest.raises(ConfigError, match=message) as caught:
            train(x, target=x)
        assert "eval_step" in str(caught.value.remedy)
    if "any parameter" in message:
        assert "test_first_steps.py:" in str(caught.value.where)
    assert float(pipe.eval_step(x, target=x).loss) == float(loss_fn(pipe.predict(x), x))


@pytest.mark.parametrize(
    ("state", "message", "remedy"),
    [
        ("x.pt", "of type str", "torch.load('x.pt')"),
        (nn.Linear(8, 8), "of type Linear", "model.state_dict()"),
        (None, "of type NoneType", "state_dict()"),
        ({"weight": torch.ones(3, 3)}, r"is \(3, 3\), in the model it is \(8, 8\)", "same sizes"),
        ({"weight": 3}, "of type int", "state_dict()"),
        ({"model": {"weight": torch.ones(8, 8)}}, "nothing called model", "['model']"),
        ({"module.weight": torch.ones(8, 8)}, "module.weight", "removeprefix('module.')"),
        ({"wieght": torch.ones(8, 8)}, r"wieght \(1 of 1 names\)", "did you mean 'weight'"),
    ],
)
def test_states_that_cannot_be_loaded(state: Any, message: str, remedy: str) -> None:
    model = nn.Linear(8, 8)
    pipe = pdcompile.compile(model, loss_fn=nn.functional.mse_loss, costs="estimated", verify="off")
    pipe.prepare(torch.ones(4, 8), target=torch.ones(4, 8))
    before = model.weight.detach().clone()
    with pytest.raises(InputError, match=message) as caught:
        pipe.load_state_dict(state)
    assert remedy in str(caught.value.remedy)
    assert torch.equal(model.weight, before)


def test_a_pipeline_is_no_module_and_says_what_it_has() -> None:
    pipe = pdcompile.compile(nn.Linear(8, 8), loss_fn=nn.functional.mse_loss, costs="estimated")
    with pytest.raises(ConfigError, match=r"pipe\.predict"):
        pipe(torch.ones(4, 8))
    for name, hint in (("train", "train mode"), ("to", "before compile"), ("anything", "no 'any")):
        with pytest.raises(AttributeError, match=hint):
            getattr(pipe, name)
    assert not hasattr(pipe, "eval")
