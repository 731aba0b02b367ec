"""Processes: who we are under torchrun, and the connections of a pipeline.

Nothing here is about training.  A pipeline has connections of its own, so that its messages never
meet those of the user's program or of another pipeline, and closing them is its own affair.  They
are made without torch.distributed's default group and its registry of groups, whose names are
used again after a group was destroyed and then meet stale addresses in the store.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.rendezvous import rendezvous

from pdcompile.errors import LaunchError, RankError
from pdcompile.options import Options

_WAIT = timedelta(hours=24)  # rank 0 plans meanwhile; a dead rank is torchrun's to notice
_stores: list[Any] = []  # the store of this process, once it was needed
_numbers: Counter[str] = Counter()  # names used so far, in the same order on every rank


class World:
    """The processes of one pipeline, and their connections.  `rank` counts inside the group."""

    def __init__(self, rank: int, ranks: list[int]) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.store = _fresh_store("pipeline", ranks)
        self.group: Any = dist.ProcessGroupGloo(self.store, rank, self.size, timedelta(minutes=30))

    def close(self) -> None:
        """Close the connections: once no message holds on to them, peers stop waiting."""
        self.group = None
        gc.collect()


def is_distributed(options: Options) -> bool:
    """Whether compile is to use several processes: under torchrun, unless the cluster says no."""
    if getattr(options.cluster, "in_process", False):
        return False
    if options.group is not None or dist.is_initialized():
        return dist.get_world_size(options.group) > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def num_ranks(options: Options) -> int | None:
    """The number of processes to plan for; None in one process."""
    return len(_members(options)[1]) if is_distributed(options) else None


def connect(options: Options) -> World:
    """Connect the ranks of one pipeline; every one of them calls this at the same point.

    Raises LaunchError when a variable of torchrun's is missing, or the ranks do not meet.
    """
    rank, ranks = _members(options)
    try:
        return World(rank, ranks)
    except RuntimeError as error:
        raise LaunchError(
            f"rank {rank} of {len(ranks)} cannot connect to the others: "
            f"{str(error).splitlines()[0]}",
            remedy="start all ranks with one torchrun; behind several network interfaces, set "
            "GLOO_SOCKET_IFNAME to the one that joins the hosts",
        ) from None


def _members(options: Options) -> tuple[int, list[int]]:
    """This process's place in the group, and the ranks of the group."""
    if options.group is not None or dist.is_initialized():
        ranks = dist.get_process_group_ranks(options.group)
        return dist.get_rank(options.group), ranks
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
    return int(os.environ["RANK"]), list(range(int(os.environ["WORLD_SIZE"])))


def _fresh_store(purpose: str, ranks: list[int]) -> Any:
    """Keys that nobody has used: a second pipeline must not meet those of the first."""
    name = f"pdcompile/{purpose}/{'-'.join(map(str, ranks))}"
    _numbers[name] += 1
    return PrefixStore(f"{name}/{_numbers[name]}", _store())


def _store() -> Any:
    """The default group's store, or torchrun's; the user's default group is left alone."""
    if dist.is_initialized():
        return _get_default_store()
    if not _stores:
        try:
            _stores.append(next(iter(rendezvous("env://")))[0])
        except (RuntimeError, ValueError) as error:
            raise LaunchError(
                f"rank {os.environ['RANK']} cannot reach the store at "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: "
                f"{str(error).splitlines()[0]}",
                remedy="start all ranks with one torchrun, and give it a free --master-port",
            ) from None
    return _stores[0]


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
    rank, ranks = _members(options)
    store = _fresh_store("made", ranks)
    if rank == 0:
        try:
            text = make()
        except BaseException as error:  # the others must not wait for ever
            store.set("failure", f"{type(error).__name__}: {error}")
            store.set("done", "1")
            raise
        store.set("text", text)
        store.set("done", "1")
        return text
    store.wait(["done"], _WAIT)
    if store.check(["failure"]):
        cause = str(store.get("failure"), "utf-8")
        raise RankError(f"rank 0 could not prepare the pipeline: {cause}")
    return str(store.get("text"), "utf-8")
