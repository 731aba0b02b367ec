"""Weight versions of the reference: a schedule is the age of the weights that it computes on.

Minibatch t (from 0) runs on W_max(t − lag, 0), its gradients update W_t.  Written for N stages
with warm-up depths w_s, the schedules are

    flushes        lag 0: eager gradient accumulation (gpipe, 1f1b, zb-h1, written ones)
    2bw            lag 1 on every stage
    vsync          lag w_0 on every stage
    async               the same, and learning rates by whose turn it was
    stash          lag w_s on stage s

The registry has the lag of each.

(PipeDream counts minibatches k = t + 1 and writes max(0, k − (w_s + 1)).)

Under stash a stage with r_s replicas updates after every r_s minibatches, with the mean of their
gradients (1F1B-RR): minibatch t runs on W_max(⌊t/r_s⌋ − w_s, 0), and a group's last one, t with
t + 1 a multiple of r_s, makes W_{(t+1)/r_s}.  Lags count updates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from pdcompile.errors import ConfigError
from pdcompile.options import Options
from pdcompile.plan import Plan
from pdcompile.schedule.registry import kind_of, one_age_streams


class Age(NamedTuple):
    """Age in updates of the weights that a minibatch runs on; minibatches of an update."""

    lag: int = 0
    group: int = 1


class Versions:
    """Older weights of a model, at most `lag` of each parameter.

    Only `.data` is exchanged, while no autograd graph is alive, so that parameters, gradients and
    optimizer state stay the same objects.
    """

    def __init__(self, model: nn.Module, ages: Mapping[str, Age]) -> None:
        held = [
            (parameter, ages.get(name, Age()))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        self._history: list[tuple[nn.Parameter, deque[torch.Tensor]]] = [
            (parameter, deque(maxlen=age.lag)) for parameter, age in held if age.lag > 0
        ]
        self._groups = {id(parameter): age.group for parameter, age in held}
        self.stale = any(age.lag > 0 or age.group > 1 for age in ages.values())

    @contextmanager
    def of_minibatch(self) -> Iterator[None]:
        """Puts the weights of the next minibatch into the parameters; restores the newest ones."""
        newest = [parameter.data for parameter, _ in self._history]
        try:
            for parameter, older in self._history:
                # The oldest is W_0 until there are `lag` older ones.
                if older:
                    parameter.data = older[0]
            yield
        finally:
            for (parameter, _), data in zip(self._history, newest, strict=True):
                parameter.data = data

    def remember(self, minibatch: int) -> None:
        """Keeps a copy of the present weights; called before an update in place, of those whose
        group the minibatch ends."""
        for parameter, older in self._history:
            if (minibatch + 1) % self._groups[id(parameter)] == 0:
                older.append(parameter.data.clone())

    def forget(self) -> None:
        """Drops older versions: the present weights are W_0."""
        for _, older in self._history:
            older.clear()


class Groups:
    """Sums of gradients that wait for the rest of their group, by parameter, in the order of the
    minibatches; a group that is not complete waits, whatever comes between."""

    def __init__(
        self,
        model: nn.Module,
        ages: Mapping[str, Age],
        scales: Callable[[int], Mapping[str, float]],
    ) -> None:
        """`scales`: what learning rates of a minibatch's update are multiplied by, for each
        parameter; empty: 1."""
        self._model, self._scales = model, scales
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

    def step(self, optimizer: torch.optim.Optimizer, minibatch: int) -> None:
        """One update of the parameters that have a gradient, each with its learning rate."""
        scales, rates = self._scales(minibatch), dict[float, list[nn.Parameter]]()
        for name, parameter in self._model.named_parameters() if scales else ():
            rates.setdefault(scales.get(name, 1.0), []).append(parameter)
        if not rates:
            optimizer.step()
        gradients = {p: p.grad for parameters in rates.values() for p in parameters}
        given = [group["lr"] for group in optimizer.param_groups] if rates else []
        left = given[:]  # what the optimizer makes of them stays, without their scale
        for rate, parameters in rates.items():
            for parameter in gradients:
                parameter.grad = None
            for parameter in parameters:
                parameter.grad = gradients[parameter]
            scaled = [lr * rate for lr in given]
            for group, lr in zip(optimizer.param_groups, scaled, strict=True):
                group["lr"] = lr
            optimizer.step()
            for n, group in enumerate(optimizer.param_groups):
                if group["lr"] is not scaled[n]:
                    left[n] = group["lr"] / rate
        for group, lr in zip(optimizer.param_groups, left, strict=False):
            group["lr"] = lr

    def restart(self) -> None:
        """Go on from another state: the update of a group that has begun is of its others."""
        self._sums.clear()
        self._counts = dict.fromkeys(self._held, 0)


def weight_ages(model: nn.Module, options: Options) -> dict[str, Age]:
    """The age of every parameter's weights, by name.

    Raises:
        ConfigError: the schedule needs a plan that is not given.
    """
    names = [name for name, _ in model.named_parameters()]
    kind = kind_of(options.schedule)
    if not kind.updates_each:
        return dict.fromkeys(names, Age(kind.lag_of(0, 0)))
    plan = options.plan
    if plan is None:
        if kind.one_age and options.stages is not None:
            return dict.fromkeys(names, Age(options.stages - 1))
        raise ConfigError(
            f"schedule={kind.name!r} computes on weights whose age depends on the plan",
            remedy="give plan=pipe.plan"
            + (", or stages= for the minimal warm-up" if kind.one_age else ""),
        )
    depths = plan.training.warmup or tuple(reversed(range(len(plan.stages))))
    if kind.one_age:
        return dict.fromkeys(names, Age(kind.lag_of(depths[0], depths[0])))
    ages = [
        Age(kind.lag_of(depth, depths[0]), stage.replicas)
        for depth, stage in zip(depths, plan.stages, strict=True)
    ]
    return _by_stage(names, plan, ages)


def learning_rates(options: Options, minibatch: int) -> dict[str, float]:
    """Factor of the learning rate of each parameter in an update, where there is one: that of its
    first stage, which steps it."""
    plan = options.plan
    if plan is None or not (options.linear_lr_scaling or plan.spec.rescales):
        return {}
    last_first = reversed(plan.stages)
    return {n: plan.scale_of(s.index, minibatch) for s in last_first for n in s.parameters}


def _by_stage(names: list[str], plan: Plan, age_of: list[Age]) -> dict[str, Age]:
    schedule, ages = plan.training.schedule, dict[str, Age]()
    for stage, age in zip(plan.stages, age_of, strict=True):
        for name in stage.parameters:
            if name in ages:
                raise ConfigError(
                    "a parameter is held by several stages, whose weights differ in age under "
                    + schedule,
                    where=name,
                    remedy=f"use schedule={one_age_streams()}, or keep its users in one stage",
                )
            ages[name] = age
    unknown = sorted(set(ages) - set(names))
    if unknown:
        raise ConfigError(
            f"the plan holds parameters that the model does not have: {', '.join(unknown[:5])}",
            remedy="use the plan of this model",
        )
    return {name: ages.get(name, Age()) for name in names}
