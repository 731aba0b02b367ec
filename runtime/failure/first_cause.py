"""First cause of a failure: every rank raises it, and says what happened first and where.

The rank that fails writes its cause into the store (the first one wins) and closes its
connections, which ends the waiting of its peers; they read the cause.  A rank that vanished
without a word is named by whoever noticed, with what it or its system still said of its end.
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
import time
import traceback
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pdcompile
from pdcompile.errors import InputError, PdcompileError, RankError
from pdcompile.ir.graph import Capture
from pdcompile.ir.value_checks import failed_check
from pdcompile.runtime.failure.host_peers import HostPeers, exit_status
from pdcompile.runtime.failure.instruction_log import in_words
from pdcompile.runtime.transport.links import PeerLost
from pdcompile.schedule import Instruction

_FIRST_EXIT_CODE = 81  # 81 to 85: neither Python's, nor torchrun's, nor 128 and a signal


class Verdict(StrEnum):
    """Kind of failure of the first rank."""

    CRASH = "crash"  # an error, or the end of its process
    OUT_OF_MEMORY = "out of memory"
    STALL = "stall"  # its process gives no sign of life
    DEADLOCK = "deadlock"  # all ranks wait, and none can go on
    STORE_LOST = "store lost"

    @property
    def exit_code(self) -> int:
        """Exit code of a rank that cannot raise an error any more, as it waits inside of gloo."""
        return _FIRST_EXIT_CODE + list(Verdict).index(self)


NOBODY = -1  # the rank where it is not one of them


class FirstCause(NamedTuple):
    """Cause that the ranks agree on: `rank` failed first; `text` says how."""

    verdict: Verdict
    rank: int
    text: str

    @staticmethod
    def unpacked(text: str) -> FirstCause:
        verdict, *rest = json.loads(text)
        return FirstCause(Verdict(verdict), *rest)


def verdict_of(error: BaseException) -> Verdict:
    """Out of memory, or a crash.

    torch's CPU allocator raises a RuntimeError, which only its text tells from others.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Verdict.OUT_OF_MEMORY
    texts = "can't allocate memory", "not enough memory"
    if isinstance(error, RuntimeError) and any(text in str(error) for text in texts):
        return Verdict.OUT_OF_MEMORY
    return Verdict.CRASH


_LIBRARIES = tuple(  # what is below is not the program's own
    str(folder) + os.sep
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        *(Path(module.__file__ or "").parent for module in (torch, pdcompile)),
    )
)
_STAGE = re.compile(r"stage_\d+\.py(?=>?$)")  # the file of a stage, or its name in memory
_WAIT_FOR_PEERS_SECONDS = 3.0  # the store may live in the process that is about to end
_WAIT_FOR_HOSTS_SECONDS = 0.2


def describe(
    rank: int, error: BaseException, ins: Instruction | None, base: int, after: str = ""
) -> str:
    """Rank, stage, microbatch, line of the stage's source, error, line of the user's.

    `after`: what came before it.  All on the first line; further lines of the error follow, but
    for its remedy, which is said on the rank that has it.
    """
    said = str(error)
    if isinstance(error, PdcompileError):
        said = error.message + (f"\n  where: {error.where}" if error.where else "")
    text = f"{place(rank, error, ins, base)}: {type(error).__name__}: {said}".rstrip(": ")
    first, *more = text.split("\n")
    return "\n".join([first + ("" if ins is not None else _line_of(error)) + after, *more])


def _line_of(error: BaseException) -> str:
    """The innermost line of the program's own that raised it, if there is one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.line and not frame.filename.startswith(_LIBRARIES):
            return f" ({os.path.basename(frame.filename)}:{frame.lineno} `{frame.line}`)"
    return ""


def place(rank: int, error: BaseException, ins: Instruction | None, base: int) -> str:
    """Place of an error, as far as it is known."""
    parts = [f"rank {rank}", *([] if ins is None else [in_words(ins, base)])]
    for frame in _from_stage(error)[:1]:
        parts.append(f"{_STAGE.findall(frame.filename)[0]}:{frame.lineno} `{frame.line}`")
    return ", ".join(parts)


def _from_stage(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames from the innermost line of a stage's source on; none where there is no such."""
    frames = traceback.extract_tb(error.__traceback__)
    last = max((n for n, one in enumerate(frames) if _STAGE.search(one.filename)), default=None)
    return [] if last is None else frames[last:]


def raised_by_op(error: Exception) -> InputError | None:
    """The InputError for an error that an op of a stage raised on what it was given; None where it
    comes from Python of the user's own, or from elsewhere."""
    frames = _from_stage(error)
    if not frames or isinstance(error, MemoryError | torch.OutOfMemoryError | PdcompileError):
        return None
    if not all(frame.filename.startswith(_LIBRARIES) for frame in frames[1:]):
        return None
    where, *_ = getattr(error, "__notes__", None) or [f"in {place(0, error, None, 0)}"]
    return InputError(
        f"an op raised {type(error).__name__}: {error}",
        where=where.removeprefix("in "),
        remedy="mend this minibatch's inputs, or what the model computes from them",
    )


def explained(error: BaseException, capture: Capture) -> BaseException:
    """InputError in the place of an error that a check of the graph raised; others as they are."""
    refused = failed_check(error, (*capture.train.ops, *capture.eval.ops))
    return error if refused is None else refused.with_traceback(error.__traceback__)


class Failures:
    """The first cause, shared by the ranks of a pipeline through the store.

    `peers` are those of this host, None where nothing is known of them.
    """

    def __init__(self, store: Any, rank: int, size: int, peers: HostPeers | None = None) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._peers = peers

    def say(self, kind: str, text: str) -> None:
        """Say something of this rank, which peers may read as it ends.

        "raised": an error that nobody caught; "refused": a call, before anything was sent; "left":
        how its program ends, which is no failure then; "process": its identity.
        """
        with suppress(RuntimeError):  # the store has gone: so have those who would read it
            self._store.set(f"{kind}/{self._rank}", text)

    def report(self, text: str, verdict: Verdict = Verdict.CRASH, rank: int | None = None) -> None:
        """Record a cause, unless there is one: of this rank, or what it found of another."""
        cause = FirstCause(verdict, self._rank if rank is None else rank, text)
        with suppress(RuntimeError):  # must not hide the error that is being reported
            self._store.compare_set("failure", "", json.dumps(cause))

    def known(self) -> FirstCause | None:
        """The first cause, None as long as no rank has reported one."""
        if not self._store.check(["failure"]):
            return None
        return FirstCause.unpacked(str(self._store.get("failure"), "utf-8"))

    def wait_for_peers(self) -> None:
        """Stay until all others raise the cause or end too, or for a few seconds: torchrun ends
        them as soon as this rank has ended."""
        deadline = time.monotonic() + _WAIT_FOR_PEERS_SECONDS
        # Without the store there is nobody to wait for: the process that held it has ended.
        with suppress(RuntimeError):
            seen = self._store.add("seen", 1)
            while seen < self._size and time.monotonic() < deadline:
                time.sleep(0.01)
                seen = self._store.add("seen", 0)

    def seen(self) -> None:
        """This rank is about to raise the cause: the rank that failed may end."""
        with suppress(RuntimeError):
            self._store.add("seen", 1)

    def cause(self, lost: PeerLost, where: str) -> RankError:
        """The error to raise when the connection to a peer broke."""
        try:
            # No need to wait: whoever closes its connections has written its cause before.
            if self.known() is None:
                self.of_ended(lost.peer, f"{where}: {lost}", wait=True)
            found = self.known()
        except RuntimeError:  # the store went down with the process that held it
            found = None
        text = f"{where}: {lost}" if found is None else found.text
        return RankError(
            f"another rank failed first: {text}",
            remedy="look at that rank's own error; start all ranks anew",
        )

    def of_ended(self, peer: int, noticed: str, *, wait: bool = False) -> None:
        """Report a rank that is gone: what it said, or else what its system knows of its end.

        `noticed`: where this rank was.  With `wait` its process is given a second to end.
        """
        for kind in ("raised", "refused"):
            if said := self.said(kind, peer):
                return self.report(said, rank=peer)
        here = {} if self._peers is None else self._peers.of_rank
        if peer in here and "SIGTERM" in here[peer].how:  # torchrun has ended it, for another's end
            others = (rank for rank, one in here.items() if one.how and "SIGTERM" not in one.how)
            peer = next(others, peer)
        left = self.said("left", peer)
        # A program that ends takes its time, in which torchrun may end this one.
        process = self.said("process", peer)
        how = exit_status(process, wait=wait and not left)
        verdict = Verdict.CRASH
        if not left:
            how = how or "killed, out of memory, crashed, or it left early"
            left = f"rank {peer} ended without an error of its own"
            if self._peers is not None and self._peers.memory_ran_out():
                verdict = Verdict.OUT_OF_MEMORY
        return self.report(
            f"{left}" + (f" ({how})" if how else "") + f"; noticed by {noticed}", verdict, peer
        )

    def said(self, kind: str, peer: int) -> str:
        """Text that a rank wrote of itself (see `say`); "": none."""
        key = f"{kind}/{peer}"
        return str(self._store.get(key), "utf-8") if self._store.check([key]) else ""

    def tell(self) -> None:
        """Say what this rank does, for the reports of other hosts."""
        if self._peers is not None:
            self._store.set(f"did/{self._rank}", self._peers.doing(self._rank))

    def conclude(self) -> None:
        """Print the report of this host's ranks, unless one of them has; nothing raises.

        Other hosts' ranks are given a moment to say what they did.
        """
        if (peers := self._peers) is None:
            return
        with suppress(RuntimeError, OSError):
            self.tell()
            cause = self.known()
            if cause is None or self._store.add(f"reported/{peers.first}", 1) > 1:
                return
            os.write(2, self._report(cause, peers).encode())  # also while others hold sys.stderr

    def _report(self, cause: FirstCause, peers: HostPeers) -> str:
        whose = "" if cause.rank == NOBODY else f" of rank {cause.rank}"
        lines = [f"pdcompile: {cause.verdict}{whose}: {cause.text}"]
        deadline = time.monotonic() + _WAIT_FOR_HOSTS_SECONDS
        for rank in range(self._size):
            did = peers.doing(rank) if rank in (self._rank, *peers.of_rank) else ""
            while not did and time.monotonic() < deadline:
                did = self.said("did", rank)
                time.sleep(0 if did else 0.01)
            lines.append(f"  rank {rank} {did or 'did not say what it did'}")
            if rank == cause.rank and rank in (self._rank, *peers.of_rank):
                lines += [f"    {line}" for line in peers.before(rank)]
        return "\n".join(lines) + "\n"
