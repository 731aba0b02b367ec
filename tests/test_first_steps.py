"""What beginners stumble over: the error says what was left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import ConfigError, PdcompileError


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
