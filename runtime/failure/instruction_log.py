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
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pdcompile.schedule import Action, Instruction, Phase

KEPT = 64  # entries
_ENTRY = struct.Struct("<Qdhhiiiq")  # serial number first: a reader sees whether it is whole
_COUNT = struct.Struct("<Q")
_ACTIONS = tuple(Action)
_NUMBER = {action: number for number, action in enumerate(_ACTIONS)}
IN_PROGRAM, IN_CALL = -1, -2  # in place of an action: outside of the pipeline, or between two


def in_words(ins: Instruction, base: int = 0) -> str:
    """Stage, action, minibatch, microbatch and peer of an instruction."""
    parts = [f"stage {ins.stage}"] if ins.stage >= 0 else []
    parts.append(f"{ins.action.name.lower()} of minibatch {base + ins.minibatch}")
    parts += [f"microbatch {ins.microbatch}"] if ins.microbatch >= 0 else []
    return ", ".join(parts)


class Entry(NamedTuple):
    """What a rank began to do, at `seconds` on its host's clock.

    `ins` counts minibatches from the first on, and is None outside of instructions: `in_call`
    tells a call's own beginning and end from the user's program.
    """

    serial: int
    seconds: float
    ins: Instruction | None
    in_call: bool

    @property
    def waits(self) -> bool:
        """Whether it ends only when another rank has done its part."""
        if self.ins is None:
            return self.in_call
        return self.ins.action.phase in (Phase.WAIT_RECV, Phase.WAIT_SEND, Phase.WAIT)

    @property
    def awaited(self) -> int:
        """The rank that it waits for, -1 where that is none or any."""
        return self.ins.peer if self.ins is not None and self.waits else -1

    def __str__(self) -> str:
        if self.ins is not None:
            return in_words(self.ins)
        return "the beginning or end of a call" if self.in_call else "the user's program"


def decoded(packed: bytes) -> Entry:
    """The entry that `InstructionLog.packed` gave."""
    serial, seconds, number, stage, peer, edge, microbatch, minibatch = _ENTRY.unpack(packed)
    if number < 0:
        return Entry(serial, seconds, None, number == IN_CALL)
    ins = Instruction(_ACTIONS[number], stage, minibatch, microbatch, edge, peer)
    return Entry(serial, seconds, ins, in_call=True)


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
        if path is None:
            handle, path = _made(size)
        else:
            handle = os.open(path, os.O_RDWR)
        self.path = path
        self._map = mmap.mmap(handle, size)
        os.close(handle)
        self._serial = 0

    def begin(self, ins: Instruction, base: int) -> None:
        """An instruction begins, of a program whose minibatch 0 is number `base`."""
        minibatch = base + ins.minibatch
        self._write(_NUMBER[ins.action], ins.stage, ins.peer, ins.edge, ins.microbatch, minibatch)

    def enter(self, *, in_call: bool) -> None:
        """A call begins or goes on between two programs; or it ended, and the user's goes on."""
        self._write(IN_CALL if in_call else IN_PROGRAM, -1, -1, -1, -1, -1)

    def _write(self, *entry: int) -> None:
        self._serial = serial = self._serial + 1
        at = _COUNT.size + serial % KEPT * _ENTRY.size
        _ENTRY.pack_into(self._map, at, serial, time.monotonic(), *entry)
        _COUNT.pack_into(self._map, 0, serial)

    def packed(self) -> bytes:
        """The newest entry as bytes, b"" before the first."""
        while True:
            (serial,) = _COUNT.unpack_from(self._map)
            at = _COUNT.size + serial % KEPT * _ENTRY.size
            entry = self._map[at : at + _ENTRY.size]
            if not serial or _COUNT.unpack_from(entry)[0] == serial:
                return entry if serial else b""

    def last(self) -> Entry | None:
        """The newest entry, None before the first."""
        packed = self.packed()
        return decoded(packed) if packed else None


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
