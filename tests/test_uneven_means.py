"""A loss that is a mean over some of the targets is named before anything is trained."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile


def notes(loss_fn: Callable[..., Any], target: Tensor, **given: Any) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
    pipe = pdcompile.compile(
        model, torch.randint(1, 9, (4, 3)), example_target=target, loss_fn=loss_fn,
        cluster=pdcompile.Cluster.local(1), costs="estimated", **{"microbatches": 2, **given},
    )  # fmt: skip
    found = [note for note in pipe.plan.notes if "targets that count" in note]
    pipe.close()
    return found


def token_loss(scores: Tensor, target: Tensor, **given: Any) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), **given)


TARGET = torch.ones(4, 3, dtype=torch.long)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("loss_fn", "target", "said"),
    [
        (partial(token_loss, ignore_index=0), TARGET, "ignore_index=0"),
        (partial(token_loss, weight=torch.rand(9)), TARGET, "weight="),
        (nn.CrossEntropyLoss(ignore_index=7), TARGET[:, 0], "ignore_index=7"),
        (token_loss, TARGET, None),
        (partial(token_loss, ignore_index=0, reduction="sum"), TARGET, None),
    ],
)
def test_means_over_some_of_the_targets_are_named(
    loss_fn: Callable[..., Any], target: Tensor, said: str | None
) -> None:
    if target.ndim == 1:
        loss_fn = partial(_of_last, loss_fn)
    found = notes(loss_fn, target)
    assert len(found) == (said is not None)
    assert all(note.startswith(f"cross_entropy with {said}") for note in found)


def _of_last(loss: Callable[..., Any], scores: Tensor, target: Tensor) -> Any:
    return loss(scores[:, -1], target)


def test_who_counts_the_targets_is_told_nothing() -> None:
    loss = partial(token_loss, ignore_index=0)
    count = lambda args, kwargs, target: int((target != 0).sum())  # noqa: E731
    assert not notes(loss, TARGET, loss_reduction=count)
    assert not notes(loss, TARGET, microbatches=1)


@pytest.mark.parametrize(("microbatches", "said"), [(4, "4 of the minibatch's 16"), (1, "")])
def test_statistics_of_microbatches_are_told_by_the_plan(microbatches: int, said: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    with pdcompile.compile(
        model, torch.randn(16, 8), example_target=torch.randn(16, 4), loss_fn=F.mse_loss,
        cluster=pdcompile.Cluster.local(1), costs="estimated", microbatches=microbatches,
    ) as pipe:  # fmt: skip
        found = [note for note in pipe.plan.notes if note.startswith("batch norm takes")]
    assert [said in note for note in found] == ([True] if said else [])
