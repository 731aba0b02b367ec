"""Trainings that are saved and resumed, for comparison with one that never stopped."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tests.helpers.changes import Rich, batch
from tests.helpers.pipelines import by_hand

ADAMW = partial(torch.optim.AdamW, lr=0.02)


class Resumed(Rich):
    """Nothing of it is changed before it is captured."""

    captured_once = True


def pipeline(schedule: str, stages: int = 2, *, tied: bool = False, **options: Any) -> Any:
    """A prepared pipeline of a model with dropout, batch norm and a frozen part."""
    micro = 1 if schedule in ("stash", "vsync") else 4
    given = {"microbatches": micro, "optimizer": ADAMW, "loss_fn": F.mse_loss, **options}
    return by_hand(Resumed(tied), stages, *batch(0), schedule=schedule, **given).prepare()


def train(runner: Any, first: int, last: int) -> list[float]:
    """The losses of some minibatches; then nothing is in flight."""
    losses = [runner.step(batch(t)[0], target=batch(t)[1]).loss for t in range(first, last)]
    found = [float(loss) for loss in losses]
    runner.flush()
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two states, of tensors, numbers, lists and dicts, are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
