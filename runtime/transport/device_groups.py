"""Groups of ranks whose messages stay on GPUs, over NCCL.

What they do is queued: a call returns before it has begun, and `wait` lets the present stream wait
for it, not the host.  NCCL has no tags, so links use these groups in device order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from pdcompile.errors import LaunchError
from pdcompile.hardware import devices

END_SECONDS = 1.0  # of groups in which nothing is in flight, generously
_ending: list[Thread] = []
#: torch would end the process when a peer or the device fails, before this rank has said why, and
#: warns that operations come one after the other, as they are to
SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}


def connected(
    store: Any, rank: int, ranks: tuple[int, ...], device: torch.device, timeout: timedelta
) -> Any:
    """A communicator of these ranks, and its connections; each of them calls this, and waits for
    the others.

    They are there when this returns: NCCL would make them at the first operation, and then the host
    would wait.

    Raises:
        LaunchError: NCCL cannot connect them.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    devices.apart_for_nccl()
    try:
        with _settings():
            group: Any = dist.ProcessGroupNCCL(store, ranks.index(rank), len(ranks), options)
        group.eager_connect_single_device(device)
        tensor = torch.zeros(1, device=device)  # for an operation of each sort that will come
        group.allreduce([tensor]).wait()
        if len(ranks) == 2:
            index, both = ranks.index(rank), (group.send, group.recv)
            for begin in both if index == 0 else both[::-1]:
                begin([tensor], 1 - index, 0).wait()
        devices.synchronize(tensor.device)
    except RuntimeError as error:
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise LaunchError(
            f"NCCL cannot connect the GPUs of ranks {', '.join(map(str, ranks))}: "
            f"{' '.join(said[-2:])}",
            remedy="NCCL_DEBUG=INFO says more; PDCOMPILE_TRANSPORT=tags goes through the memory of "
            "the hosts instead",
        ) from None
    return group


@contextmanager
def _settings() -> Iterator[None]:
    """Context of making a group: settings for torch where the user has said nothing."""
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update({name: value for name, value in SETTINGS.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]


def end_all(groups: Iterable[Callable[[], None]]) -> None:
    """Begin to end groups, side by side.

    Nobody waits for that yet: an end may wait for others, who do not go on before they see that
    this rank has closed its other connections.
    """

    def ended(end: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # of a device that failed, which has been told
            end()

    for end in groups:
        thread = Thread(target=ended, args=(end,), name="pdcompile ends a group", daemon=True)
        thread.start()
        _ending.append(thread)


def wait_for_ends() -> None:
    """Wait for what was begun; what takes longer than `END_SECONDS` is left to its thread."""
    until = time.monotonic() + END_SECONDS
    while _ending:
        _ending.pop().join(max(until - time.monotonic(), 0.0))
