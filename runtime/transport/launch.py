"""Processes: who we are under torchrun, and the connections of a pipeline.

Nothing here is about training.  A pipeline has connections of its own, so that its messages never
meet those of the user's program or of another pipeline, and closing them is its own affair.  They
are made without torch.distributed's default group and its registry of groups, whose names are
used again after a group was destroyed and then meet stale addresses in the store.
"""

from __future__ import annotations

import gc
import os
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pdcompile.errors import LaunchError, store_errors
from pdcompile.hardware import devices
from pdcompile.options import Options
from pdcompile.parts.shard import Division
from pdcompile.plan import Plan
from pdcompile.releases.torch_internals import default_store, gloo_options
from pdcompile.runtime.device import RankDevice
from pdcompile.runtime.failure.exit_hooks import PipelineExit
from pdcompile.runtime.failure.first_cause import Failures, Verdict, describe, verdict_of
from pdcompile.runtime.failure.host_peers import HostPeers, network
from pdcompile.runtime.failure.watchdog import Watchdog, end_with_launcher
from pdcompile.runtime.transport import device_groups
from pdcompile.runtime.transport.links import Places
from pdcompile.runtime.transport.parts_group import WAIT, JointGroup, PartsGroup
from pdcompile.runtime.transport.start_up import Seal, StartUp

Made = TypeVar("Made")
_TRANSPORT, _DEBUG = "PDCOMPILE_TRANSPORT", "PDCOMPILE_DEBUG"
_TIMEOUT = timedelta(minutes=30)
_stores: list[Any] = []  # the store of this process, once it was needed
_numbers: Counter[str] = Counter()  # names used so far, in the same order on every rank


class DataPath(StrEnum):
    """Way of data to other ranks (see `links`)."""

    TAGS = "tags"
    ORDERED = "ordered"
    NCCL = "nccl"


class World:
    """The processes of one pipeline, and their connections.

    `process` counts inside the group.  Where stages are divided, a rank is one process for each
    part, which follow each other: `processes` are those of each rank.  `beside`: the other parts of
    this process's stage, None where it is whole.
    """

    def __init__(self, start: StartUp, options: Options, plan: Plan, division: Division) -> None:
        self.path = data_path(plan, alone=False)
        self.direct = self.path is DataPath.NCCL  # from and into memory of the device
        self.process, self.size = start.rank, start.size
        self.processes = [plan.processes_of(rank) for rank in range(plan.num_columns)]
        self.rank = next(r for r, those in enumerate(self.processes) if start.rank in those)
        self.part = self.processes[self.rank].index(start.rank)
        self.places = Places(self.processes, self.part)
        self.sealed = debugs_messages()
        self.store = every = PrefixStore("connected", start.store)
        # Before anyone connects: one that leaves would disturb those that still do.
        agreed = {
            "the plan": plan.hash()[:16],
            "torch": torch.__version__,
            _DEBUG: "messages" if self.sealed else "not set",
            _TRANSPORT: str(self.path),
        }
        start.compare("agreement", agreed)
        mine = network()  # of the machine
        self._loopback = {*start.tell("network", mine)} == {mine} != {""}
        self.exit = PipelineExit(every, start.rank)
        self.peers = HostPeers(every, start.rank, start.size)
        self.peers.log.process_of = self.places.source
        self.watchdog = Watchdog(
            PrefixStore("connected", start.store.clone()), start.rank, start.size, self.peers,
            options.stall_timeout, options.progress_timeout,
        )  # fmt: skip
        self.exit.watchdog = self.watchdog
        self.failures = Failures(every, start.rank, start.size, self.peers)
        self.watchdog.start()
        start.over()
        following = (self.process + 1) % self.size
        self.joint = JointGroup(None, self.size, self.peers.log, following)
        self.beside: PartsGroup | None = None
        try:
            self.joint.group = self._connected(every, self.process, self.size)
            if len(those := self.processes[self.rank]) > 1:
                column = PrefixStore(f"stage/{self.rank}", every)
                group = self._connected(column, self.part, len(those))
                following = those[(self.part + 1) % len(those)]
                self.beside = PartsGroup(group, self.part, division, self.peers.log, following)
        except BaseException as error:
            self.leave(error)
            raise

    def alike(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The processes of this part of each of some ranks, which all have as many of them."""
        return tuple(self.processes[rank][self.part] for rank in ranks)

    def pairs(self, ranks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """The pairs of processes that send each other what these pairs of ranks do, the lower one
        first, in one order for all."""
        found = set()
        for pair in ranks:
            for own, rank in (pair, pair[::-1]):
                for part, process in enumerate(self.processes[own]):
                    targets = Places(self.processes, part).targets(own, rank)
                    found |= {(min(process, p), max(process, p)) for p in targets}
        return sorted(found)

    def connect_parts(self, device: RankDevice) -> None:
        """Let the parts of a stage exchange values between their devices."""
        if self.beside is not None and self.direct:
            self.beside.on_devices = self.subgroup("parts", self.processes[self.rank], device)

    def subgroup(self, name: str, processes: tuple[int, ...], device: RankDevice) -> Any:
        """Connections between some of the processes alone, for data; each of them calls this."""
        store = PrefixStore(f"{name}/{'/'.join(map(str, processes))}", self.store)
        if not (self.direct and device.queued):
            return self._connected(store, processes.index(self.process), len(processes))
        with self.peers.log.meeting():
            return device_groups.connected(store, self.process, processes, device.device, _TIMEOUT)

    def told(self, value: Any = None) -> list[Any]:
        """The values of all processes, which JSON takes; each of them makes the same calls, and may
        take its time."""
        self.joint.gather()
        return self.joint.tell(value)

    def _connected(self, store: Any, rank: int, size: int) -> Any:
        options = gloo_options()
        options._timeout = _TIMEOUT
        with self.peers.log.meeting():
            if self._loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
                device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
                options._devices = [device]  # no other host can reach it
                return dist.ProcessGroupGloo(store, rank, size, options)
            return dist.ProcessGroupGloo(store, rank, size, options._timeout)

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks that this one does not begin, and why."""
        self.fail(describe(self.process, error, None, 0), verdict_of(error))
        self.close()

    def fail(self, cause: str, verdict: Verdict) -> None:
        """Report an error of this rank."""
        self.watchdog.stand_down()
        self.failures.report(cause, verdict)
        self.failures.conclude()

    def disconnect(self) -> None:
        """Close the connections: once no message holds on to them, peers stop waiting."""
        if self.joint.group is not None:
            self.joint.abandon()
            if self.beside is not None:
                self.beside.abandon()
            gc.collect()

    def close(self) -> None:
        """Disconnect, wait for the end of groups, and stop watching."""
        self.exit.over()
        self.disconnect()
        device_groups.wait_for_ends()


def is_distributed(options: Options) -> bool:
    """True if compile is to use several processes: under torchrun, unless the cluster says no."""
    if getattr(options.cluster, "in_process", False):
        return False
    if options.group is not None or dist.is_initialized():
        return dist.get_world_size(options.group) > 1
    return "WORLD_SIZE" in os.environ and _number("WORLD_SIZE", least=1) > 1


def num_ranks(options: Options) -> int | None:
    """The number of processes to plan for; None in one process."""
    return len(_members(options)[1]) if is_distributed(options) else None


def start_up(options: Options) -> StartUp:
    """Meet the other ranks of a pipeline; every one of them calls this at the same point."""
    rank, ranks = _members(options)
    store = _fresh_store(ranks, options.progress_timeout)
    return StartUp(store, rank, len(ranks), options.progress_timeout)


def connect(start: StartUp, options: Options, plan: Plan, division: Division) -> World:
    """Connect the ranks of one pipeline; every one of them calls this at the same point.

    Raises:
        LaunchError: not as many processes as ranks, unlike ranks, a variable of torchrun's is
            missing, or the ranks do not meet.
    """
    if plan.num_processes != start.size:
        raise LaunchError(
            f"the plan has {plan.num_processes} ranks, and {start.size} processes are running",
            remedy=f"start it with torchrun --nproc-per-node={plan.num_processes}, or plan for "
            f"stages={start.size}",
        )
    try:
        return World(start, options, plan, division)
    except RuntimeError as error:
        raise LaunchError(
            f"rank {start.rank} of {start.size} cannot connect to the others: "
            f"{str(error).splitlines()[0]}",
            remedy="start all ranks with one torchrun; behind several network interfaces, set "
            "GLOO_SOCKET_IFNAME to the one that joins the hosts",
        ) from None


def _members(options: Options) -> tuple[int, list[int]]:
    """This process's place in the group, and the ranks of the group."""
    if options.group is not None or dist.is_initialized():
        ranks = dist.get_process_group_ranks(options.group)
        return dist.get_rank(options.group), ranks
    needed = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        raise LaunchError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
            remedy="start it with torchrun --nproc-per-node=N, or run all stages in one process: "
            "cluster=Cluster.local(N)",
        )
    rank, size = _number("RANK", least=0), _number("WORLD_SIZE", least=1)
    if rank >= size:
        raise LaunchError(
            f"RANK is {rank}, and WORLD_SIZE is {size}",
            remedy="ranks count from 0 to WORLD_SIZE - 1; torchrun sets both",
        )
    return rank, list(range(size))


def debugs_messages() -> bool:
    """True if every message is to be checked; raises LaunchError for another wish."""
    wanted = os.environ.get(_DEBUG, "")
    if wanted not in ("", "messages"):
        raise LaunchError(
            f"{_DEBUG} is {wanted!r}",
            remedy="'messages' checks every message; unset it for none",
        )
    return bool(wanted)


def data_path(plan: Plan, *, alone: bool) -> DataPath:
    """Way of data: as PDCOMPILE_TRANSPORT says, else over NCCL where each rank has a GPU.

    `alone`: all ranks are in this process, where nothing goes anywhere; the order counts.

    Raises:
        LaunchError: the variable has another value, or names NCCL where it cannot be.
    """
    wanted = os.environ.get(_TRANSPORT, "")
    if wanted not in ("", *DataPath):
        raise LaunchError(
            f"{_TRANSPORT} is {wanted!r}",
            remedy="'tags' over gloo, 'ordered' over gloo without tags, one message after the "
            "other, or 'nccl'; unset it for what fits the devices",
        )
    if wanted in (DataPath.TAGS, DataPath.ORDERED):
        return DataPath(wanted)
    if alone:
        return DataPath.TAGS
    lacking = "" if dist.is_nccl_available() else "this torch is built without NCCL"
    ranks = {rank for held in plan.ranks for rank in held}
    if hosts := sorted(rank for rank in ranks if plan.machines.devices[rank].on_host):
        lacking = f"the plan has CPUs on ranks {', '.join(map(str, hosts))}"
    if wanted and lacking:
        raise LaunchError(f"{_TRANSPORT} is {wanted!r}, and {lacking}", remedy="unset it")
    local = _number("LOCAL_WORLD_SIZE", least=1) if "LOCAL_WORLD_SIZE" in os.environ else 1
    shared = not wanted and devices.gpus() < local  # NCCL takes one rank a GPU
    return DataPath.TAGS if lacking or shared else DataPath.NCCL


def _number(name: str, *, least: int) -> int:
    text = os.environ[name]
    if not text.isdecimal() or int(text) < least:
        raise LaunchError(
            f"{name} is {text!r}, not a number from {least} up",
            remedy=f"start it with torchrun, which sets it, or unset {name}",
        )
    return int(text)


def _fresh_store(ranks: list[int], seconds: float | None) -> Any:
    """Keys that nobody has used: a second pipeline must not meet those of the first.

    Nor one that torchrun started again those before: it keeps the store, with the addresses and
    the cause of the round that failed.  Hosts count rounds apart, so only one host can name them.
    """
    attempt = ""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    name = f"pdcompile/{attempt}/{'-'.join(map(str, ranks))}"
    _numbers[name] += 1
    return PrefixStore(f"{name}/{_numbers[name]}", _store(seconds))


def _store(seconds: float | None) -> Any:
    """The default group's store, or torchrun's; the user's default group is left alone.

    Whoever has asked for it ends with torchrun, also while it waits for rank 0's plan.
    """
    end_with_launcher()
    if dist.is_initialized():
        return default_store()
    if not _stores:
        wait = WAIT if seconds is None else timedelta(seconds=seconds)
        with store_errors():
            _stores.append(next(iter(rendezvous("env://", timeout=wait)))[0])
        _stores[0].set_timeout(_TIMEOUT)
    return _stores[0]


def from_rank0(start: StartUp, make: Callable[[], Made]) -> Made:
    """Something that rank 0 makes and all ranks get, pickled and sealed (see `Seal`)."""
    store = start.store
    seal = Seal(store, start.rank, start.size, start.wait)
    if start.rank == 0:
        seal.check()
        made = make()
        store.set("made", seal.closed(pickle.dumps(made)))
        return made
    start.wait(["made"])
    with warnings.catch_warnings():
        # torch's own unpickling of a pytree spec warns of a name that torch deprecates.
        warnings.filterwarnings("ignore", message=".*treespec.*", category=FutureWarning)
        found: Made = pickle.loads(seal.opened(bytes(store.get("made"))))
    return found
