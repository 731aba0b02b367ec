"""Optimizers: the argument and the result of the user's callable, and the default one."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pdcompile.errors import ConfigError

if TYPE_CHECKING:
    import torch

_REMEDY = "optimizer=functools.partial(torch.optim.AdamW, lr=3e-4)"


class NamedParameters(list["torch.nn.Parameter"]):
    """Parameters of one rank's stages, in the model's order, with their names.

    A plain list for ``torch.optim.AdamW(parameters)``; ``parameters.named`` gives
    ``(name, parameter)`` pairs for parameter groups::

        def optimizer(parameters):
            decay = [p for name, p in parameters.named if p.ndim > 1]
            rest = [p for name, p in parameters.named if p.ndim <= 1]
            return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest}])
    """

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]]):
        self.named = tuple(named)
        super().__init__(parameter for _, parameter in self.named)


def default_optimizer(parameters: NamedParameters) -> torch.optim.Optimizer:
    """The default of `compile` and `reference`: AdamW at 3e-4."""
    import torch

    return torch.optim.AdamW(parameters, lr=3e-4)


def make_optimizer(
    make: Any, named: Iterable[tuple[str, torch.nn.Parameter]]
) -> torch.optim.Optimizer | None:
    """The optimizer that the user's callable makes; None without one.

    A rank without parameters gets an optimizer of one empty parameter, so that learning-rate
    schedulers work alike on every rank.

    Raises:
        ConfigError: the result is not an optimizer, its step needs a closure, or it holds
            parameters that are not among `named` and would never have a gradient.
    """
    import torch

    if make is None:
        return None
    if not callable(make) or isinstance(make, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is {type(make).__name__}, not a callable that makes one", remedy=_REMEDY
        )
    pairs = list(named) or [("", torch.nn.Parameter(torch.empty(0)))]
    optimizer = make(NamedParameters(pairs))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer returned {type(optimizer).__name__}, not a torch.optim.Optimizer",
            remedy=_REMEDY,
        )
    given = {id(parameter) for _, parameter in pairs}
    held = [one for group in optimizer.param_groups for one in group["params"]]
    foreign = [one for one in held if id(one) not in given]
    if foreign:
        raise ConfigError(
            f"the optimizer holds {len(foreign)} of {len(held)} parameters that it was not given, "
            f"the first of shape {tuple(foreign[0].shape)}",
            where="optimizer",
            remedy="make it of the parameters that it is called with: lambda parameters: "
            "torch.optim.SGD(parameters, lr=0.1)",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__}.step needs a closure that computes the loss again, "
            "which a pipeline cannot do in the middle of an update",
            remedy="use an optimizer that steps on given gradients",
        )
    return optimizer
