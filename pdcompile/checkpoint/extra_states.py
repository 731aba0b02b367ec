"""Extra states: what modules add to state dicts beside tensors (``get_extra_state``).

Forward does not change them in training: a capture refuses attributes that it writes.  They are
kept because the model's own ``load_state_dict`` asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from pdcompile.checkpoint.plain_values import Encoder
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
