"""Groups of ranks whose messages stay on GPUs, over NCCL.

What they do is queued: a call returns before it has begun, and `wait` lets the present stream wait
for it, not the host.  NCCL has no tags, so links use these groups in device order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from pdcompile.errors import LaunchError

END_SECONDS = 5.0  # of groups in which nothing is in flight, generously
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def connected(
    store: Any, rank: int, ranks: tuple[int, ...], device: torch.device, timeout: timedelta
) -> Any:
    """A communicator of these ranks; each of them calls this, and waits for the others.

    It is there when this returns: one that is made at its first message would let the host wait.

    Raises:
        LaunchError: NCCL cannot connect them.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    try:
        with _no_abort():
            group = dist.ProcessGroupNCCL(store, ranks.index(rank), len(ranks), options)
        group.eager_connect_single_device(device)
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
def _no_abort() -> Iterator[None]:
    """Around the making of a group: torch leaves its errors to us.

    torch would end the process when a peer is lost, before this rank has said why.
    """
    before = os.environ.get(_HANDLING)
    os.environ[_HANDLING] = "0"
    try:
        yield
    finally:
        del os.environ[_HANDLING]
        if before is not None:
            os.environ[_HANDLING] = before


def end_all(groups: Iterable[Callable[[], None]]) -> None:
    """End groups side by side; one that waits for others longer than `END_SECONDS` is left to its
    thread."""
    threads = [Thread(target=end, daemon=True) for end in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(END_SECONDS)
