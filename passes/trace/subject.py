"""Subject: the model to capture, the example call, and the state that calls leave behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pdcompile.batch import BatchLayout, FlatCall, resize
from pdcompile.eager.autocast import on_gpu
from pdcompile.errors import TraceError
from pdcompile.hardware import devices
from pdcompile.passes.trace.cached_tensors import CachedTensors
from pdcompile.passes.trace.global_state import GlobalState
from pdcompile.passes.trace.tape.module_table import ModuleTable
from pdcompile.releases.torch_internals import fake_gpus_have_gradients


@dataclass(frozen=True)
class CaptureCall:
    """The arguments of a capture (`passes.trace.capture`)."""

    model: nn.Module
    flat: FlatCall
    layout: BatchLayout
    loss_fn: Callable[..., Any] | None
    microbatch_size: int | None = None
    autocast: str | None = None
    evaluates: bool = False

    @property
    def size(self) -> int:
        """Samples of a microbatch."""
        return self.layout.size if self.microbatch_size is None else self.microbatch_size

    def call(self, size: int) -> FlatCall:
        """The example call with this many samples, or as it is where they cannot be told."""
        return resize(self.flat, self.layout, size) if self.layout.splits else self.flat


@dataclass(frozen=True)
class Subject(CaptureCall):
    """The data that all attempts at one capture share."""

    table: ModuleTable = field(init=False)
    cached_tensors: CachedTensors = field(default_factory=CachedTensors)
    global_state: GlobalState = field(init=False)
    proofs: dict[bool, Any] = field(default_factory=dict)  # mode -> `selections.Proof`

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", ModuleTable(self.model))
        object.__setattr__(self, "global_state", GlobalState(self.model, self.loss_fn))


def device_of(model: nn.Module, flat: FlatCall) -> torch.device:
    """The device that the model runs on: its inputs', else its parameters', else the CPU."""
    tensors = [leaf for leaf in flat.leaves.values() if isinstance(leaf, torch.Tensor)]
    for tensor in (*tensors, *model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return devices.HOST


def of_region(autocast: str | None, home: torch.device) -> torch.device:
    """The device on which a model is captured whose tensors are at `home`.

    In the region of a GPU that is one, wherever the model is: what is cast depends on that.

    Raises:
        TraceError: this torch has no fake tensors of a GPU.
    """
    if not (on_gpu(autocast) and devices.is_host(home)):
        return home
    if not fake_gpus_have_gradients():
        raise TraceError(
            f"a model on the CPU cannot be captured in the autocast region {autocast}: torch "
            f"{torch.__version__} does not record fake tensors of a GPU here",
            remedy="have model and minibatch on a GPU, or take torch built with CUDA; no GPU is "
            "needed for that",
        )
    return devices.FAKE_GPU
