"""Saving and loading in mid-stream: the model's state and the optimizer's are of one moment."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from pdcompile.checkpoint.named_optimizer import refuse_other_part
from pdcompile.warn import warn


class FlushFirst:
    """A hook before state_dict and load_state_dict: every update is done when they begin.

    In copies of what it hooks, pickled ones too, it does nothing.  `alone`: all stages are in this
    process; otherwise the model has this rank's part only, and flushing takes all ranks.
    """

    def __init__(self, pipe: Any = None, *, alone: bool = True) -> None:
        self._pipe = (lambda: None) if pipe is None else weakref.ref(pipe)
        self._alone = alone

    def __call__(self, *_: Any) -> None:
        pipe = self._pipe()
        if pipe is None or not pipe.unsettled:
            return
        if self._alone:
            pipe.flush()
        else:
            warn(
                "model.state_dict() while microbatches are in flight: this rank's part of the "
                "model is at another version than other ranks'; pipe.state_dict() and "
                "pipe.full_state_dict() are of one moment"
            )

    def __deepcopy__(self, memo: Any) -> FlushFirst:
        return FlushFirst()

    def __reduce__(self) -> tuple[Any, ...]:
        return (FlushFirst, ())


def flush_before_state(
    pipe: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, alone: bool
) -> list[Any]:
    """Hook the states of the model, of its modules and of the optimizer; returns the handles."""
    handles: list[Any] = []
    if optimizer is not None:
        first = FlushFirst(pipe)
        handles.append(optimizer.register_state_dict_pre_hook(first))
        handles.append(optimizer.register_load_state_dict_pre_hook(first))
        handles.append(optimizer.register_load_state_dict_pre_hook(refuse_other_part))
    first = FlushFirst(pipe, alone=alone)
    modules: list[Any] = list(model.modules())  # torch does not say what these calls return
    for module in modules:
        handles.append(module.register_state_dict_pre_hook(first))
        handles.append(module.register_load_state_dict_pre_hook(first))
    return handles
