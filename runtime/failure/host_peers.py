"""The ranks of one host: what each does, and how its process ends, without asking it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pdcompile.runtime.failure.instruction_log import InstructionLog
from pdcompile.runtime.failure.peer_exit_status import exit_status, same_machine, stopped
from pdcompile.schedule import Instruction

_SHOWN = 5  # instructions of the rank that failed


class HostRank(NamedTuple):
    """Another rank of this host: its process, its log, and a file that is readable at its end."""

    identity: str
    log: InstructionLog
    pidfd: int

    @property
    def how(self) -> str:
        """End of its process, in words; "" where the system does not tell any more."""
        return exit_status(self.identity, wait=False)

    @property
    def stopped(self) -> bool:
        """True if somebody stopped its process, as SIGSTOP does."""
        return stopped(self.identity)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


class HostPeers:
    """The log of this rank, and the other ranks of its host (none where the system cannot say).

    All ranks make theirs at the same point, after their `PipelineExit`.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.log = InstructionLog()
        self._killed = _killed_for_memory()
        self.of_rank: dict[int, HostRank] = {}
        store.set(f"log/{rank}", str(self.log.path))
        here = {rank: self.log.path}
        for peer in range(size):
            theirs = str(store.get(f"process/{peer}"), "utf-8")
            if peer == rank or not theirs or not same_machine(theirs):
                continue
            here[peer] = Path(str(store.get(f"log/{peer}"), "utf-8"))
            with suppress(OSError, AttributeError):  # it has ended; a system without pidfd_open
                pidfd = os.pidfd_open(int(theirs.split(" ")[2]))
                self.of_rank[peer] = HostRank(theirs, InstructionLog(here[peer]), pidfd)
        self.first = min(here)  # of this host
        # The last one of the host that has opened all: nobody needs the names any more.
        if store.add(f"logs/{self.first}", 1) == len(here):
            for path in here.values():
                path.unlink(missing_ok=True)

    def doing(self, rank: int) -> str:
        """Present work of a rank of this host, or its last when its process has ended, in words."""
        entry = self._log_of(rank).last()
        seconds = time.monotonic() - entry.seconds
        if not entry.waits:
            return f"was in {entry}, for {seconds:.2f} s"
        whom = f"for rank {entry.awaited}" if entry.awaited >= 0 else "for others"
        return f"waited {seconds:.2f} s {whom} in {entry}"

    def before(self, rank: int) -> list[str]:
        """The last instructions of a rank of this host before that, the oldest first."""
        entries = self._log_of(rank).before()
        shown = [one for one in entries if isinstance(one.doing, Instruction)][-_SHOWN:]
        return [f"{time.monotonic() - one.seconds:.3f} s ago: {one}" for one in shown]

    def _log_of(self, rank: int) -> InstructionLog:
        return self.of_rank[rank].log if rank in self.of_rank else self.log

    def memory_ran_out(self) -> bool:
        """True if the system has killed processes for memory since the pipeline was made."""
        return _killed_for_memory() > self._killed

    def close(self) -> None:
        """Let go of the other processes, and of this log's name if it still has one."""
        self.log.path.unlink(missing_ok=True)
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
