"""Weight versions of the reference: a schedule is the age of the weights that it computes on.

Minibatch t (from 0) runs on W_max(t − lag, 0), its gradients update W_t.  Written for N stages
with warm-up depths w_s, the schedules are

    flushes        lag 0: eager gradient accumulation (gpipe, 1f1b, zb-h1, written ones)
    2bw            lag 1 on every stage
    vsync          lag w_0 on every stage
    stash          lag w_s on stage s

The registry has the lag of each.

(PipeDream counts minibatches k = t + 1 and writes max(0, k − (w_s + 1)).)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from pdcompile.errors import ConfigError
from pdcompile.options import Options
from pdcompile.plan import Plan
from pdcompile.schedule.registry import KINDS, find, one_age_streams


class Versions:
    """Older weights of a model, at most `lag` of each parameter.

    Only `.data` is exchanged, while no autograd graph is alive, so that parameters, gradients and
    optimizer state stay the same objects.
    """

    def __init__(self, model: nn.Module, lags: Mapping[str, int]) -> None:
        self._history: list[tuple[nn.Parameter, deque[torch.Tensor]]] = [
            (parameter, deque(maxlen=lags[name]))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and lags.get(name, 0) > 0
        ]
        self.stale = any(lag > 0 for lag in lags.values())

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

    def remember(self) -> None:
        """Keeps a copy of the present weights; called before an update in place."""
        for parameter, older in self._history:
            older.append(parameter.data.clone())

    def forget(self) -> None:
        """Drops older versions: the present weights are W_0."""
        for _, older in self._history:
            older.clear()


def weight_lags(model: nn.Module, options: Options) -> dict[str, int]:
    """The lag of every parameter, by name.

    Raises:
        ConfigError: the schedule is not known, or needs a plan that is not given.
    """
    names = [name for name, _ in model.named_parameters()]
    kind = find(options.schedule)
    if kind is None:
        raise ConfigError(
            f"schedule={options.schedule!r} is not a known schedule",
            remedy=f"one of {', '.join(KINDS)} (pipe.plan.training.schedule)",
        )
    if not kind.updates_each:
        return dict.fromkeys(names, kind.lag_of(0, 0))
    plan = options.plan
    if plan is not None and not isinstance(plan, Plan):
        raise ConfigError(
            f"plan is of type {type(plan).__name__}", remedy="pass pipe.plan, or Plan.from_json"
        )
    if plan is None:
        if kind.one_age and options.stages is not None:
            return dict.fromkeys(names, options.stages - 1)
        raise ConfigError(
            f"schedule={kind.name!r} computes on weights whose age depends on the plan",
            remedy="give plan=pipe.plan"
            + (", or stages= for the minimal warm-up" if kind.one_age else ""),
        )
    depths = plan.training.warmup or tuple(reversed(range(len(plan.stages))))
    if kind.one_age:
        return dict.fromkeys(names, kind.lag_of(depths[0], depths[0]))
    return _lags_by_stage(names, plan, [kind.lag_of(depth, depths[0]) for depth in depths])


def _lags_by_stage(names: list[str], plan: Plan, lag_of: Sequence[int]) -> dict[str, int]:
    schedule, lags = plan.training.schedule, dict[str, int]()
    for stage, lag in zip(plan.stages, lag_of, strict=True):
        if stage.replicas > 1:
            raise ConfigError(
                f"stage {stage.index} has {stage.replicas} replicas: {schedule} with replicas "
                "updates stages at different times",
                remedy=f"use a plan without replicas, or schedule={one_age_streams()}",
            )
        for name in stage.parameters:
            if name in lags:
                raise ConfigError(
                    "a parameter is held by several stages, whose weights differ in age under "
                    + schedule,
                    where=name,
                    remedy=f"use schedule={one_age_streams()}, or keep its users in one stage",
                )
            lags[name] = lag
    unknown = sorted(set(lags) - set(names))
    if unknown:
        raise ConfigError(
            f"the plan holds parameters that the model does not have: {', '.join(unknown[:5])}",
            remedy="use the plan of this model",
        )
    return {name: lags.get(name, 0) for name in names}
