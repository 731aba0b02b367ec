"""Instruction log: the last instructions of a rank, in memory that outlives its process.

A process that is killed, aborts or stops cannot say where it was; the ranks of its host read it
here.  An entry is written as an instruction begins; the newest one is what the rank does now.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from pdcompile.schedule import Action, Instruction, Phase

KEPT = 32  # entries
_ENTRY = struct.Struct("<Qdhhiiiq")  # serial number first: a reader sees whether it is whole
_COUNT = struct.Struct("<Q")
_ACTIONS = tuple(Action)
_NUMBER = {action: number for number, action in enumerate(_ACTIONS)}


class Outside(StrEnum):
    """Work of a rank that is no instruction, in words; entries have numbers from -1 down for it."""

    PROGRAM = "the user's program"
    CALL = "a call, between its instructions"
    MEETING = "the beginning or end of a call"  # it waits for the other ranks
    PARTS = "a conversion between the parts of a stage"  # it waits for these


_OUTSIDE = tuple(Outside)


def number_in_words(minibatch: int) -> str:
    """A minibatch of training, or, counted from -1 downwards, an evaluation."""
    return f"minibatch {minibatch}" if minibatch >= 0 else f"evaluation {-1 - minibatch}"


def in_words(ins: Instruction, base: int = 0) -> str:
    """Stage, action, minibatch, microbatch and peer of an instruction."""
    parts = [f"stage {ins.stage}"] if ins.stage >= 0 else []
    parts.append(f"{ins.action.name.lower()} of {number_in_words(base + ins.minibatch)}")
    parts += [f"microbatch {ins.microbatch}"] if ins.microbatch >= 0 else []
    return ", ".join(parts)


class Entry(NamedTuple):
    """Work that a rank began at `seconds` on its host's clock."""

    serial: int
    seconds: float
    doing: Instruction | Outside

    @property
    def waits(self) -> bool:
        """True if it ends only when another rank has done its part."""
        if isinstance(self.doing, Outside):
            return self.doing in (Outside.MEETING, Outside.PARTS)
        return self.doing.action.phase in (Phase.WAIT_RECV, Phase.WAIT_SEND, Phase.WAIT)

    @property
    def awaited(self) -> int:
        """The rank that it waits for, -1 where that is none or any."""
        return self.doing.peer if isinstance(self.doing, Instruction) and self.waits else -1

    def __str__(self) -> str:
        return in_words(self.doing) if isinstance(self.doing, Instruction) else str(self.doing)


def decoded(packed: bytes) -> Entry:
    """The entry that `InstructionLog.packed` gave."""
    serial, seconds, number, stage, peer, edge, microbatch, minibatch = _ENTRY.unpack(packed)
    if number < 0:
        return Entry(serial, seconds, _OUTSIDE[-1 - number])
    ins = Instruction(_ACTIONS[number], stage, minibatch, microbatch, edge, peer)
    return Entry(serial, seconds, ins)


class InstructionLog:
    """The log of one rank: written by its own process, read by those of its host.

    A file in memory, mapped by all who use it.  It loses its name once others have opened it, so
    that nothing is left however the processes end.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Make one, or open another rank's.

        Raises:
            OSError: it cannot be made, or is gone.
        """
        size = _COUNT.size + KEPT * _ENTRY.size
        handle, self.path = _made(size) if path is None else (os.open(path, os.O_RDWR), path)
        self._map = mmap.mmap(handle, size)
        os.close(handle)
        self._serial = 0
        self.process_of: Callable[[int], int] = int  # peers of instructions are ranks
        self._now: tuple[int, ...] = ()
        if path is None:
            self.enter(Outside.CALL)  # the one that makes the pipeline

    def begin(self, ins: Instruction, base: int) -> None:
        """An instruction begins, of a program whose minibatch 0 is number `base`."""
        minibatch = base + ins.minibatch
        peer = ins.peer if ins.peer < 0 else self.process_of(ins.peer)
        self._write(_NUMBER[ins.action], ins.stage, peer, ins.edge, ins.microbatch, minibatch)

    def enter(self, where: Outside) -> None:
        """Note that something begins which is no instruction."""
        self._write(-1 - _OUTSIDE.index(where), -1, -1, -1, -1, -1)

    @contextmanager
    def meeting(self, where: Outside = Outside.MEETING) -> Iterator[None]:
        """Context of a wait for others, within what is noted; after an error it stays there."""
        now = self._now
        self.enter(where)
        yield
        self._write(*now)

    def _write(self, *entry: int) -> None:
        self._now = entry
        self._serial = serial = self._serial + 1
        at = _COUNT.size + serial % KEPT * _ENTRY.size
        _ENTRY.pack_into(self._map, at, serial, time.monotonic(), *entry)
        _COUNT.pack_into(self._map, 0, serial)

    def packed(self) -> bytes:
        """The newest entry as bytes."""
        while True:
            (serial,) = _COUNT.unpack_from(self._map)
            entry = self._at(serial)
            if _COUNT.unpack_from(entry)[0] == serial:
                return entry

    def last(self) -> Entry:
        """The newest entry."""
        return decoded(self.packed())

    def before(self) -> list[Entry]:
        """Entries before the newest one, as far as they are kept, the oldest first."""
        newest = self.last().serial
        kept = [decoded(self._at(n)) for n in range(max(newest - KEPT, 0) + 1, newest)]
        # One that is written meanwhile belongs to a rank that goes on.
        return [entry for entry in kept if entry.serial < newest]

    def _at(self, serial: int) -> bytes:
        at = _COUNT.size + serial % KEPT * _ENTRY.size
        return self._map[at : at + _ENTRY.size]


def _made(size: int) -> tuple[int, Path]:
    """A new file of that size, in memory where there is room: to write into a mapped file without
    room would end the process."""
    with suppress(OSError):
        handle, name = tempfile.mkstemp(prefix="pdcompile-", dir="/dev/shm")
        try:
            os.posix_fallocate(handle, 0, size)
        except OSError:
            os.close(handle)
            os.unlink(name)
        else:
            return handle, Path(name)
    handle, name = tempfile.mkstemp(prefix="pdcompile-")
    os.truncate(name, size)
    return handle, Path(name)
