"""How long one minibatch takes under a flush schedule, from a few numbers per stage.

The planner asks this of thousands of candidates, so it works on seconds per stage and link
instead of instructions.  The model is the simulator's: a stage computes one thing at a time in
the order of its schedule; what it makes is sent when it is finished; a link carries one transfer
at a time in each direction (half duplex: in both together); a receiver needs everything that
was sent to it before it computes.  A transfer also needs a free receive slot (as many as there
are microbatches in flight, and one more), and a sender waits when too many of its messages are
under way: with slow links and values that skip stages that costs time.  All values of one hop
go together here, so where one stage sends to several others the simulator may differ a little.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import Literal, TypeAlias

from pdcompile.passes.partition.full_duplex import Recurrence

_ENDLESS = "warm-up {} never ends: stages wait for each other"
GRADIENT_SLOTS = 2  # the number that `passes.layout` gives every schedule

Hop: TypeAlias = tuple[int, int]  # sending and receiving stage
Kind: TypeAlias = Literal["forward", "backward", "final"]
Compute: TypeAlias = tuple[int, bool, int]  # stage, is forward, microbatch
Transfer: TypeAlias = tuple[Hop, Kind, int]


@dataclass(frozen=True, slots=True)
class Timing:
    """What one microbatch takes: seconds per stage, and per hop for all its values together.

    `final_hops` happen once, after the sender's last backward (new weights of tied parameters).
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    forward_hops: Mapping[Hop, float] = field(default_factory=dict)
    backward_hops: Mapping[Hop, float] = field(default_factory=dict)
    final_hops: Mapping[Hop, float] = field(default_factory=dict)
    full_duplex: bool = True


@dataclass(frozen=True, slots=True)
class Path:
    """A chain of work in which each waits for the one before: how often each of it occurs.

    Without traffic on one of its hops the chain falls apart and says nothing.
    """

    forward: tuple[int, ...]  # per stage
    backward: tuple[int, ...]
    hops: tuple[tuple[Hop, Kind, int], ...]

    def seconds(self, timing: Timing) -> float:
        """Its sum for other stages and hops; 0 where it says nothing of them."""
        tables: dict[Kind, Mapping[Hop, float]] = {
            "forward": timing.forward_hops,
            "backward": timing.backward_hops,
            "final": timing.final_hops,
        }
        if any(hop not in tables[kind] for hop, kind, _ in self.hops):
            return 0.0
        return math.fsum(
            (
                *map(operator.mul, self.forward, timing.forward),
                *map(operator.mul, self.backward, timing.backward),
                *(count * tables[kind][hop] for hop, kind, count in self.hops),
            )
        )


def warmup_of(in_flight: Sequence[int], num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Forwards before the first backward, beyond one: in flight − 1, at most m − 1.

    Without `in_flight`, the least that keeps a pipeline of N stages busy: N − 1 − s.
    """
    depths = [count - 1 for count in in_flight] or [num_stages - 1 - s for s in range(num_stages)]
    return tuple(max(0, min(depth, num_microbatches - 1)) for depth in depths)


def program(warmup: int, num_microbatches: int) -> list[tuple[bool, int]]:
    """(is forward, microbatch) in order: `warmup` forwards, then one and one, then backwards.

    warmup = m − 1 is GPipe.  Warm-up 1 of 3 microbatches: F0 F1 B0 F2 B1 B2.
    """
    steps = [(True, k) for k in range(warmup)]
    for k in range(warmup, num_microbatches):
        steps += [(True, k), (False, k - warmup)]
    return steps + [(False, k) for k in range(num_microbatches - warmup, num_microbatches)]


_program = lru_cache(maxsize=256)(program)


def makespan(timing: Timing, warmup: Sequence[int], num_microbatches: int) -> float:
    """Seconds from the first forward to the last backward (or final hop) of one minibatch.

    Raises:
        ValueError: the stages wait for each other for ever (warm-up too small for the hops).
    """
    found = _recurrence(timing, warmup, num_microbatches) if timing.full_duplex else None
    return found.end if found else _Run(timing, warmup, num_microbatches).end


def longest_path(timing: Timing, warmup: Sequence[int], num_microbatches: int) -> Path:
    """As `critical_path`, in less time; of several longest paths it may be another one."""
    found = _recurrence(timing, warmup, num_microbatches)
    return Path(*found.path()) if found else critical_path(timing, warmup, num_microbatches)


def _recurrence(timing: Timing, warmup: Sequence[int], m: int) -> Recurrence | None:
    """The schedule on full-duplex links; None where hops of several kinds share some."""
    hops: dict[Kind, Mapping[Hop, float]] = {
        "forward": timing.forward_hops,
        "backward": timing.backward_hops,
        "final": timing.final_hops,
    }
    if not Recurrence.applies(hops):
        return None
    programs = [_program(depth, m) for depth in warmup]
    found = Recurrence(timing.forward, timing.backward, hops, programs, warmup, m, GRADIENT_SLOTS)
    if not found.run():
        raise ValueError(_ENDLESS.format(list(warmup)))
    return found


def critical_path(timing: Timing, warmup: Sequence[int], num_microbatches: int) -> Path:
    """A longest path of the schedule: its weighted sum is the makespan (with full duplex).

    With the same warm-up and microbatches, every other partition whose stages have these hops
    takes at least this path's sum of its own seconds, because the order of programs and links
    is fixed.  Half-duplex links, where it is not, are treated as full duplex.
    """
    timing = replace(timing, full_duplex=True)
    return _Run(timing, warmup, num_microbatches).path()


class _Transfer:
    """One message: on its way once it was sent and its receive is posted."""

    __slots__ = ("done", "ends_met", "event", "link", "seconds", "sleepers")

    def __init__(self, event: Transfer, link: Hop, seconds: float):
        self.event, self.link, self.seconds = event, link, seconds
        self.ends_met = 0
        self.done = False
        self.sleepers: list[int] = []


class _Run:
    """One walk through all programs in order of time, remembering what each event waited for.

    A stage is a generator that yields seconds to compute or a transfer to wait for.
    """

    def __init__(self, timing: Timing, warmup: Sequence[int], num_microbatches: int):
        self.timing = timing
        self.warmup = tuple(warmup)
        self.m = num_microbatches
        self.cause: dict[Compute | Transfer, Compute | Transfer | None] = {}
        self.because: list[Compute | Transfer | None] = [None] * len(warmup)  # decided its time
        self.transfers: dict[Transfer, _Transfer] = {}
        self.queues: dict[Hop, deque[_Transfer]] = {}
        self.heap: list[tuple[float, int, int, _Transfer | None]] = []
        self.ticket = count()
        self.now = self.end = 0.0
        self.last: Compute | Transfer | None = None
        self._tables: dict[Kind, Mapping[Hop, float]] = {
            "forward": timing.forward_hops,
            "backward": timing.backward_hops,
            "final": timing.final_hops,
        }
        self.into, self.out = self._index()
        self.stages = [self._stage(s) for s in range(len(warmup))]
        self._walk()

    def path(self) -> Path:
        computed = {True: [0] * len(self.warmup), False: [0] * len(self.warmup)}
        hops: dict[tuple[Hop, Kind], int] = {}
        event = self.last
        while event is not None:
            if isinstance(event[0], int):
                computed[bool(event[1])][event[0]] += 1
            else:
                key: tuple[Hop, Kind] = (event[0], event[1])
                hops[key] = hops.get(key, 0) + 1
            event = self.cause[event]
        found = tuple((hop, kind, times) for (hop, kind), times in sorted(hops.items()))
        return Path(tuple(computed[True]), tuple(computed[False]), found)

    # -- one stage -----------------------------------------------------------------------------

    def _stage(self, s: int) -> Iterator[float | _Transfer]:
        pool = min(self.warmup[s] + 2, self.m)  # receive slots: in flight, and one travelling
        for k in range(pool):
            self._post(s, "forward", k)
        forwards = backwards = 0
        for forward, k in program(self.warmup[s], self.m):
            kind: Kind = "forward" if forward else "backward"
            for source in self.into[kind][s]:
                yield self._transfer((source, s), kind, k)
            event: Compute = (s, forward, k)
            self.cause[event] = self.because[s]
            yield self.timing.forward[s] if forward else self.timing.backward[s]
            self.because[s] = event
            yield from self._send(s, kind, k)
            forwards, backwards = forwards + forward, backwards + (not forward)
            # Gradients are expected for the next two microbatches that went forward.
            if forward and forwards - backwards <= GRADIENT_SLOTS:
                self._post(s, "backward", k)
            elif not forward:
                if k + GRADIENT_SLOTS < forwards:
                    self._post(s, "backward", k + GRADIENT_SLOTS)
                if k + pool < self.m:
                    self._post(s, "forward", k + pool)
        self._note(self.because[s])
        yield from self._send(s, "final", 0)
        self._post(s, "final", 0)
        for source in self.into["final"][s]:
            yield self._transfer((source, s), "final", 0)
            self._note(self.because[s])

    def _send(self, s: int, kind: Kind, k: int) -> Iterator[_Transfer]:
        """Hand over what was made; only so many may be under way to one receiver."""
        for target in self.out[kind][s]:
            window = max(2, 1 + self.warmup[min(s, target)] - self.warmup[max(s, target)])
            if k >= window:
                yield self._transfer((s, target), kind, k - window)
            self._meet(self._transfer((s, target), kind, k), s)

    def _post(self, s: int, kind: Kind, k: int) -> None:
        for source in self.into[kind][s]:
            self._meet(self._transfer((source, s), kind, k), s)

    def _note(self, event: Compute | Transfer | None) -> None:
        if self.last is None or self.now >= self.end:
            self.end, self.last = self.now, event

    # -- transfers and time --------------------------------------------------------------------

    def _transfer(self, hop: Hop, kind: Kind, k: int) -> _Transfer:
        event: Transfer = (hop, kind, k)
        if event not in self.transfers:
            link = hop if self.timing.full_duplex else (min(hop), max(hop))
            self.transfers[event] = _Transfer(event, link, self._tables[kind][hop])
        return self.transfers[event]

    def _meet(self, transfer: _Transfer, s: int) -> None:
        """One end is there; with both the transfer joins the queue of its link."""
        transfer.ends_met += 1
        if transfer.ends_met == 2:
            self.cause[transfer.event] = self.because[s]
            queue = self.queues.setdefault(transfer.link, deque())
            queue.append(transfer)
            if len(queue) == 1:
                self._at(self.now + transfer.seconds, -1, transfer)

    def _arrive(self, transfer: _Transfer) -> None:
        transfer.done = True
        queue = self.queues[transfer.link]
        queue.popleft()
        if queue:
            self.cause[queue[0].event] = transfer.event
            self._at(self.now + queue[0].seconds, -1, queue[0])
        for s in transfer.sleepers:
            self.because[s] = transfer.event
            self._at(self.now, s, None)

    def _at(self, seconds: float, stage: int, transfer: _Transfer | None) -> None:
        heapq.heappush(self.heap, (seconds, next(self.ticket), stage, transfer))

    def _walk(self) -> None:
        running = len(self.stages)
        for s in range(running):
            self._at(0.0, s, None)
        while self.heap:
            self.now, _, stage, transfer = heapq.heappop(self.heap)
            if transfer is not None:
                self._arrive(transfer)
            else:
                running -= self._advance(stage)
        if running:
            raise ValueError(_ENDLESS.format(list(self.warmup)))

    def _advance(self, stage: int) -> bool:
        """Go on until the stage computes or waits; True when it is finished."""
        for wish in self.stages[stage]:
            if isinstance(wish, _Transfer):
                if not wish.done:
                    wish.sleepers.append(stage)
                    return False
            else:
                self._at(self.now + wish, stage, None)
                return False
        return True

    def _index(self) -> tuple[dict[Kind, list[list[int]]], dict[Kind, list[list[int]]]]:
        """By kind and stage: who sends to it, and to whom it sends, the nearest first."""
        n = len(self.warmup)
        into: dict[Kind, list[list[int]]] = {}
        out: dict[Kind, list[list[int]]] = {}
        for kind, hops in self._tables.items():
            into[kind], out[kind] = [[] for _ in range(n)], [[] for _ in range(n)]
            for source, target in sorted(hops, key=lambda hop: (abs(hop[0] - hop[1]), hop)):
                into[kind][target].append(source)
                out[kind][source].append(target)
        return into, out
