"""Checkpoints without a pipeline: in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.checkpoint.contents import Contents, open_checkpoint
from pdcompile.checkpoint.extra_states import set_extra_states
from pdcompile.checkpoint.manifest import Holding, HoldingKind
from pdcompile.checkpoint.named_optimizer import NamedGroup, named_loading, names_of
from pdcompile.eager.optimizers import Optimizers
from pdcompile.errors import CheckpointError, InputError
from pdcompile.ir.targets import dtype_name
from pdcompile.position import Position
from pdcompile.weights.source import slots


def load_checkpoint(
    folder: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> Position:
    """Load a checkpoint of any plan into a model, and the optimizer's state into an optimizer.

    The newest weights are taken, also where a schedule computes on older ones.

    Args:
        folder: what `pipe.save` was given, or one checkpoint in it.
        optimizer: of the model's parameters, or several, in any order.  Where their groups are
            others than when it was saved, each keeps its own learning rate.

    Returns:
        The minibatches that it was trained on.

    Raises:
        CheckpointError: it is damaged, or of another model or optimizer; nothing was changed.
    """
    contents = open_checkpoint(Path(folder))
    every = slots(model)
    kept = {fqn: slot for fqn, slot in every.items() if slot.persistent}
    stored = contents.stored_names(
        {
            fqn: (slot.names, tuple(slot.tensor.shape), dtype_name(slot.tensor.dtype))
            for fqn, slot in kept.items()
        }
    )
    held = {fqn: Holding(HoldingKind.WEIGHT, name) for fqn, name in stored.items()}
    for fqn, slot in every.items():
        for name in () if slot.persistent else slot.names:
            if (hidden := Holding(HoldingKind.BUFFER, name)) in contents:
                held.setdefault(fqn, hidden)
    values = {fqn: contents.tensor(one, every[fqn].tensor) for fqn, one in held.items()}
    load = None
    if isinstance(optimizer, Sequence):
        optimizer = Optimizers(optimizer)
    if optimizer is not None:
        tensors = {fqn: slot.tensor for fqn, slot in kept.items()}
        load = optimizer_loading(contents, optimizer, tensors, stored)
    extra = contents.extra_states()
    with torch.no_grad():
        for fqn, value in values.items():
            every[fqn].tensor.copy_(value)
    set_extra_states(model, extra)
    if load is not None:
        load()
    return contents.position


def optimizer_loading(
    contents: Contents,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, str],
    made: Sequence[NamedGroup] = (),
    own: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda name, values: values,
) -> Callable[[], None]:
    """Read the optimizer's state of a checkpoint; returns what gives it to an optimizer.

    Args:
        tensors: of the model, by name; `stored`: the name of each in the checkpoint.
        made: the groups of all ranks' optimizers.
        own: what this process keeps of the state of a parameter.

    Raises:
        CheckpointError: it does not fit the optimizer.
    """
    without = (
        "; or load weights and position alone, with pipe.load(folder, optimizer=False), or weights "
        f"alone, with weights='{contents.place}' (--weights, without --resume)"
    )
    if not contents.manifest.optimizer:
        raise CheckpointError(
            f"the checkpoint has the state of no optimizer, and this one is "
            f"{type(optimizer).__name__}",
            where=str(contents.place),
            remedy="make the optimizer that it was saved with" + without,
        )
    names = names_of(tensors)
    known: dict[str, list[str]] = {}
    for fqn, one in stored.items():
        known.setdefault(one, []).append(fqn)
    groups = [
        one._replace(names=tuple(name for old in one.names for name in known.get(old, ())))
        for one in contents.groups()
    ]
    mine = (names.get(id(p)) for group in optimizer.param_groups for p in group["params"])
    read = {name: contents.optimizer_state(stored[name]) for name in mine if name is not None}
    state = {name: own(name, values) for name, values in read.items() if values}
    try:
        return named_loading(optimizer, names, groups, state, made)
    except InputError as error:
        where = f"{contents.place}: {error.where}"
        remedy = f"{error.remedy}{without}"
        raise CheckpointError(error.message, where=where, remedy=remedy) from error
