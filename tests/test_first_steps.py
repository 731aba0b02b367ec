"""What beginners stumble over: the error says what was left out."""

from __future__ import annotations

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


def test_a_reduction_that_raises_is_named_with_what_it_was_given() -> None:
    pipe, _, call = tagging(lambda args, kwargs, target: kwargs["labels"].numel())
    with pytest.raises(ConfigError, match="loss_reduction raised KeyError") as caught:
        pipe.step(**call)
    assert "2 positional arguments" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [(torch.randn(4, 8), "there was no target"), ({"x": torch.randn(4, 8)}, r"step\(\*\*batch\)")],
)
def test_the_remedy_names_what_was_forgotten(given: Any, remedy: str) -> None:
    pipe = pdcompile.compile(nn.Linear(8, 8), loss_fn=nn.functional.mse_loss, costs="estimated")
    with pytest.raises(PdcompileError, match=remedy):
        pipe.step(given)


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


@pytest.mark.parametrize("given", [5, [torch.ones(4, 8)], "x"])
def test_an_example_of_another_type_is_refused_at_once(given: Any) -> None:
    with pytest.raises(InputError, match="example_inputs is of type"):
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
    with pytest.raises(TraceError, match="kept from an earlier call") as caught:
        pipe.step(torch.ones(4, 8), target=torch.ones(4, 8))
    assert "test_first_steps.py:" in str(caught.value.where)
    assert "registered buffer" in str(caught.value.remedy)
