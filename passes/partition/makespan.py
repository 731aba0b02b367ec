"""How long one minibatch takes under a flush schedule, from a few numbers per stage.

The planner asks this of thousands of candidates, so it works on seconds per stage and link
instead of instructions.  The model is the simulator's: a stage computes one thing at a time in
the order of its schedule; what it makes is sent when it is finished; a link carries one transfer
at a time in each direction (half duplex: in both together); a receiver needs everything that
was sent to it before it computes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

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

    `links` are the hops without whose traffic the chain would fall apart.
    """

    forward: tuple[int, ...]  # per stage
    backward: tuple[int, ...]
    hops: tuple[tuple[Hop, Kind, int], ...]


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


def makespan(timing: Timing, warmup: Sequence[int], num_microbatches: int) -> float:
    """Seconds from the first forward to the last backward (or final hop) of one minibatch.

    Raises:
        ValueError: the stages wait for each other for ever (warm-up too small for the hops).
    """
    return _Run(timing, warmup, num_microbatches).end


def critical_path(timing: Timing, warmup: Sequence[int], num_microbatches: int) -> Path:
    """A longest path of the schedule: its weighted sum is the makespan (with full duplex).

    With the same warm-up and microbatches, every other partition whose stages have these hops
    takes at least this path's sum of its own seconds, because program and link order are fixed.
    Half-duplex links are treated as full duplex, where the order in a link could change.
    """
    timing = replace(timing, full_duplex=True)
    return _Run(timing, warmup, num_microbatches).path()


class _Run:
    """One walk through all programs in order of time, remembering what each event waited for."""

    def __init__(self, timing: Timing, warmup: Sequence[int], num_microbatches: int):
        self.timing = timing
        self.num_stages = len(timing.forward)
        self.programs = [program(depth, num_microbatches) for depth in warmup]
        self.sends = self._sends()
        self.missing = self._missing(num_microbatches)
        self.ready: dict[Compute, tuple[float, Transfer]] = {}  # the last message, and when
        self.cause: dict[Compute | Transfer, Compute | Transfer | None] = {}
        self.link: dict[Hop, tuple[float, Transfer]] = {}  # free from, and the last transfer
        self.position = [0] * self.num_stages
        self.free = [0.0] * self.num_stages
        self.busy = [False] * self.num_stages
        self.running: list[tuple[float, int]] = []  # (end, stage)
        self.end = 0.0
        self.last: Compute | Transfer | None = None
        self._walk()
        if any(self.position[s] < len(self.programs[s]) for s in range(self.num_stages)):
            raise ValueError(f"warm-up {list(warmup)} never ends: stages wait for each other")

    def path(self) -> Path:
        counts = {True: [0] * self.num_stages, False: [0] * self.num_stages}
        hops: dict[tuple[Hop, Kind], int] = {}
        event = self.last
        while event is not None:
            first, second, _ = event
            if isinstance(first, int):
                counts[bool(second)][first] += 1
            else:
                key = (first, self._kind(event))
                hops[key] = hops.get(key, 0) + 1
            event = self.cause[event]
        found = tuple((hop, kind, count) for (hop, kind), count in sorted(hops.items()))
        return Path(tuple(counts[True]), tuple(counts[False]), found)

    @staticmethod
    def _kind(event: Compute | Transfer) -> Kind:
        kind = event[1]
        assert isinstance(kind, str)
        return kind

    def _walk(self) -> None:
        for stage in range(self.num_stages):
            self._start(stage)
        while self.running:
            now, stage = heapq.heappop(self.running)
            forward, k = self.programs[stage][self.position[stage]]
            done = (stage, forward, k)
            self.position[stage] += 1
            self.free[stage], self.busy[stage] = now, False
            self._finished(now, done)
            for target, seconds in self.sends[forward][stage]:
                arrival, sent = self._send(now, done, target, seconds, forward)
                key = (target, forward, k)
                if key not in self.ready or arrival > self.ready[key][0]:
                    self.ready[key] = arrival, sent
                self.missing[key] -= 1
                self._start(target)
            self._start(stage)
            if self.position[stage] == len(self.programs[stage]):
                for (source, target), seconds in self.timing.final_hops.items():
                    if source == stage:
                        self._finished(*self._send(now, done, target, seconds, None))

    def _start(self, stage: int) -> None:
        if self.busy[stage] or self.position[stage] == len(self.programs[stage]):
            return
        forward, k = self.programs[stage][self.position[stage]]
        key = (stage, forward, k)
        if self.missing.get(key, 0):
            return
        begin, cause = self.free[stage], None
        if self.position[stage]:
            cause = (stage, *self.programs[stage][self.position[stage] - 1])
        waited: Compute | Transfer | None = cause
        if key in self.ready and self.ready[key][0] >= begin:
            begin, waited = self.ready[key]
        self.cause[key] = waited
        seconds = self.timing.forward[stage] if forward else self.timing.backward[stage]
        self.busy[stage] = True
        heapq.heappush(self.running, (begin + seconds, stage))

    def _send(
        self, now: float, done: Compute, target: int, seconds: float, forward: bool | None
    ) -> tuple[float, Transfer]:
        stage, _, k = done
        kind: Kind = "final" if forward is None else "forward" if forward else "backward"
        sent: Transfer = ((stage, target), kind, k)
        link = (stage, target)
        if not self.timing.full_duplex:
            link = (min(link), max(link))
        begin: float = now
        cause: Compute | Transfer = done
        if link in self.link and self.link[link][0] > now:
            begin, cause = self.link[link]
        self.cause[sent] = cause
        self.link[link] = begin + seconds, sent
        return begin + seconds, sent

    def _finished(self, end: float, event: Compute | Transfer) -> None:
        if self.last is None or end > self.end:
            self.end, self.last = end, event

    def _sends(self) -> tuple[list[list[tuple[int, float]]], ...]:
        """For backward (0) and forward (1), by stage: (receiver, seconds), nearest first."""
        found: tuple[list[list[tuple[int, float]]], ...] = (
            [[] for _ in range(self.num_stages)],
            [[] for _ in range(self.num_stages)],
        )
        for forward, hops in enumerate((self.timing.backward_hops, self.timing.forward_hops)):
            for (source, target), seconds in sorted(hops.items(), key=_distance):
                found[forward][source].append((target, seconds))
        return found

    def _missing(self, m: int) -> dict[Compute, int]:
        counts: dict[Compute, int] = {}
        for forward, hops in enumerate((self.timing.backward_hops, self.timing.forward_hops)):
            for _, target in hops:
                for k in range(m):
                    key = (target, bool(forward), k)
                    counts[key] = counts.get(key, 0) + 1
        return counts


def _distance(item: tuple[Hop, float]) -> tuple[int, Hop]:
    (source, target), _ = item
    return abs(source - target), item[0]
