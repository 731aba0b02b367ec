"""Device of a rank as the runtime asks it, with the answers of the CPU, which cost nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from pdcompile.hardware import devices
from pdcompile.runtime.device.fetched import Fetched


class DeviceMemory(NamedTuple):
    """Bytes: the most that tensors had, the most that torch has reserved for them, what any
    process could still have, and all there is.

    What is neither free nor reserved is context, libraries, communicators and other processes.
    """

    peak: int
    reserved: int
    free: int
    total: int


class Landing:
    """Memory in which a message arrives; `beside`: the host's, on its way to the device."""

    beside = False

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def arrived(self) -> None:
        """The message is there: what is computed from now on finds it on the device."""


class RankDevice:
    """The device of a process: the CPU, where what is computed is there when a call returns."""

    device = devices.HOST
    queued = False  # work is queued, and is not done when a call returns

    def computing(self) -> AbstractContextManager[None]:
        """Context of a program: runs it between what the user has queued and will queue."""
        return nullcontext()

    def making(self) -> AbstractContextManager[object]:
        """Context of a forward: tensors that it makes of nothing are on the device."""
        return nullcontext()

    def on_host(self, tensor: Tensor) -> bool:
        """True if the host may read the tensor now."""
        return True

    def empty(self, num_bytes: int) -> Tensor:
        """Memory on the device."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def place(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; what is computed from now on finds it there."""
        return tensor

    def fetch(self, tensor: Tensor) -> Fetched:
        """The tensor in host memory, as soon as it has been computed."""
        return Fetched(tensor)

    def landing(self, target: Tensor) -> Landing:
        """Landing for a message into memory, of device or host, that is free from now on."""
        return Landing(target)

    def memory(self) -> DeviceMemory | None:
        """Use of the device's memory; None on the CPU."""
        return None

    def drain(self) -> None:
        """Wait for what is queued."""

    def abandon(self) -> None:
        """Begin nothing that still waits for the device."""
