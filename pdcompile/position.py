"""Position: how far a training has come, kept with its state.

Random numbers are drawn for (seed, minibatch, microbatch, op), so a training that goes on from a
saved state has to know which minibatch comes next, or it repeats the dropout masks of its first
ones.  The keys of a state are the model's own; the position is in its ``_metadata``, where torch
keeps the versions of modules, and which torch.save and torch.load keep.  With it are gradients that
wait for the rest of their group, where an update takes several minibatches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import Tensor

from pdcompile.errors import InputError

_KEY = "pdcompile"


@dataclass(frozen=True, slots=True)
class Position:
    """Minibatches trained on and evaluated so far."""

    minibatches: int = 0
    evaluations: int = 0


class Accumulated(NamedTuple):
    """The sum of the gradients of so many minibatches, which no update has taken yet; None where
    a parameter had none."""

    minibatches: int
    gradient: Tensor | None


def as_position(given: Any) -> Position | None:
    """A position as users give it: a number of minibatches, a `Position`, None for none.

    Raises:
        InputError: it is something else.
    """
    if given is None or isinstance(given, Position):
        return given
    if type(given) is int and given >= 0:
        return Position(given)
    raise InputError(
        f"position={given!r} is neither a number of minibatches nor a Position",
        where="load_state_dict",
        remedy="the number of minibatches trained on (pipe.position.minibatches), or pipe.position",
    )


def with_position(state: Mapping[str, Tensor], position: Position) -> OrderedDict[str, Tensor]:
    """The state, with the position in its metadata."""
    found: Any = OrderedDict(state)
    metadata = OrderedDict(getattr(state, "_metadata", {}))
    metadata[""] = {**metadata.get("", {}), _KEY: asdict(position)}
    found._metadata = metadata
    return found  # type: ignore[no-any-return]


def position_of(state: Any) -> Position | None:
    """The position that a state was saved at; None for one that has none.

    Raises:
        InputError: the state's position is malformed.
    """
    metadata = getattr(state, "_metadata", None)
    numbers = metadata.get("", {}).get(_KEY) if isinstance(metadata, Mapping) else None
    if numbers is None:
        return None
    counts = [numbers.get(name) for name in ("minibatches", "evaluations")]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise InputError(
            f"the position of the state is {numbers}; expected two counts from 0 on",
            where="load_state_dict: _metadata",
            remedy="load what state_dict() or full_state_dict() returned",
        )
    return Position(*counts)
