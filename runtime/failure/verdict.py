"""Verdicts: in which way a pipeline failed, and the exit code of a rank that ends with it."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import NamedTuple

import torch

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
    """Cause that the ranks agree on: `rank` failed first, as rank `by` found; `text` says how."""

    verdict: Verdict
    rank: int
    by: int
    text: str

    def packed(self) -> str:
        return json.dumps(self)

    @staticmethod
    def unpacked(text: str) -> FirstCause:
        verdict, rank, by, said = json.loads(text)
        return FirstCause(Verdict(verdict), rank, by, said)


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
