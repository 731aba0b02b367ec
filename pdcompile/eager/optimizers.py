"""Optimizers: the argument and the result of the user's callable."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch

from pdcompile.errors import ConfigError, some
from pdcompile.releases.torch_internals import step_hooks

Named = tuple[str, torch.nn.Parameter]
Buffer = Callable[..., torch.Tensor]
_REMEDY = "optimizer=functools.partial(torch.optim.AdamW, lr=3e-4)"


class NamedParameters(list[torch.nn.Parameter]):
    """Parameters of one rank's stages, in the model's order, with their names.

    A plain list for ``torch.optim.AdamW(parameters)``; ``parameters.named`` gives
    ``(name, parameter)`` pairs for parameter groups::

        def optimizer(parameters):
            decay = [p for name, p in parameters.named if p.ndim > 1]
            rest = [p for name, p in parameters.named if p.ndim <= 1]
            return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest}])

    ``parameters.buffer(name)`` is a buffer of these stages, as a step finds it after all forwards
    of its minibatch; one zero where the optimizer is only tried on copies.  A buffer that each
    replica of a stage writes is had as ``parameters.buffer(name, "max")``: the largest of theirs.
    """

    def __init__(self, named: Iterable[Named], buffer: Buffer | None = None):
        self.named, self.buffer = tuple(named), buffer or (lambda *_: torch.zeros(1))
        super().__init__(parameter for _, parameter in self.named)


class Optimizers(torch.optim.Optimizer):
    """Several optimizers as one, each of parameters of its own.

    Groups and state are those of `optimizers`, one after the other, so that learning-rate
    schedulers take it or one of them.

    Raises:
        ConfigError: a parameter is in two of them; or a group is added, which would belong to none.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([{"params": []}], {})
        common = set.intersection(*(set(one.defaults) for one in optimizers))
        self.defaults = {key: optimizers[0].defaults[key] for key in common}
        self.optimizers = tuple(optimizers)
        held = [id(parameter) for group in self.param_groups for parameter in group["params"]]
        if len(set(held)) < len(held):
            raise ConfigError(
                "a parameter is in two of the optimizers, which would both update it",
                where="optimizer",
                remedy="give each parameter to one of them",
            )

    @property
    def param_groups(self) -> Any:
        """The groups of all, which cannot be added to or taken from here."""
        return tuple(group for one in self._members for group in one.param_groups)

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self._refuse_groups(groups)

    @property
    def state(self) -> Any:
        """The states of all, by parameter."""
        return _States(self._members)

    @state.setter
    def state(self, state: Any) -> None:
        self._refuse_groups(state)

    @property
    def _members(self) -> tuple[torch.optim.Optimizer, ...]:
        made: tuple[torch.optim.Optimizer, ...] = vars(self).get("optimizers", ())
        return made  # none while torch makes this one

    def _refuse_groups(self, given: Any) -> None:
        if self._members:
            raise ConfigError(
                "groups and states of several optimizers cannot be set at one: they are theirs",
                where="pipe.optimizer",
                remedy="make all groups in the function that makes the optimizers, and change the "
                "values of a group, or its list of parameters, in place",
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: which of them would update it is not known."""
        self._refuse_groups(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of each."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for one in self.optimizers:
            one.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "optimizers" in state:  # a copy
            super().__setstate__(state)
            return
        groups = iter(state["param_groups"])
        for one in self.optimizers:
            own = [next(groups) for _ in one.param_groups]
            held = {p: state["state"][p] for g in own for p in g["params"] if p in state["state"]}
            one.__setstate__({"state": defaultdict(dict, held), "param_groups": own})


class _States(MutableMapping[Any, Any]):
    """The states of several optimizers as one mapping: an entry is of the one that has its key."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, key: Any) -> Any:
        for one in self._optimizers:
            if key in one.state or any(key is p for g in one.param_groups for p in g["params"]):
                return one.state
        raise KeyError(key)

    def __getitem__(self, key: Any) -> Any:
        return self._of(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._of(key)[key]

    def __contains__(self, key: Any) -> bool:
        return any(key in one.state for one in self._optimizers)

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of a key, or the default; makes no entry."""
        return next((one.state[key] for one in self._optimizers if key in one.state), default)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(one.state for one in self._optimizers)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers)


def members(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that an optimizer consists of: itself, or several."""
    return optimizer.optimizers if isinstance(optimizer, Optimizers) else (optimizer,)


def all_step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The hooks around the steps of an optimizer and of those that it consists of."""
    every = dict.fromkeys([optimizer, *members(optimizer)])
    return [hook for one in every for hook in step_hooks(one)]


def make_optimizer(
    make: Any, named: Iterable[Named], others: Sequence[Named] = (), buffer: Buffer | None = None
) -> torch.optim.Optimizer | None:
    """The optimizer that the user's callable makes; None without one.

    A list of optimizers becomes one, `Optimizers`.  A rank without parameters gets an optimizer of
    one empty parameter, so that learning-rate schedulers work alike on every rank; so does one of
    whose parameters the callable takes none, as long as it takes some of all ranks'.

    Args:
        others: the model's parameters that other ranks have.
        buffer: gives those of this rank by name; None: the parameters are copies.

    Raises:
        ConfigError: the result is not an optimizer, its step needs a closure, or it holds
            parameters that are not among `named` and would never have a gradient.
    """
    if make is None:
        return None
    if not callable(make) or isinstance(make, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is {type(make).__name__}, not a callable that makes one", remedy=_REMEDY
        )
    nothing = [("", torch.nn.Parameter(torch.empty(0, 0)))]
    pairs = list(named) or nothing
    given = NamedParameters(pairs, buffer)
    made = _made(make, given) if others else make(given)
    if others and isinstance(made, list | tuple) and not made:
        make_optimizer(make, [*pairs, *others])  # raises where it takes none at all
        made = _made(make, NamedParameters(nothing)) or torch.optim.SGD([nothing[0][1]], lr=0.0)
        pairs = nothing
    several = isinstance(made, list | tuple)
    for one in made if several else (made,):
        if not isinstance(one, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer returned {type(one).__name__}, not a torch.optim.Optimizer",
                remedy=f"{_REMEDY}; or a function that returns a list of optimizers",
            )
        closure = inspect.signature(one.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{type(one).__name__}.step needs a closure that computes the loss again, "
                "which a pipeline cannot do in the middle of an update",
                remedy="use an optimizer that steps on given gradients",
            )
    if several and not made:
        raise ConfigError(
            f"optimizer returned no optimizer for {some([name for name, _ in pairs], 2)}",
            where="optimizer",
            remedy="return at least one: a rank may have parameters of one kind alone",
        )
    optimizer: torch.optim.Optimizer = Optimizers(made) if several else made
    own = {id(parameter) for _, parameter in pairs}
    held = [one for group in optimizer.param_groups for one in group["params"]]
    foreign = [one for one in held if id(one) not in own]
    if foreign:
        raise ConfigError(
            f"the optimizer holds {len(foreign)} of {len(held)} parameters that it was not given, "
            f"the first of shape {tuple(foreign[0].shape)}",
            where="optimizer",
            remedy="make it of the parameters that it is called with: lambda parameters: "
            "torch.optim.SGD(parameters, lr=0.1)",
        )
    return optimizer


def _made(make: Any, given: NamedParameters) -> Any:
    """Return what the callable makes of these; [] where it takes none of them."""
    try:
        return make(given)
    except ValueError as error:
        if "empty parameter list" in str(error):  # torch's own
            return []
        raise
