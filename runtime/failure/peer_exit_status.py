"""Exit status of another rank's process, in words: its system knows when the process cannot say."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_WHY: dict[int, str] = {
    signal.SIGKILL: "as the system does where memory runs out",
    signal.SIGSEGV: "a crash outside of Python",
    signal.SIGABRT: "a crash outside of Python",
    signal.SIGTERM: "as torchrun does when another rank has failed",
}
_SECONDS = 1.0  # a process closes its connections shortly before it has ended


def identity() -> str:
    """This process, for others on the same machine; "" where the system does not tell."""
    try:
        return " ".join((*_machine(), str(os.getpid()), _status(os.getpid())[1]))
    except OSError:
        return ""


def exit_status(of: str, *, wait: bool = True) -> str:
    """End of the process of that `identity`, in words; "" where that cannot be known.

    With `wait` one that still runs is given a second to end.
    """
    *machine, pid, started = of.split(" ") if of else ("", "", "")
    try:
        if tuple(machine) != _machine():
            return ""
        deadline = time.monotonic() + _SECONDS
        while True:
            state, start, code = _status(int(pid))
            if start != started:
                return ""  # the number is another process's by now
            if state in "ZX":
                return _in_words(code)
            if not wait:
                return ""
            if time.monotonic() > deadline:
                return f"its process {pid} still runs"
            time.sleep(0.01)
    except OSError:
        return ""


def same_machine(of: str) -> bool:
    """True if the process of that `identity` is on this machine, so that the system knows it."""
    try:
        return tuple(of.split(" ")[:2]) == _machine()
    except OSError:
        return False


def network() -> str:
    """This machine and its network interfaces; "" where the system does not tell."""
    try:
        return f"{_machine()[0]} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def stopped(of: str) -> bool:
    """True if somebody stopped the process of that `identity`, as SIGSTOP and debuggers do."""
    pid, started = of.split(" ")[2:]
    try:
        state, start, _ = _status(int(pid))
    except OSError:
        return False
    return start == started and state in "Tt"


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
