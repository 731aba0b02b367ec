"""Options as they are written on a command line, and what they say."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

from pdcompile.errors import ConfigError, did_you_mean

LR = 3e-4  # where no other is given


def reduction_of(text: str | None) -> Any:
    """``mean``, ``sum``, or the function of ``FILE:FUNCTION``."""
    from pdcompile.workload import load_function

    return load_function(text) if text and ":" in text else text


def refine_of(text: str) -> bool | Literal["auto"]:
    """Raises ConfigError."""
    check_one_of("--refine", text, ("auto", "on", "off"))
    return "auto" if text == "auto" else text == "on"


def recompute_of(text: str | None) -> bool | Literal["auto"] | tuple[bool, ...] | None:
    """``on``, ``auto``, or ``1,0`` by stage.  Raises ConfigError."""
    if text in ("off", "on"):
        return text == "on"
    if text is None or text == "auto":
        return text  # type: ignore[return-value]
    parts = text.split(",")
    if not set(parts) <= {"0", "1"}:
        raise ConfigError(
            f"--recompute {text} is not a valid value",
            where="--recompute",
            remedy="one of off, on, auto, or 0 and 1 for each stage, such as 1,0,1",
        )
    return tuple(part == "1" for part in parts)


def replicas_of(text: str | None) -> Any:
    """``2``, ``3,1`` by stage, ``equal`` or ``any``.  Raises ConfigError."""
    if text in (None, "equal", "any"):
        return text
    try:
        counts = tuple(map(int, text.split(",")))
    except ValueError:
        counts = (0,)
    if min(counts) < 1:
        raise ConfigError(
            f"--replicas {text} is not a valid value",
            where="--replicas",
            remedy="a number for all stages (2), one for each (3,1), equal or any",
        )
    return counts if len(counts) > 1 else counts[0]


def microbatches_of(text: str) -> Any:
    """A number, or ``auto``.  Raises ConfigError."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"--microbatches {text} is neither a number nor auto",
            where="--microbatches",
            remedy="--microbatches 8, or auto",
        ) from error


def numbers_of(flag: str, text: str | None) -> tuple[int, ...]:
    """``4,8,16``.  Raises ConfigError."""
    parts = (text or "").split(",")
    if not all(part.strip().isdecimal() and len(part) < 10 for part in parts):
        raise ConfigError(
            f"{flag} {text} is neither auto nor numbers", where=flag, remedy=f"such as {flag} 4,8"
        )
    return tuple(int(part) for part in parts)


def check_one_of(flag: str, given: str, known: tuple[str, ...]) -> None:
    """Raises ConfigError for a value that is not known."""
    if given not in known:
        raise ConfigError(
            f"{flag} {given} is not a valid value",
            where=flag,
            remedy=did_you_mean(given, known) + f"one of {', '.join(known)}",
        )


def optimizer_of(name: str, lr: float | None) -> Any:
    """What makes an optimizer: a class of torch.optim, the function of ``FILE:FUNCTION``, or None
    for ``none``.  Raises ConfigError."""
    if ":" in name or name.lower() == "none":
        if lr is not None:
            raise ConfigError(
                f"--lr {lr:g} would have no effect: {name} takes no learning rate from outside",
                where="--lr",
                remedy="leave --lr out" + (", and set it in the function" if ":" in name else ""),
            )
        from pdcompile.workload import load_function

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
