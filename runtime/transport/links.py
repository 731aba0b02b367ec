"""Links: how bytes get to other ranks, over torch.distributed.

What ranks tell each other has two halves.  Control (which call this is, headers, losses, what is
brought together between calls, failures) goes over one gloo group with a tag a channel.  Data
(`DATA`: values, gradients, sums, weights) goes the same way, or in device order: without tags, as
NCCL has none, over one group a pair of ranks that have something to send each other, one operation
after the other.  NCCL needs that; over gloo it is tested on machines without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from pdcompile.releases.torch_internals import profiler_records, record_functions
from pdcompile.runtime.device import DeviceFailed, Fetched, Handle
from pdcompile.runtime.transport import device_groups
from pdcompile.schedule.instruction import TRANSFERS
from pdcompile.schedule.spec import PipelineSpec, hops


class PeerLost(RuntimeError):
    """The connection to a rank broke: it died, or it closed because of an error somewhere."""

    def __init__(self, peer: int, text: str) -> None:
        # gloo: "[its own source file] what happened [address]. advice"
        said = text.splitlines()[0].partition(". ")[0].rpartition("] ")[2]
        super().__init__(f"lost the connection to rank {peer}: {said}")
        self.peer = peer


def lost(peer: int, text: str) -> PeerLost | DeviceFailed:
    """Error of a message or sum: of this device, or of the connection to a peer."""
    for line in text.splitlines():
        if "CUDA error" in line or "Cuda failure" in line:  # the latter is NCCL's last line
            return DeviceFailed(
                f"what was queued on the device failed: {line}",
                remedy="CUDA_LAUNCH_BLOCKING=1 names the op that did",
            )
    return PeerLost(peer, text)


class Working(Handle):
    """Work of a group, and its memory, which is the group's until `wait`.

    No other place holds the Work, and no frame does while an error passes: connections close
    only when the last Work is gone, and a traceback may live long.
    """

    def __init__(self, flat: Fetched, peer: int, begin: Callable[..., Any], *what: Any) -> None:
        """`peer`: the rank that is asked about a broken connection; `begin` takes `what`, and
        returns the Work."""
        self._flat: Fetched | None = flat
        self._peer = peer
        self._work: Any = None
        try:
            self._work = flat.then(begin, *what)
            return
        except RuntimeError as error:
            text = str(error)
        del what
        raise lost(peer, text)

    def wait(self) -> Tensor:
        try:
            self._work.wait()
        except RuntimeError as error:
            text = str(error)
        else:
            flat, self._flat, self._work = self._flat, None, None
            assert flat is not None, "nobody waits twice"
            return flat.tensor
        self._work = None
        raise lost(self._peer, text)


class Places:
    """Processes of the ranks: one for each part of a rank's stages.

    Each part has messages from the part of the same number; from the last one of a rank that has
    fewer.  Values that cross between unlike numbers of parts are whole, the same on all of them.
    """

    def __init__(self, processes: Sequence[Sequence[int]] = (), part: int = 0) -> None:
        """`processes`: by rank; none: ranks are processes.  `part`: of this process."""
        self._processes, self._part = processes, part

    def source(self, rank: int) -> int:
        """The process of a rank that this one receives from."""
        if not self._processes:
            return rank
        there = self._processes[rank]
        return there[min(self._part, len(there) - 1)]

    def targets(self, own: int, rank: int) -> Sequence[int]:
        """The processes of a rank that this one, of rank `own`, sends to."""
        if not self._processes:
            return (rank,)
        last = len(self._processes[own]) - 1
        return [p for i, p in enumerate(self._processes[rank]) if min(i, last) == self._part]


class _Sent(Handle):
    """A message to several processes."""

    def __init__(self, each: Sequence[Handle]) -> None:
        self._each = each

    def wait(self) -> Tensor:
        tensor, *_ = [one.wait() for one in self._each]
        self._each = ()
        return tensor


class Link:
    """Way of the messages of one half, over groups that are used for nothing else.

    Messages of a channel come in their order; over a group without tags they meet in the order in
    which both ends begin them, in whatever direction they go.
    """

    def __init__(
        self, groups: Mapping[int, Any], process: int | None = None, *, direct: bool = False
    ) -> None:
        """`groups`: by the process at the other end; the lower one of it and `process` is rank 0
        there.  `process` None: all are one group of all, with tags.  `direct`: they are NCCL's, and
        messages go from and into memory of the device."""
        self._groups, self._process, self.direct = groups, process, direct

    def start(self, flat: Fetched, tag: int, processes: Sequence[int]) -> Handle:
        """Begin a message of a channel to each of some processes; what is on its way to the memory
        is sent when it has come."""
        if len(processes) == 1:
            return self.begin(flat, tag, processes[0], sending=True)
        return _Sent([self.begin(flat, tag, one, sending=True) for one in processes])

    def begin(self, flat: Fetched, tag: int, peer: int, *, sending: bool) -> Working:
        """Begin a message to a process, or to receive one from it into this memory."""
        group, other = self._groups[peer], peer
        if self._process is not None:
            other, tag = int(peer > self._process), 0
        post = group.send if sending else group.recv
        try:
            return Working(flat, peer, unrecorded, post, flat.tensor, other, tag)
        finally:
            del group, post  # see Working

    def abandon(self) -> None:
        """Let go of the groups, so that connections can close."""
        groups = [*self._groups.values()] if self.direct else []
        self._groups = {}
        device_groups.end_all([group.abort for group in groups])


def pairs(spec: PipelineSpec, *others: PipelineSpec) -> list[tuple[int, int]]:
    """The ranks that have data to send each other, the lower one first, in one order for all.

    `others`: of programs over other edges.
    """
    found = set()
    for one in (spec, *others):
        for stage, ranks in enumerate(one.ranks):
            for replica, rank in enumerate(ranks):
                found |= {tuple(sorted((rank, peer))) for peer in _peers(one, stage, replica)}
    return sorted((a, b) for a, b in found if a != b)


def _peers(spec: PipelineSpec, stage: int, replica: int) -> Iterable[int]:
    """Ranks that a replica sends to; who receives sends there or is sent to."""
    turns = len(spec.turns(stage))
    for hop in (hop for moment in hops(spec, stage, replica) for hop in moment):
        assert hop.kind in TRANSFERS
        if hop.peer >= 0:
            yield hop.peer
            continue
        # The turns of the two stages repeat after as many as both counts divide.
        for turn in spec.share(stage, replica, turns * len(spec.turns(hop.stage))):
            yield spec.rank(hop.stage, turn)


def unrecorded(begin: Callable[..., Any], flat: Tensor, *where: Any) -> Any:
    """Begin a message or sum, and return its Work; torch's profiler does not hear of it.

    What it hears of the begin it wants to hear of the end too, which may come in a later call, when
    the profiler is gone: torch then writes into memory that was freed.
    """
    records = profiler_records()
    if records:
        record_functions(False)
    try:
        return begin([flat], *where)
    finally:
        del begin  # see Working
        if records:
            record_functions(True)
