"""Texts that ranks tell each other while they save or load: what each has done, and the verdict.

The texts go through the store.  That they are there is told by a program that meets all ranks: who
waits for one that has died hears of it at once, as in every call.
"""

from __future__ import annotations

import torch

from pdcompile.runtime.interpreter import Box
from pdcompile.runtime.session import Session
from pdcompile.runtime.transport.contract import MAX_EDGES, Expected
from pdcompile.schedule import Kind
from pdcompile.schedule.spec import Broadcast

_HERE = MAX_EDGES - 1  # the number of what is sent: no tensor of the state has it


class Exchange:
    """Every rank of the pipeline makes the same calls, within a call of the session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._number = 0
        self._announced: list[str] = []  # keys that all ranks have read when they meet again

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, on rank 0; elsewhere []."""
        world = self._session.world
        if world is None:
            return [text]
        self._number += 1
        world.store.set(self._key(world.rank), text)
        others = range(1, world.size)
        self._meet([Broadcast(Kind.STATE, _HERE, rank, rank, (0,)) for rank in others])
        if world.rank:
            return []
        found = [str(world.store.get(self._key(rank)), "utf-8") for rank in range(world.size)]
        for key in (*map(self._key, range(world.size)), *self._announced):
            world.store.delete_key(key)
        self._announced.clear()
        return found

    def announce(self, text: str) -> str:
        """The text of rank 0, on every rank."""
        world = self._session.world
        if world is None:
            return text
        self._number += 1
        if world.rank == 0:
            world.store.set(self._key(0), text)
            self._announced.append(self._key(0))
        everyone = tuple(range(1, world.size))
        self._meet([Broadcast(Kind.STATE, _HERE, 0, 0, everyone)] if everyone else [])
        return str(world.store.get(self._key(0)), "utf-8")

    def _key(self, rank: int) -> str:
        return f"told/{self._number}/{rank}"

    def _meet(self, broadcasts: list[Broadcast]) -> None:
        box = Box({}, {})
        for one in broadcasts:
            place = (one.item, one.microbatch)
            box.tensors[place] = torch.ones(1, dtype=torch.int64)
            box.expected[place] = Expected((1,), torch.int64, 0)
        self._session.share(tuple(broadcasts), box)
