"""Values of options from the texts of a command line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

from pdcompile.errors import ConfigError, did_you_mean
from pdcompile.schedule.registry import kind_of
from pdcompile.schedule.written import named
from pdcompile.user_functions import load_function

LR = 3e-4  # where no other is given


def words(*known: Any, **meant: Any) -> Callable[[str], Any]:
    """Reader of words that stand for themselves, or for something else."""
    return ({str(one): one for one in known} | meant).__getitem__


def reduction(text: str) -> str:
    """``mean``, ``sum``, or ``FILE:FUNCTION`` as it is: see `reduction_of`."""
    return text if ":" in text else words("mean", "sum")(text)


def reduction_of(text: str | None) -> Any:
    """``mean``, ``sum``, or the function of ``FILE:FUNCTION``, which is loaded."""
    return load_function(text) if text and ":" in text else text


def schedule(text: str) -> str:
    """A name, ``auto``, or the tasks of the file of that path.

    Raises:
        ScheduleError: there is no such schedule.
    """
    name: str = named(text)
    if name != "auto":
        kind_of(name, "--schedule")
    return name


def recompute(text: str) -> bool | Literal["auto"] | tuple[bool, ...]:
    """``off``, ``on``, ``auto``, or ``1,0`` by stage."""
    one = words("auto", on=True, off=False, **{"0": False, "1": True})
    return one(text) if text.isalpha() else tuple(map(one, text.split(",")))


def counts(*known: str, least: int = 1) -> Callable[[str], Any]:
    """Reader of a number from so many up, those of ``4,8,16``, or a word."""

    def read(text: str) -> Any:
        if text in known:
            return text
        found = tuple(map(int, text.split(",")))
        if min(found) < least:
            raise ValueError(text)
        return found if len(found) > 1 else found[0]

    return read


warmup = counts("auto", least=0)  # those of --warmup


def optimizer_of(name: str, lr: float | None) -> Any:
    """Maker of an optimizer: a class of torch.optim, the function of ``FILE:FUNCTION``, or None
    for ``none``.  Raises ConfigError."""
    if ":" in name or name.lower() == "none":
        if lr is not None:
            raise ConfigError(
                f"--lr {lr:g} would have no effect: {name} takes no learning rate from outside",
                where="--lr",
                remedy="leave --lr out" + (", and set it in the function" if ":" in name else ""),
            )
        return load_function(name) if ":" in name else None
    import torch

    known: dict[str, Callable[..., Any]] = {
        kind.lower(): value
        for kind, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    }
    if name.lower() not in known:
        raise ConfigError(
            f"there is no optimizer '{name}' in torch.optim",
            where="--optimizer",
            remedy=did_you_mean(name, known)
            + f"one of {', '.join(sorted(known))}, FILE:FUNCTION, or none",
        )
    return functools.partial(known[name.lower()], lr=LR if lr is None else lr)
