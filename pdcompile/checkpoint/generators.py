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
    if not isinstance(found, dict) or set(found) != {"torch", "random", "numpy"}:
        raise CheckpointError(
            "the states of the random number generators are malformed",
            where=where,
            remedy=ANOTHER,
        )
    return found


def restore(states: dict[str, Any]) -> None:
    """Set this process's generators to these states."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["random"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
