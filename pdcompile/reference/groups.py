"""Updates of several minibatches in the reference: gradients that wait for the rest of their group.

A parameter whose stage has r replicas is updated after every r minibatches with the mean of their
gradients, summed in the order of the minibatches.  A group that is not complete waits, whatever
comes between.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from pdcompile.reference.versions import Age


class Groups:
    """The sums of groups that are not complete, by parameter."""

    def __init__(
        self, model: nn.Module, ages: Mapping[str, Age], rates: Mapping[str, float]
    ) -> None:
        """`rates`: what learning rates are multiplied by, for each parameter; empty: 1."""
        self._rates: dict[float, list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters() if rates else ():
            self._rates.setdefault(rates.get(name, 1.0), []).append(parameter)
        named = model.named_parameters()
        self._held = {n: (p, ages[n].group) for n, p in named if n in ages and ages[n].group > 1}
        self._sums: dict[str, torch.Tensor] = {}
        self._counts = dict.fromkeys(self._held, 0)

    def take(self, minibatch: int) -> None:
        """Take the gradients of a minibatch, and leave in ``.grad`` those of groups that it ends:
        their means."""
        for name, (parameter, group) in self._held.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and name in self._sums:
                self._sums[name] += gradient
            elif gradient is not None:
                self._sums[name] = gradient.clone()
            self._counts[name] += 1
            if (minibatch + 1) % group == 0:
                total = self._sums.pop(name, None)
                parameter.grad = None if total is None else total / self._counts[name]
                self._counts[name] = 0

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One update of the parameters that have a gradient, each with its learning rate."""
        if not self._rates:
            optimizer.step()
        gradients = {p: p.grad for parameters in self._rates.values() for p in parameters}
        given = [group["lr"] for group in optimizer.param_groups] if self._rates else []
        for rate, parameters in self._rates.items():
            for parameter in gradients:
                parameter.grad = None
            for parameter in parameters:
                parameter.grad = gradients[parameter]
            for group, lr in zip(optimizer.param_groups, given, strict=True):
                group["lr"] = lr * rate
            optimizer.step()
        for group, lr in zip(optimizer.param_groups, given, strict=False):
            group["lr"] = lr

    def restart(self) -> None:
        """Go on from another state: the update of a group that has begun is of its others."""
        self._sums.clear()
        self._counts = dict.fromkeys(self._held, 0)
