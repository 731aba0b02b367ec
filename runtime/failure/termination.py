"""Termination: what torchrun does to a rank when another has failed, and when torchrun is gone.

torchrun sends SIGTERM a tenth of a second after the first rank has ended, which ends a process at
once, before it could say what it saw.  And it leaves its ranks running when it is killed itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

_SIGNAL_AT_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of prctl(2)


def end_with_launcher() -> None:
    """Let the system end this process when torchrun, which started it, is gone."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL)


def end_by_sigterm() -> None:
    """End this process as SIGTERM does where nobody handles it; in any thread."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
    os.kill(os.getpid(), signal.SIGTERM)


class Termination:
    """SIGTERM as bytes of a file, which a thread can read while the main thread waits in gloo.

    Only where the program has no handler of its own: `fd` is -1 otherwise, and a handler that it
    sets later has the signal for itself.  Whoever reads it ends the process (`end_by_sigterm`).
    """

    def __init__(self) -> None:
        self.fd = -1
        self._passed_on = False  # by a handler of the program's, which called the one before it
        self._process = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        reads, writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        if before != -1:  # an event loop of the program's
            signal.set_wakeup_fd(before)
            os.close(reads)
            os.close(writes)
            return
        self.fd, self._writes = reads, writes
        signal.signal(signal.SIGTERM, self._handle)
        os.register_at_fork(after_in_child=self._leave_in_child)

    def arrived(self) -> bool:
        """True if it is SIGTERM that made `fd` readable, and not another signal, or one that a
        handler of the program's takes."""
        return self._came() and self._is_ours()

    def _came(self) -> bool:
        with suppress(BlockingIOError):
            return signal.SIGTERM in os.read(self.fd, 4096)
        return False

    def _is_ours(self) -> bool:
        return self._passed_on or signal.getsignal(signal.SIGTERM) == self._handle

    def restore(self) -> None:
        """Let SIGTERM end the process again; one that came meanwhile does now."""
        if self.fd < 0 or os.getpid() != self._process:
            return
        ours = self._is_ours()
        if threading.current_thread() is not threading.main_thread():
            if ours:
                ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
        elif signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._came() and ours:
            end_by_sigterm()
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            os.close(self.fd)
            os.close(self._writes)
        self.fd = -1

    def _handle(self, number: int, frame: Any) -> None:
        if self.fd < 0 or os.getpid() != self._process:  # nobody reads it
            end_by_sigterm()
        elif signal.getsignal(signal.SIGTERM) != self._handle:
            self._passed_on = True
            os.write(self._writes, bytes([signal.SIGTERM]))

    def _leave_in_child(self) -> None:
        if self.fd >= 0 and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
