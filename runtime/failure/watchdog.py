"""Watchdog: a thread of each rank that sees when others fail, also while its rank waits in gloo.

It asks the store for the first cause, tells it what its own rank does (a beat), and watches the
beat of the next rank and the processes of its host.  Life and progress are two things: a rank whose
program waits for ever still beats.  What it may find:

* a process of this host ended without a word: a crash;
* no beat for `stall_timeout` while this rank waits: a stall (`progress_timeout` where it is of this
  host, and was not stopped: a call that holds Python's lock may end);
* all ranks wait, none begins another instruction for `progress_timeout`: a deadlock;
* the store is gone.

Slow is no failure: who waits long for a rank that computes prints a line.  A rank that waits when
there is a cause has half a second to notice by itself, which it does as connections break; then its
process is ended, as nothing else ends a wait inside of gloo.

torchrun sends SIGTERM a tenth of a second after the first rank has ended, which ends a process at
once, before it could say what it saw; so the watchdog takes it (`Termination`).  And torchrun
leaves its ranks running when it is killed itself (`end_with_launcher`).
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from pdcompile.runtime.failure.first_cause import NOBODY, Failures, FirstCause, Verdict
from pdcompile.runtime.failure.host_peers import HostPeers
from pdcompile.runtime.failure.instruction_log import Entry, decoded

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


TICK_SECONDS = 0.1
_BEAT_TICKS = 5
_NOTICE_SECONDS = 0.5
_SLOW_SECONDS = 60.0


class Watchdog(threading.Thread):
    """See the module.  `store` is a connection of its own; None for a time: never."""

    def __init__(
        self, store: Any, rank: int, size: int, peers: HostPeers,
        stall_timeout: float | None, progress_timeout: float | None,
    ) -> None:  # fmt: skip
        super().__init__(name="pdcompile watchdog", daemon=True)
        self._store, self._rank, self._size, self._peers = store, rank, size, peers
        self._stall, self._progress = stall_timeout, progress_timeout
        self._failures = Failures(store, rank, size, peers)
        self._termination = Termination()
        self._stopping = threading.Event()
        self._process = os.getpid()
        self._ended: set[int] = set()  # ranks of this host whose processes have
        self._next, self._age = "", 0.0  # beat of the next rank, the same for so many seconds
        self._slow = _SLOW_SECONDS
        self._ticks = self._beaten = 0  # ticks so far, and those before the last beat
        self._without_progress = False
        self._poll = select.poll()
        self._watched = {one.pidfd: peer for peer, one in peers.of_rank.items()}
        for fd in (*self._watched, self._termination.fd):
            if fd >= 0:
                self._poll.register(fd, select.POLLIN)

    def stand_down(self) -> None:
        """The main thread has noticed the failure, and reports it."""
        self._stopping.set()

    def stop(self) -> None:
        """End the thread, and wait for that: the interpreter may end next."""
        self._stopping.set()
        if os.getpid() == self._process and threading.current_thread() is not self:
            self.join()
            self._termination.restore()
            self._peers.close()

    def run(self) -> None:
        try:
            while not self._stopping.is_set() and not self._over():
                pass
        except RuntimeError as error:
            said = str(error).partition("\n")[0]
            self._stopping.wait(_NOTICE_SECONDS)
            if not self._stopping.is_set() and self._waiting() is not None:
                ends = [f"rank {r}: {o.how}; " for r, o in self._peers.of_rank.items() if o.how]
                text = f"rank {self._rank} {self._doing}; {''.join(ends)}{said}"
                self._die(Verdict.STORE_LOST, f"pdcompile: {Verdict.STORE_LOST}: {text}\n")
            self._termination.restore()

    def _over(self) -> bool:
        """One tick; whether it was the last."""
        for fd, _ in self._poll.poll(TICK_SECONDS * 1000):
            if fd == self._termination.fd:
                if self._termination.arrived():
                    self._terminate()
                    return True
            elif fd in self._watched:
                self._poll.unregister(fd)
                self._ended.add(self._watched[fd])
        if self._stopping.is_set():
            return True
        cause = self._failures.known()
        if cause is not None:
            self._end(cause)
            return True
        self._ticks += 1
        waiting = self._waiting()
        for peer in self._ended if waiting else ():
            self._report(peer)
        if self._beat_due(waiting):
            self._beat(waiting)
        return False

    @property
    def _doing(self) -> str:
        return self._peers.doing(self._rank)

    def _waiting(self) -> Entry | None:
        """Entry that this rank waits in, None where it computes or is in the user's program."""
        entry = self._peers.log.last()
        return entry if entry.waits else None

    # -- beats -------------------------------------------------------------------------------

    def _beat_due(self, waiting: Entry | None) -> bool:
        """Every `_BEAT_TICKS`; and once more as this rank has waited for too long, so that the
        last one in a deadlock finds it at once."""
        was, limit = self._without_progress, self._progress
        self._without_progress = (
            waiting is not None and limit is not None and time.monotonic() - waiting.seconds > limit
        )
        return self._ticks - self._beaten >= _BEAT_TICKS or self._without_progress > was

    def _beat(self, waiting: Entry | None) -> None:
        packed = self._peers.log.packed()
        since = time.monotonic() - decoded(packed).seconds
        self._store.set(f"beat/{self._rank}", json.dumps([self._ticks, since, packed.hex()]))
        if self._size == 1:
            return
        peer = (self._rank + 1) % self._size
        text = self._failures.said("beat", peer)
        # In ticks of its own: this process may have been stopped together with that one.
        passed = (self._ticks - self._beaten) * TICK_SECONDS
        self._age = self._age + passed if text == self._next else 0.0
        self._next = text
        self._beaten = self._ticks
        if waiting is None:
            return
        # A process of this host that was not stopped is alive, and slow.
        here = self._peers.of_rank.get(peer)
        limit = self._stall if here is None or here.stopped else self._progress
        if limit is not None and self._age > limit:
            self._stalled(peer)
        elif since > min(self._slow, self._progress or self._slow):
            self._look_around(since)

    def _stalled(self, peer: int) -> None:
        if self._failures.said("left", peer):
            return
        here = self._peers.of_rank.get(peer)
        why = "it was stopped, or its host or network is gone"
        if here is not None:
            why = "a call holds Python's lock, or the system does not let it run"
            why = "it was stopped, as SIGSTOP does" if here.stopped else why
        text = f"rank {peer} gives no sign of life for {self._age:.0f} s: {why}"
        self._failures.report(text, Verdict.STALL, peer)

    def _look_around(self, since: float) -> None:
        """Long without progress here: is it a deadlock, or is somebody slow?"""
        found: dict[int, tuple[float, Entry]] = {}
        for rank in range(self._size):
            said = self._failures.said("beat", rank)
            if not said:
                return
            _, theirs, packed = json.loads(said)
            found[rank] = theirs, decoded(bytes.fromhex(packed))
        busy = {rank: one for rank, one in found.items() if not one[1].waits}
        if not busy and self._progress is not None:
            least = min(theirs for theirs, _ in found.values())
            if least > self._progress:
                waits = "; ".join(f"rank {rank} in {found[rank][1]}" for rank in sorted(found))
                text = f"all ranks wait, and none has gone on for {self._progress:.0f} s: {waits}"
                self._failures.report(text, Verdict.DEADLOCK, NOBODY)
        elif busy and since > self._slow:
            self._slow = 2 * since
            rank, (theirs, entry) = max(busy.items(), key=lambda one: one[1][0])
            line = f"pdcompile: rank {self._rank} {self._doing}; rank {rank} is in {entry}"
            sys.stderr.write(f"{line}, for {theirs:.0f} s\n")

    # -- the end -----------------------------------------------------------------------------

    def _report(self, peer: int) -> None:
        """The process of a rank of this host has ended: a failure unless it said that it would."""
        if not self._failures.said("left", peer):
            self._failures.of_ended(peer, f"rank {self._rank}, which {self._doing}")

    def _end(self, cause: FirstCause) -> None:
        """There is a cause.  A rank that cannot notice it, inside of gloo, is ended."""
        here = self._peers.of_rank.get(cause.rank)
        if here is not None and cause.verdict is Verdict.STALL:
            here.kill()  # torchrun's SIGTERM would wait for it to go on
        self._failures.tell()
        self._stopping.wait(_NOTICE_SECONDS)
        while not self._stopping.is_set():
            entry = self._waiting()
            if entry is not None and time.monotonic() - entry.seconds > _NOTICE_SECONDS:
                self._failures.conclude()
                self._die(cause.verdict)
            if self._termination.fd >= 0 and self._termination.arrived():
                self._terminate()
            self._stopping.wait(TICK_SECONDS)

    def _terminate(self) -> None:
        """SIGTERM: end, but say first for what, if another rank has failed."""
        deadline = time.monotonic() + _NOTICE_SECONDS
        try:
            while self._failures.known() is None and time.monotonic() < deadline:
                for peer, one in self._peers.of_rank.items():
                    if one.how and "SIGTERM" not in one.how:
                        self._report(peer)
                time.sleep(TICK_SECONDS / 10)
            self._failures.conclude()
        finally:
            end_by_sigterm()

    def _die(self, verdict: Verdict, text: str = "") -> None:
        os.write(2, text.encode())
        os._exit(verdict.exit_code)
