"""Checks of the argument of `load_state_dict` against the model, before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from os import PathLike
from typing import Any

from torch import Tensor, nn

from pdcompile.errors import InputError


def check_state(
    state: Any, shapes: Mapping[str, tuple[int, ...]], extra: Collection[str] = ()
) -> None:
    """Raise InputError unless it holds tensors under names and in shapes of the model.

    Args:
        shapes: of all that can be loaded, by name; a state may hold a part of it.
        extra: names of what modules keep beside tensors.
    """
    if not isinstance(state, Mapping):
        raise InputError(
            f"a state is a dict from names to tensors, and this is of type {type(state).__name__}",
            where="load_state_dict",
            remedy=_instead(state),
        )
    unknown = [name for name in state if name not in shapes and name not in extra]
    if unknown:
        shown = ", ".join(map(str, unknown[:3])) + (", …" if len(unknown) > 3 else "")
        raise InputError(
            f"the model has nothing called {shown} ({len(unknown)} of {len(state)} names)",
            where="load_state_dict",
            remedy=_renamed(state, unknown, shapes),
        )
    for name, value in state.items():
        if name in extra:
            continue
        if not isinstance(value, Tensor):
            raise InputError(
                f"{name} is of type {type(value).__name__}, not a tensor",
                where="load_state_dict",
                remedy="give what state_dict() returns",
            )
        if tuple(value.shape) != shapes[name]:
            raise InputError(
                f"{name} is {tuple(value.shape)}, in the model it is {shapes[name]}",
                where="load_state_dict",
                remedy="load a state of a model with the same sizes, or leave this name out: "
                "what is left out keeps its value",
            )


def _instead(state: Any) -> str:
    if isinstance(state, str | PathLike):
        return f"read the file: load_state_dict(torch.load({str(state)!r}))"
    if isinstance(state, nn.Module):
        return "load_state_dict(model.state_dict())"
    return "give what state_dict() or full_state_dict() returned"


def _renamed(
    state: Mapping[Any, Any], unknown: Sequence[Any], shapes: Mapping[str, tuple[int, ...]]
) -> str:
    for name in unknown:
        if isinstance(state[name], Mapping) and set(state[name]) & set(shapes):
            return f"that is a whole checkpoint: give the part of the model, [{name!r}]"
    first = str(unknown[0])
    for known in shapes:
        if first.endswith(f".{known}"):
            prefix = first.removesuffix(known)
            return (
                f"take off {prefix!r}: {{name.removeprefix({prefix!r}): value for name, value in "
                "state.items()}"
            )
        if known.endswith(f".{first}"):
            prefix = known.removesuffix(first)
            return f"put {prefix!r} before the names: the model holds {known}"
    near = get_close_matches(first, list(shapes), n=1)
    example = near[0] if near else next(iter(shapes), "")
    hint = f"the nearest name is {example}" if near else f"its names are such as {example}"
    return f"load a state of this model; {hint}"
