"""Processes: who we are under torchrun, and the process group of a pipeline.

Nothing here is about training.  A pipeline has a group of its own, so that its messages never
meet those of the user's program or of another pipeline.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pdcompile.errors import LaunchError, RankError
from pdcompile.options import Options

_pipelines = 0  # worlds connected in this process, to name their keys
_default_users: set[int] = set()  # those that need the default group that we initialised


@dataclass(frozen=True)
class World:
    """The processes of one pipeline.  `rank` counts inside `group`."""

    rank: int
    size: int
    group: dist.ProcessGroup
    store: Any
    number: int

    def close(self) -> None:
        """Destroy the pipeline's group, and the default one if it was made for pipelines only."""
        dist.destroy_process_group(self.group)
        self.leave()

    def leave(self) -> None:
        """Give up the default group without touching the pipeline's own."""
        if self.number in _default_users:
            _default_users.discard(self.number)
            if not _default_users and dist.is_initialized():
                dist.destroy_process_group()


def is_distributed(options: Options) -> bool:
    """Whether compile is to use several processes: under torchrun, unless the cluster says no."""
    if getattr(options.cluster, "in_process", False):
        return False
    if options.group is not None or dist.is_initialized():
        return int(_parent(options).size()) > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def num_ranks(options: Options) -> int | None:
    """The number of processes to plan for; None in one process."""
    if not is_distributed(options):
        return None
    initialise()
    return int(_parent(options).size())


def initialise() -> bool:
    """Set up the default group from torchrun's environment; False if there is one already.

    Raises LaunchError when a variable of torchrun's is missing, or the group does not come up.
    """
    if dist.is_initialized():
        return False
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not os.environ.get(name)
    ]
    if missing:
        raise LaunchError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
            remedy="start the program with: torchrun --nproc-per-node=N program.py",
        )
    try:
        dist.init_process_group("gloo")
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} cannot join the others at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: "
            f"{str(error).splitlines()[0]}",
            remedy="start all ranks with one torchrun, and give it a free --master-port",
        ) from None
    return True


def connect(options: Options) -> World:
    """Make the group of one pipeline; every rank of it calls this at the same point."""
    global _pipelines
    ours = initialise()
    parent = _parent(options)
    number = _pipelines = _pipelines + 1
    if ours or _default_users:
        _default_users.add(number)
    ranks = dist.get_process_group_ranks(parent)
    group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    if not isinstance(group, dist.ProcessGroup):
        raise LaunchError(f"this process is not in the group of ranks {ranks}")
    name = "-".join(map(str, ranks)) if len(ranks) < dist.get_world_size() else "all"
    store = torch.distributed.distributed_c10d.PrefixStore(
        f"pdcompile/{name}/{number}", dist.distributed_c10d._get_default_store()
    )
    return World(dist.get_rank(group), len(ranks), group, store, number)


def check_ranks(num_planned: int, world: World | None) -> None:
    """Raise LaunchError unless there are as many processes as the plan has ranks."""
    running = 1 if world is None else world.size
    if num_planned != running:
        raise LaunchError(
            f"the plan has {num_planned} ranks, and {running} "
            f"{'process is' if running == 1 else 'processes are'} running"
            + ("" if "RANK" in os.environ else " (RANK is not set)"),
            remedy=f"start it with torchrun --nproc-per-node={num_planned}, or plan for "
            f"{running}: stages={running}"
            + (f", or run all in one process: cluster=Cluster.local({num_planned})"
               if world is None else ""),
        )  # fmt: skip


def check_agreement(world: World, what: str) -> None:
    """Raise LaunchError unless `what` (plan, torch version) is the same text on every rank."""
    world.store.set(f"agreement/{world.rank}", what)
    for rank in range(world.size):
        theirs = world.store.get(f"agreement/{rank}").decode()
        if theirs != what:
            raise LaunchError(
                f"rank {rank} has {theirs}, rank {world.rank} has {what}",
                remedy="run the same program with the same packages on every rank",
            )


def from_rank0(options: Options, make: Callable[[], str]) -> str:
    """A text that rank 0 makes (a plan, a captured graph) and all ranks get.

    An error on rank 0 is raised there as it is, and as RankError with its text elsewhere.
    """
    initialise()
    parent = _parent(options)
    rank = dist.get_rank(parent)
    failure: BaseException | None = None
    payload = b""
    if rank == 0:
        try:
            payload = b"+" + make().encode()
        except Exception as error:  # the others must not wait for ever
            failure = error
            payload = b"-" + f"{type(error).__name__}: {error}".encode()
    length = torch.tensor([len(payload)])
    dist.broadcast(length, group=parent, group_src=0)
    data = torch.empty(int(length), dtype=torch.uint8)
    if rank == 0:
        data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(data, group=parent, group_src=0)
    if failure is not None:
        raise failure
    text = data.numpy().tobytes()
    if text[:1] == b"-":
        raise RankError(f"rank 0 could not prepare the pipeline: {text[1:].decode()}")
    return text[1:].decode()


def _parent(options: Options) -> Any:
    return options.group if options.group is not None else dist.group.WORLD
