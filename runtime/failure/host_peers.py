"""Ranks of one host: what each does, and how its process ends, without asking it.

Their system knows when a process cannot say any more how it ended.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pdcompile.runtime.failure.instruction_log import InstructionLog
from pdcompile.schedule import Instruction

_WHY: dict[int, str] = {
    signal.SIGKILL: "as the system does where memory runs out",
    signal.SIGSEGV: "a crash outside of Python",
    signal.SIGABRT: "a crash outside of Python",
    signal.SIGTERM: "as torchrun does when another rank has failed",
}
_SECONDS = 1.0  # a process closes its connections shortly before it has ended


def identity() -> str:
    """This process, for others on the same machine; "" where the system does not tell."""
    with suppress(OSError):
        return " ".join((*_machine(), str(os.getpid()), _status(os.getpid())[1]))
    return ""


def exit_status(of: str, *, wait: bool = True) -> str:
    """End of the process of that `identity`, in words; "" where that cannot be known.

    With `wait` one that still runs is given a second to end.
    """
    deadline = time.monotonic() + _SECONDS
    while (seen := _seen(of)) is not None and seen[0] not in "ZX":
        if not wait:
            return ""
        if time.monotonic() > deadline:
            return f"its process {of.split(' ')[2]} still runs"
        time.sleep(0.01)
    return "" if seen is None else _in_words(seen[1])


def same_machine(of: str) -> bool:
    """True if the process of that `identity` is on this machine, so that the system knows it."""
    with suppress(OSError):
        return tuple(of.split(" ")[:2]) == _machine()
    return False


def network() -> str:
    """This machine and its network interfaces; "" where the system does not tell."""
    with suppress(OSError):
        return f"{_machine()[0]} {os.readlink('/proc/self/ns/net')}"
    return ""


def _seen(of: str) -> tuple[str, int] | None:
    """State and exit status of the process of that `identity`, None where the system does not
    tell, or the number is another process's by now."""
    try:
        if not same_machine(of):
            return None
        pid, started = of.split(" ")[2:]
        state, start, code = _status(int(pid))
    except OSError:
        return None
    return (state, code) if start == started else None


def _machine() -> tuple[str, str]:
    """Names that processes share which see each other: the system's start, process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.readlink("/proc/self/ns/pid")


def _status(pid: int) -> tuple[str, str, int]:
    """State, time of its start and exit status of a process; see proc_pid_stat(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19], int(fields[49])


def _in_words(code: int) -> str:
    if not os.WIFSIGNALED(code):
        return f"its exit code is {os.WEXITSTATUS(code)}"
    number = os.WTERMSIG(code)
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    why = f", {_WHY[number]}" if number in _WHY else ""
    return f"it was ended by {name}{why}"


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
        """True if somebody stopped its process, as SIGSTOP and debuggers do."""
        seen = _seen(self.identity)
        return seen is not None and seen[0] in "Tt"

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
    """Number of processes of the machine that were; 0 where the system does not count them."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
