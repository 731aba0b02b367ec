"""Links between the ranks of a pipeline, and when their messages arrive: see `makespan`.

Messages of a link go in the order of their microbatches.  So when one arrives follows from when
its two ends were ready and when the one before arrived.  Where messages of both directions share a
link, the one that is ready first goes first.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from itertools import count as counting
from typing import Literal, NamedTuple, TypeAlias, Union

from pdcompile.schedule.instruction import Action

StagePair: TypeAlias = tuple[int, int]  # sending and receiving stage
Direction: TypeAlias = Literal["forward", "backward", "final"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "final")
ComputeEvent: TypeAlias = tuple[int, Action, int]  # stage, what it does, microbatch
Event: TypeAlias = Union[ComputeEvent, tuple["Wire", int], None]  # noqa: UP007  (a name in quotes)


def by_distance(hop: StagePair) -> tuple[int, StagePair]:
    """A stage sends over its hops in the order of this."""
    return abs(hop[0] - hop[1]), hop


class SharedLinks:
    """Links that carry messages of several hops in turn: the one whose ends are ready first, and
    of those that are ready at one time the one whose later end its rank came to first."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, int, Wire]] = []
        self.ticket = counting()  # of ends, as ranks come to them
        self.free: dict[StagePair, float] = defaultdict(float)

    def add(self, at: float, ticket: int, wire: Wire) -> None:
        heapq.heappush(self.waiting, (at, ticket, wire))

    def carry(self, ready: list[int]) -> None:
        """The next message over its link."""
        at, _, wire = heapq.heappop(self.waiting)
        link = wire.link
        seconds = wire.seconds[len(wire.arrived) % len(wire.seconds)]
        self.free[link] = max(at, self.free[link]) + seconds
        wire.arrived.append(self.free[link])
        wire.wake(ready)


class Wire:
    """Messages of one kind from one rank to another, microbatch by microbatch."""

    __slots__ = (
        "arrived", "hop", "kind", "link", "met", "posted", "posted_after", "seconds", "sent",
        "sent_after", "shared", "sleepers", "tickets",
    )  # fmt: skip

    def __init__(
        self,
        hop: StagePair,
        kind: Direction,
        seconds: tuple[float, ...],
        link: tuple[int, int],
        shared: SharedLinks | None = None,
    ):
        """`seconds` of each message of a microbatch; `shared`: other hops take the `link` too."""
        self.hop, self.kind, self.seconds = hop, kind, seconds
        self.link, self.shared = link, shared
        self.met = 0  # messages that wait for a shared link, or waited
        self.tickets: tuple[list[int], list[int]] = [], []  # of a shared link: of sends, of slots
        self.sent: list[float] = []  # when each was handed over
        self.sent_after: list[Event] = []  # what decided that time
        self.posted: list[float] = []  # when there was a slot for it
        self.posted_after: list[Event] = []
        self.arrived: list[float] = []
        self.sleepers: list[int] = []

    def send(self, now: float, after: Event, ready: list[int]) -> None:
        if self.shared is not None:
            self.tickets[0].append(next(self.shared.ticket))
        self.sent.append(now)
        self.sent_after.append(after)
        self.move(ready)

    def post(self, now: float, after: Event, ready: list[int]) -> None:
        for _ in self.seconds:
            if self.shared is not None:
                self.tickets[1].append(next(self.shared.ticket))
            self.posted.append(now)
            self.posted_after.append(after)
        self.move(ready)

    def cause(self, i: int) -> Event:
        """Cause after which message i set out."""
        before = self.arrived[i - 1] if i else 0.0
        found: Event = (self, i - 1) if i else self.sent_after[0]
        if self.sent[i] > before:
            before, found = self.sent[i], self.sent_after[i]
        return self.posted_after[i] if self.posted[i] > before else found

    def move(self, ready: list[int]) -> None:
        """Add the arrivals that follow from what is known; who waited for them is ready."""
        sent, posted, arrived = self.sent, self.posted, self.arrived
        last = min(len(sent), len(posted))
        if self.shared is not None:
            for i in range(self.met, last):
                slot = posted[i] > sent[i]
                self.shared.add(max(sent[i], posted[i]), self.tickets[slot][i], self)
            self.met = last
            return
        first = len(arrived)
        if first == last:
            return
        before = arrived[-1] if arrived else 0.0
        for i in range(first, last):
            if sent[i] > before:
                before = sent[i]
            if posted[i] > before:
                before = posted[i]
            before += self.seconds[i % len(self.seconds)]
            arrived.append(before)
        self.wake(ready)

    def wake(self, ready: list[int]) -> None:
        if self.sleepers:
            ready += self.sleepers
            self.sleepers.clear()


class WireGroup(NamedTuple):
    """The wires between the ranks of two stages, by turn, and their messages a microbatch."""

    wires: list[Wire]
    places: list[int]  # of each microbatch among those of its wire
    messages: int
    window: int  # messages in flight to one receiver before its sender waits, of all turns


def places_of(wires: list[Wire], count: int) -> list[int]:
    """The place of each of so many microbatches among those of its wire."""
    turns, before = len(wires), Counter[int]()
    within = [before.update([id(wire)]) or before[id(wire)] - 1 for wire in wires]
    return [k // turns * before[id(wires[k % turns])] + within[k % turns] for k in range(count)]
