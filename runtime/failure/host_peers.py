"""The ranks of one host: what each does, and how its process ends, without asking it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pdcompile.runtime.failure.fate import fate, same_machine, stopped
from pdcompile.runtime.failure.instruction_log import InstructionLog


class HostRank(NamedTuple):
    """Another rank of this host: its process, its log, and a file that is readable at its end."""

    identity: str
    log: InstructionLog
    pidfd: int

    @property
    def how(self) -> str:
        """How its process ended, in words; "" where the system does not tell any more."""
        return fate(self.identity, wait=False)

    @property
    def stopped(self) -> bool:
        """Whether somebody stopped its process, as SIGSTOP does."""
        return stopped(self.identity)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


class HostPeers:
    """The log of this rank, and the other ranks of its host (none where the system cannot say).

    All ranks make theirs at the same point, after their `Ending`.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.log = InstructionLog()
        self._killed = _killed_for_memory()
        self.of_rank: dict[int, HostRank] = {}
        store.set(f"log/{rank}", str(self.log.path))
        paths = []
        for peer in range(size):
            theirs = str(store.get(f"process/{peer}"), "utf-8")
            if peer == rank or not theirs or not same_machine(theirs):
                continue
            paths.append(Path(str(store.get(f"log/{peer}"), "utf-8")))
            with suppress(OSError, AttributeError):  # it has ended; a system without pidfd_open
                pidfd = os.pidfd_open(int(theirs.split(" ")[2]))
                self.of_rank[peer] = HostRank(theirs, InstructionLog(paths[-1]), pidfd)
        self.first = min([rank, *self.of_rank]) if paths else rank
        # The last one of the host that has opened all: nobody needs the names any more.
        if store.add(f"logs/{self.first}", 1) == len(paths) + 1:
            for path in (*paths, self.log.path):
                path.unlink(missing_ok=True)

    def doing(self, rank: int) -> str:
        """What a rank of this host does, or did when its process ended; "" where none can say."""
        log = self.log if rank not in self.of_rank else self.of_rank[rank].log
        entry = log.last()
        if entry is None:
            return ""
        seconds = time.monotonic() - entry.seconds
        if not entry.waits:
            return f"was in {entry}, for {seconds:.2f} s"
        whom = f"for rank {entry.awaited}" if entry.awaited >= 0 else "for others"
        return f"waited {seconds:.2f} s {whom} in {entry}"

    def memory_ran_out(self) -> bool:
        """Whether the system has killed processes for memory since the pipeline was made."""
        return _killed_for_memory() > self._killed

    def close(self) -> None:
        """Let go of the other processes."""
        for one in self.of_rank.values():
            os.close(one.pidfd)
        self.of_rank.clear()


def _killed_for_memory() -> int:
    """So many processes, of the whole machine; 0 where the system does not count them."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
