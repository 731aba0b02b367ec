"""States beside tensors: what modules add to state dicts, learning-rate schedulers, generators.

Forward does not change what modules add (``get_extra_state``): a capture refuses attributes that it
writes.  It is kept because the model's own ``load_state_dict`` asks for it.

Every rank saves its own schedulers, with the groups that each goes by: a scheduler keeps lists with
an entry for each group of its optimizer (base rates, minima), and ranks may have unlike groups.  A
state is loaded where the groups are those that it was saved with.

What the model draws needs no state of generators: its streams are named by seed and minibatch.  A
program that shuffles or makes its data from a global generator goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn

from pdcompile.checkpoint.manifest import ANOTHER, StoredScheduler
from pdcompile.checkpoint.named_optimizer import named_groups
from pdcompile.checkpoint.plain_values import Encoder, decode
from pdcompile.eager.randomness import preserved_rng
from pdcompile.errors import CheckpointError, InputError, errors_as
from pdcompile.ir import python_draws
from pdcompile.warn import warn

_SUFFIX = "_extra_state"
Names: TypeAlias = tuple[str, ...]  # of the parameters in a group


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
            said = f"{type(module).__name__} does not take its extra state"
            remedy = "load a state of this model, or leave this key out"
            with errors_as(InputError, said, key, remedy, Exception):
                module.set_extra_state(given[key])


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


def scheduler_groups(
    scheduler: Any, optimizer: torch.optim.Optimizer | None, names: Mapping[int, str]
) -> list[Names]:
    """The groups of a scheduler's optimizer, else of `optimizer`."""
    own = getattr(scheduler, "optimizer", None)
    own = own if isinstance(own, torch.optim.Optimizer) else optimizer
    return [] if own is None else [one.names for one in named_groups(own, names)]


def scheduler_state(name: str, scheduler: Any) -> Any:
    """JSON of a scheduler's state.

    Raises:
        CheckpointError: it gives none, or one that no file without code can hold.
    """
    said = f"scheduler {name} ({type(scheduler).__name__}) gives no state"
    remedy = "hand over schedulers whose state_dict() works, or save it yourself"
    with errors_as(CheckpointError, said, "schedulers", remedy, Exception):
        state = scheduler.state_dict()
    return Encoder(inline=True).encode(state, f"schedulers/{name}")


def fitting_state(parts: Sequence[StoredScheduler], own: Sequence[Names]) -> Any:
    """JSON of the state for a scheduler whose optimizer has the groups `own`.

    Args:
        parts: the scheduler as each stage's rank had it.

    Raises:
        CheckpointError: ranks that had its parameters had other groups, or unlike states.
    """
    mine = {name for names in own for name in names}
    near = [part for part in parts if not mine.isdisjoint(chain(*part.groups))] or [*parts]
    for part in near:
        moved = len(part.groups) != len(own) or any(
            not mine.intersection(held) <= set(names)
            for held, names in zip(part.groups, own, strict=True)
        )
        if moved or part.state != near[0].state:
            raise CheckpointError(
                f"scheduler {part.name} goes by the groups of its optimizer, and this rank has "
                + ("others than those that it was saved with" if moved else "those of ranks that "
                   "saved unlike states of it"),
                where="schedulers",
                remedy="load it on the plan that it was saved with, where each rank takes its own "
                "(plan=, as many processes, the same groups); or make the scheduler anew, at the "
                "step that training is at (last_epoch=), and leave it out",
            )  # fmt: skip
    return near[0].state


def generator_states() -> Any:
    """JSON of the default generators of torch (CPU), random and numpy in this process."""
    states = {"torch": torch.get_rng_state(), "python": python_draws.states()}
    return Encoder(inline=True).encode(states, "random_state")


def states_of(data: Any, where: str) -> dict[str, Any]:
    """The states in JSON of them.

    Raises:
        CheckpointError: they are none.
    """
    found = decode(data, where)
    said = "the states of the random number generators are malformed"
    with preserved_rng(), errors_as(CheckpointError, said, where, ANOTHER, Exception):
        _, of_numpy = found["python"]
        if of_numpy is not None and not 0 <= of_numpy[1] <= len(of_numpy[0]) // 4:
            raise ValueError(of_numpy[1])  # numpy would read beyond its memory
        restore(found)
    return dict(found)


def restore(states: dict[str, Any]) -> None:
    """Set this process's generators to these states."""
    torch.set_rng_state(states["torch"])
    python_draws.restore(states["python"])
