"""The states of the random number generators that a user's program draws from.

What the model draws needs none of them: its streams are named by seed and minibatch.  A program
that shuffles or makes its data from a global generator goes on where it was.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from pdcompile.checkpoint.manifest import ANOTHER
from pdcompile.checkpoint.plain_values import Encoder, decode
from pdcompile.errors import CheckpointError


def generator_states() -> Any:
    """JSON of the default generators of torch (CPU), random and numpy in this process."""
    kind, keys, position, has_normal, normal = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
        "numpy": (str(kind), [int(key) for key in keys], position, has_normal, normal),
    }
    return Encoder(inline=True).encode(states, "random_state")


def states_of(data: Any, where: str) -> dict[str, Any]:
    """The states in JSON of them.

    Raises:
        CheckpointError: they are none.
    """
    found = decode(data, where)
    try:  # on generators that nobody draws from
        if set(found) != {"torch", "random", "numpy"}:
            raise ValueError(found)
        _set(found, torch.Generator(), random.Random(), np.random.RandomState())
    except (TypeError, ValueError, LookupError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            "the states of the random number generators are malformed",
            where=where,
            remedy=ANOTHER,
        ) from error
    return dict(found)


def restore(states: dict[str, Any]) -> None:
    """Set this process's generators to these states."""
    _set(states, torch.default_generator, random, np.random)


def _set(states: dict[str, Any], of_torch: Any, of_python: Any, of_numpy: Any) -> None:
    of_torch.set_state(states["torch"])
    of_python.setstate(states["random"])
    kind, keys, position, *rest = states["numpy"]
    if not 0 <= position <= len(keys):  # numpy would read beyond them
        raise ValueError(position)
    of_numpy.set_state((kind, np.array(keys, dtype=np.uint32), position, *rest))
