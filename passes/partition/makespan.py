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
from dataclasses import dataclass, field

Hop = tuple[int, int]  # sending and receiving stage


@dataclass(frozen=True, slots=True)
class Timing:
    """What one microbatch takes: seconds per stage, and per hop for all its values together."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    forward_hops: Mapping[Hop, float] = field(default_factory=dict)
    backward_hops: Mapping[Hop, float] = field(default_factory=dict)
    full_duplex: bool = True


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
    """Seconds from the first forward to the last backward of one minibatch.

    Raises:
        ValueError: the stages wait for each other for ever (warm-up too small for the hops).
    """
    num_stages = len(timing.forward)
    programs = [program(depth, num_microbatches) for depth in warmup]
    seconds = (timing.backward, timing.forward)
    sends = _by_sender(timing, num_stages)
    missing = _expected(timing, num_stages, num_microbatches)
    ready: dict[tuple[int, bool, int], float] = {}  # when the last of its messages is there
    link_free: dict[Hop, float] = {}
    position, free, busy = [0] * num_stages, [0.0] * num_stages, [False] * num_stages
    running: list[tuple[float, int]] = []  # (end, stage)

    def start(stage: int) -> None:
        if busy[stage] or position[stage] == len(programs[stage]):
            return
        forward, k = programs[stage][position[stage]]
        if missing.get((stage, forward, k), 0):
            return
        begin = max(free[stage], ready.get((stage, forward, k), 0.0))
        busy[stage] = True
        heapq.heappush(running, (begin + seconds[forward][stage], stage))

    for stage in range(num_stages):
        start(stage)
    now = 0.0
    while running:
        now, stage = heapq.heappop(running)
        forward, k = programs[stage][position[stage]]
        position[stage] += 1
        free[stage], busy[stage] = now, False
        for target, duration in sends[forward][stage]:
            link = (stage, target)
            if not timing.full_duplex:
                link = (min(link), max(link))
            arrival = max(now, link_free.get(link, 0.0)) + duration
            link_free[link] = arrival
            key = (target, forward, k)
            ready[key] = max(ready.get(key, 0.0), arrival)
            missing[key] -= 1
            start(target)
        start(stage)
    if any(position[s] < len(programs[s]) for s in range(num_stages)):
        raise ValueError(f"warm-up {list(warmup)} never ends: stages wait for each other")
    return max(free)


def _by_sender(timing: Timing, num_stages: int) -> tuple[list[list[tuple[int, float]]], ...]:
    """For backward (0) and forward (1), by stage: (receiver, seconds), nearest first."""
    found: tuple[list[list[tuple[int, float]]], ...] = (
        [[] for _ in range(num_stages)],
        [[] for _ in range(num_stages)],
    )
    for forward, hops in ((False, timing.backward_hops), (True, timing.forward_hops)):
        for (source, target), duration in sorted(hops.items(), key=_distance):
            found[forward][source].append((target, duration))
    return found


def _distance(item: tuple[Hop, float]) -> tuple[int, Hop]:
    (source, target), _ = item
    return abs(source - target), item[0]


def _expected(timing: Timing, num_stages: int, m: int) -> dict[tuple[int, bool, int], int]:
    counts: dict[tuple[int, bool, int], int] = {}
    for forward, hops in ((False, timing.backward_hops), (True, timing.forward_hops)):
        for _, target in hops:
            for k in range(m):
                counts[target, forward, k] = counts.get((target, forward, k), 0) + 1
    return counts
