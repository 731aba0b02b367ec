"""The user's optimizer: made once a process, applied stage by stage and minibatch by minibatch."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Updater:
    """The optimizer of one process, applied stage by stage and minibatch by minibatch.

    Learning rates and the like are those of the moment when the minibatch's `step` was called
    (`snapshot`), however much later the update runs.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._snapshots: dict[int, list[dict[str, Any]]] = {}

    def snapshot(self, minibatch: int) -> None:
        """Remember every param_group value for the update of this minibatch."""
        # Learning-rate schedulers warn unless the optimizer stepped before them; it will.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._snapshots.pop(minibatch - 3, None)  # no schedule updates that late
        self._snapshots[minibatch] = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]

    def apply(self, minibatch: int, gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """One optimizer step with these gradients alone; clears them."""
        groups = self.optimizer.param_groups
        hidden = [(p, p.grad) for group in groups for p in group["params"] if p.grad is not None]
        present = [dict(group) for group in groups]
        for group, then in zip(groups, self._snapshots[minibatch], strict=False):
            group.update(then)
        _set_gradients((parameter, None) for parameter, _ in hidden)
        given = list(gradients)
        _set_gradients(given)
        self.optimizer.step()
        _set_gradients((parameter, None) for parameter, _ in given)
        _set_gradients(hidden)
        for group, now, then in zip(groups, present, self._snapshots[minibatch], strict=False):
            # What the optimizer itself changed (a step count of its own) stays.
            group.update({k: now[k] for k, v in then.items() if k in now and group[k] is v})


def _set_gradients(pairs: Iterable[tuple[nn.Parameter, Tensor | None]]) -> None:
    for parameter, gradient in pairs:
        parameter.grad = gradient
