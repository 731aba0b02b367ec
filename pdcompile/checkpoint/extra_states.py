"""States beside tensors: what modules add to state dicts, and random number generators.

Forward does not change what modules add (``get_extra_state``): a capture refuses attributes that it
writes.  It is kept because the model's own ``load_state_dict`` asks for it.

What the model draws needs no state of generators: its streams are named by seed and minibatch.  A
program that shuffles or makes its data from a global generator goes on where it was.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from pdcompile.checkpoint.manifest import ANOTHER
from pdcompile.checkpoint.plain_values import Encoder, decode
from pdcompile.errors import CheckpointError, InputError
from pdcompile.warn import warn

_SUFFIX = "_extra_state"


def tensor_keys(model: nn.Module) -> tuple[str, ...]:
    """The keys of parameters and buffers in a state dict, as they are registered; hooks that give
    them other names are not asked."""
    return tuple(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for registry in (module._parameters, module._buffers)
        for name, tensor in registry.items()
        if tensor is not None
        and (registry is module._parameters or name not in module._non_persistent_buffers_set)
    )


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Values that the modules of a model add to its state dict, by key."""
    return {key: module.get_extra_state() for key, module in _modules(model)}


def set_extra_states(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Give modules their extra states, as far as there are any.

    Raises:
        InputError: a module does not take its own.
    """
    for key, module in _modules(model):
        if key in given:
            try:
                module.set_extra_state(given[key])
            except Exception as error:  # the user's
                raise InputError(
                    f"{type(module).__name__} does not take its extra state: "
                    f"{type(error).__name__}: {error}",
                    where=key,
                    remedy="load a state of this model, or leave this key out",
                ) from error


def encoded_extra_states(model: nn.Module) -> dict[str, Any]:
    """JSON of the extra states of a model; warns of those that only code could bring back."""
    found: dict[str, Any] = {}
    for key, value in extra_states(model).items():
        try:
            found[key] = Encoder(inline=True).encode(value, key)
        except CheckpointError as error:
            warn(f"the extra state {key} is in no checkpoint: {error.message}")
    return found


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield (f"{path}.{_SUFFIX}" if path else _SUFFIX), module


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
