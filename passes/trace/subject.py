"""Subject: the model to capture, the example call, and the state that calls leave behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pdcompile.batch import BatchLayout, FlatCall, resize
from pdcompile.hardware import devices
from pdcompile.passes.trace.calls.caches import caches
from pdcompile.passes.trace.calls.memos import KeptTensors
from pdcompile.passes.trace.calls.outside import Outside
from pdcompile.passes.trace.tape.module_table import ModuleTable
from pdcompile.releases.known_results import KnownResults


@dataclass(frozen=True)
class Subject:
    """The data that all attempts at one capture share.

    Args:
        flat: one minibatch.
        layout: which dims of it follow the batch.
        loss_fn: (output, target) -> scalar; None when the model returns its loss.
        autocast: the region around model and loss_fn.
    """

    model: nn.Module
    flat: FlatCall
    layout: BatchLayout
    loss_fn: Callable[..., Any] | None
    autocast: str | None = None
    table: ModuleTable = field(init=False)
    kept_tensors: KeptTensors = field(default_factory=KeptTensors)
    outside: Outside = field(init=False)
    known_results: KnownResults = field(default_factory=KnownResults)
    caches: list[Any] = field(default_factory=caches)
    tried: dict[bool, Any] = field(default_factory=dict)  # mode -> `value_sizes.Tried`
    mixed: set[Any] = field(default_factory=set)  # branches whose mixtures were tried

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", ModuleTable(self.model))
        object.__setattr__(self, "outside", Outside(self.model))

    def call(self, size: int) -> FlatCall:
        """The example call with this many samples."""
        return resize(self.flat, self.layout, size)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the call by path."""
        return {p: t for p, t in self.flat.leaves.items() if isinstance(t, torch.Tensor)}


def device_of(model: nn.Module, flat: FlatCall) -> torch.device:
    """The device that the model runs on: its inputs', else its parameters', else the CPU."""
    tensors = [leaf for leaf in flat.leaves.values() if isinstance(leaf, torch.Tensor)]
    for tensor in (*tensors, *model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return devices.HOST
