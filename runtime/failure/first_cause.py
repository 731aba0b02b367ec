"""When a rank fails, every rank raises, and says what happened first and where.

The rank that fails writes its cause into the store (the first one wins) and closes its
connections, which ends the waiting of its peers; they read the cause.  A rank that vanished
without a word is named by whoever noticed, with what it or its system still said of its end.
"""

from __future__ import annotations

import os
import sysconfig
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import pdcompile
from pdcompile.errors import PdcompileError, RankError
from pdcompile.ir.graph import Capture
from pdcompile.ir.value_checks import failed_check
from pdcompile.runtime.failure.fate import fate
from pdcompile.runtime.transport.point_to_point import PeerLost
from pdcompile.schedule import Instruction

_LIBRARIES = tuple(  # what is below is not the program's own
    str(folder) + os.sep
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        *(Path(module.__file__ or "").parent for module in (torch, pdcompile)),
    )
)
_WAIT_FOR_PEERS_SECONDS = 3.0  # the store may live in the process that is about to end


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
    """Where it happened, as far as it is known."""
    parts = [f"rank {rank}"]
    if ins is not None:
        parts += [f"stage {ins.stage}"] if ins.stage >= 0 else []
        parts.append(f"{ins.action.name.lower()} of minibatch {base + ins.minibatch}")
        if ins.microbatch >= 0:
            parts.append(f"microbatch {ins.microbatch}")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "stage_" in frame.filename:
            file = "stage_" + frame.filename.rpartition("stage_")[2].rstrip(">")
            parts.append(f"{file}:{frame.lineno} `{frame.line}`")
            break
    return ", ".join(parts)


def explained(error: BaseException, capture: Capture) -> BaseException:
    """InputError in the place of an error that a check of the graph raised; others as they are."""
    refused = failed_check(error, (*capture.train.ops, *capture.eval.ops))
    return error if refused is None else refused.with_traceback(error.__traceback__)


class Failures:
    """The first cause, shared by the ranks of a pipeline through the store."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def refuse(self, text: str) -> None:
        """This rank refused a call before anything was sent; peers read it if it ends there."""
        with suppress(RuntimeError):
            self._store.set(f"refused/{self._rank}", text)

    def report(self, text: str) -> None:
        """Record a cause, unless there is one."""
        with suppress(RuntimeError):  # must not hide the error that is being reported
            self._store.compare_set("failure", "", text)

    def wait_for_peers(self) -> None:
        """Stay until all others have read the cause or end too, or for a few seconds."""
        deadline = time.monotonic() + _WAIT_FOR_PEERS_SECONDS
        # Without the store there is nobody to wait for: the process that held it has ended.
        with suppress(RuntimeError):
            seen = self._store.add("seen", 1)
            while seen < self._size and time.monotonic() < deadline:
                time.sleep(0.01)
                seen = self._store.add("seen", 0)

    def cause(self, lost: PeerLost, where: str) -> RankError:
        """The error to raise when the connection to a peer broke."""
        try:
            # No need to wait: whoever closes its connections has written its cause before.
            if not self._store.check(["failure"]):
                self.report(self._of_peer(lost, where))
            text = str(self._store.get("failure"), "utf-8")
            self._store.add("seen", 1)
        except RuntimeError:  # the store went down with the process that held it
            text = f"{where}: {lost}"
        return RankError(
            f"another rank failed first: {text}",
            remedy="look at that rank's own error; start all ranks anew",
        )

    def _of_peer(self, lost: PeerLost, where: str) -> str:
        """What is known of a rank that is gone and has not reported a cause."""
        for kind in ("raised", "refused"):
            if said := self._said(kind, lost.peer):
                return said
        left = self._said("left", lost.peer)
        # A program that ends takes its time, in which torchrun may end this one.
        how = fate(self._said("process", lost.peer), wait=not left)
        if not left:
            how = how or "killed, out of memory, crashed, or it left early"
            left = f"rank {lost.peer} ended without an error of its own"
        return f"{where}: {lost}; {left}" + (f" ({how})" if how else "")

    def _said(self, kind: str, peer: int) -> str:
        key = f"{kind}/{peer}"
        return str(self._store.get(key), "utf-8") if self._store.check([key]) else ""
