"""Devices of this host as torch has them: whatever names one of them, asks here."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pdcompile.cluster import GPU_KIND, HOST_KIND
from pdcompile.releases.torch_internals import queue_sleep

HOST = torch.device(HOST_KIND)
GPU = GPU_KIND
FAKE_GPU = torch.device(GPU_KIND, 0)  # of fake tensors, whether there is one or not


SHARE = "PDCOMPILE_SHARE_GPUS"  # 1: to try out with few GPUs what needs one for each process


def shares() -> bool:
    """True if the processes of this host share its GPUs."""
    return os.environ.get(SHARE, "") not in ("", "0")


def gpus() -> int:
    """Number of GPUs that torch finds; torch built for CPUs finds none.  Where they are shared, as
    many as there are processes."""
    found = torch.cuda.device_count()
    return max(found, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if found and shares() else found


def with_memory(device: torch.device) -> torch.device:
    """The device itself, and the host in place of a GPU where there is none."""
    return HOST if device.type == GPU and not torch.cuda.is_available() else device


def gpu(index: int) -> torch.device:
    """The GPU of that number, in turn where they are shared."""
    return torch.device(GPU, index % torch.cuda.device_count() if shares() else index)


def apart_for_nccl() -> None:
    """Prepare NCCL's first call: it refuses two ranks of one GPU, unless they say that they are on
    hosts of their own."""
    if shares():
        host = f"{os.uname().nodename} {os.environ.get('LOCAL_RANK', '0')}"
        os.environ.setdefault("NCCL_HOSTID", host)


def on_host(tensor: Tensor) -> bool:
    """True if its numbers are in the host's memory, where Python reads them without waiting."""
    return tensor.is_cpu


def to_host(tensor: Tensor) -> Tensor:
    """The tensor in the host's memory, itself where it is there; waits for the device."""
    return tensor if tensor.is_cpu else tensor.cpu()


def is_host(device: torch.device) -> bool:
    """True if it computes in the memory of the host."""
    return device.type == HOST.type


def of_process(number: int, processes: int) -> torch.device:
    """The GPU of a process of this host by its number, where each of the processes has one; else
    the CPU.  A GPU becomes torch's present one."""
    if not gpus() >= processes > 0:
        return HOST
    found = gpu(number)
    torch.cuda.set_device(found)
    return found


#: of torch.distributed, for tensors of either kind
BACKENDS = f"{HOST.type}:gloo,{GPU}:nccl"


def synchronize(device: torch.device) -> None:
    """Wait for what is queued on a GPU; on the CPU nothing is."""
    if not is_host(device):
        torch.cuda.synchronize(device)


def gpu_name(device: torch.device | str) -> str:
    """The name that its maker gives a GPU."""
    return torch.cuda.get_device_name(device)


def gpu_memory_bytes(device: torch.device) -> int:
    """All memory of a GPU."""
    return torch.cuda.get_device_properties(device).total_memory


def generator(device: torch.device) -> torch.Generator:
    """Generator that a GPU draws random numbers from, unless an op is given another one."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def timed_event() -> Any:
    """A place in what the present GPU has queued, which says when it came to that."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def of_kind(kind: str) -> torch.device:
    """Device of this host for a kind of a cluster: its present GPU, or else the CPU."""
    if kind == HOST_KIND or not gpus():
        return HOST
    known = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return gpu(torch.cuda.current_device() if known else 0)


def label(device: torch.device) -> str:
    """Name in measurements: that of its maker for a GPU."""
    return HOST.type if is_host(device) else gpu_name(device)


def making(device: torch.device) -> AbstractContextManager[object]:
    """Context in which what is made of nothing is made on a GPU; without effect for the CPU."""
    return nullcontext() if is_host(device) else device


def capability(device: torch.device) -> tuple[int, int]:
    """The generation of a GPU: (9, 0) is Hopper."""
    return torch.cuda.get_device_capability(device)


CYCLES_PER_SECOND = 2e9  # of the fastest GPUs; a slower one is occupied for longer


def occupy(seconds: float) -> None:
    """Keep the present GPU from what is queued next, for so long at least."""
    queue_sleep(int(seconds * CYCLES_PER_SECOND))


def pin(memory: Tensor) -> None:
    """Lets GPUs copy from memory of the host that nobody has pinned, until it goes."""
    cuda, at = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
    if int(cuda.cudaHostRegister(at, memory.nbytes, 1)) == 0:  # else copies wait for the host
        weakref.finalize(memory.untyped_storage(), cuda.cudaHostUnregister, at)


def hand_back(device: torch.device) -> None:
    """Give the memory of a GPU that nobody uses back to all of its processes."""
    if not is_host(device):
        gc.collect()
        torch.cuda.empty_cache()


def name_and_modes(device: torch.device) -> str:
    """A GPU's name, and the modes of torch that decide how long products take on it."""
    modes = [
        f"matmul {torch.backends.cuda.matmul.fp32_precision}",
        f"conv {torch.backends.cudnn.conv.fp32_precision}",  # type: ignore[attr-defined]
        *(["benchmark"] if torch.backends.cudnn.benchmark else ()),
    ]
    return f"{gpu_name(device)} ({', '.join(modes)})"


def passing_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Bytes that a GPU gives out while `run` runs and has back at its return, beside its result.

    The peak that torch tells of the GPU begins anew.
    """
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    found = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    del result
    return found
