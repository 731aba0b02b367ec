"""What a plan's certificate claims, recomputed from its stages and edges.

Written apart from the planner, on purpose: two programs that agree by sharing a mistake prove
nothing.  Here the makespan is the least solution of "nothing starts before what it waits for":
the longest path to the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdcompile.cluster import Cluster
from pdcompile.errors import PlanError
from pdcompile.plan.model import Plan

Pair = tuple[int, int]
Event = tuple[str, int, int, int]  # kind, stage, receiver or 0, microbatch
Wait = tuple[Event, Event, float]


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds per stage and per ordered pair of stages, for one microbatch.

    `weights`: pairs over which new weights of tied parameters go once a minibatch.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    ahead: dict[Pair, float]
    back: dict[Pair, float]
    weights: dict[Pair, float]
    half_duplex: tuple[bool, ...]  # per stage

    @staticmethod
    def of(
        plan: Plan,
        cluster: Cluster,
        seconds: Sequence[tuple[float, float]],
        returning: Iterable[str],
    ) -> Clock:
        """From forward and backward seconds of each stage; `returning`: values with gradients."""
        ranks = [stage.ranks[0] if stage.ranks else s for s, stage in enumerate(plan.stages)]
        ahead: dict[Pair, float] = defaultdict(float)
        back: dict[Pair, float] = defaultdict(float)
        weights: dict[Pair, float] = defaultdict(float)
        gradients = set(returning)

        def hop(a: int, b: int, size: int) -> float:
            level = cluster.level_between(ranks[a], ranks[b])
            return size / level.bytes_per_second + level.latency_seconds

        for edge in plan.edges:
            for target in edge.targets:
                ahead[edge.source, target] += hop(edge.source, target, edge.bytes)
            if edge.value in gradients:
                chain = (edge.source, *edge.targets)
                for i in range(len(chain) - 1, 0, -1):
                    back[chain[i], chain[i - 1]] += hop(chain[i], chain[i - 1], edge.bytes)
        for tied in plan.tied:
            for i in range(len(tied.stages) - 1, 0, -1):
                a, b = tied.stages[i], tied.stages[i - 1]
                back[a, b] += hop(a, b, tied.bytes)
            for holder in tied.stages[1:]:
                weights[tied.stages[0], holder] += hop(tied.stages[0], holder, tied.bytes)
        last = len(ranks) - 1
        half = tuple(
            any(
                not cluster.level_between(ranks[i], ranks[i + 1]).full_duplex
                for i in (s - 1, s)
                if 0 <= i < last
            )
            for s in range(len(ranks))
        )
        forward, backward = zip(*seconds, strict=True)
        return Clock(forward, backward, dict(ahead), dict(back), dict(weights), half)

    def period(self, in_flight: Sequence[int], num_microbatches: int) -> float:
        """Seconds per microbatch of a stream: busiest engine, or a round trip that is too long."""
        stages = range(len(self.forward))
        worst = 0.0
        for s in stages:
            sent = received = 0.0
            for table, every in ((self.ahead, 1), (self.back, 1), (self.weights, num_microbatches)):
                sent += sum(t for (a, _), t in table.items() if a == s) / every
                received += sum(t for (_, b), t in table.items() if b == s) / every
            link = sent + received if self.half_duplex[s] else max(sent, received)
            trip = self._round_trip(s)
            worst = max(worst, self.forward[s] + self.backward[s], link, trip / in_flight[s])
        return worst

    def _round_trip(self, first: int) -> float:
        """The longest way from a stage's forward to the end of its backward."""
        ends = {first: self.forward[first]}
        for t in range(first + 1, len(self.forward)):
            into = [ends[a] + x for (a, b), x in self.ahead.items() if b == t and a in ends]
            if into:
                ends[t] = max(into) + self.forward[t]
        done: dict[int, float] = {}
        for t in reversed(range(first, len(self.forward))):
            ready = [done[a] + x for (a, b), x in self.back.items() if b == t and a in done]
            ready += [ends[t]] if t in ends else []
            if ready:
                done[t] = max(ready) + self.backward[t]
        return done[first]

    def makespan(self, warmup: Sequence[int], m: int) -> float:
        """Seconds of one minibatch with a flush, links being full duplex.

        With half-duplex links it is a lower bound of the planner's figure.
        """
        return _longest(self._waits(warmup, m), ("end", 0, 0, 0))

    def _waits(self, warmup: Sequence[int], m: int) -> Iterable[Wait]:
        """(event, later event, seconds between their starts)."""
        num_stages = len(self.forward)
        depth = [min(one, m - 1) for one in warmup]
        for k in range(m):
            for s in range(num_stages):
                yield from self._program(s, depth[s], m, k)
                yield from self._compute("F", s, k, depth, m)
            for s in reversed(range(num_stages)):
                yield from self._compute("B", s, k, depth, m)
        for s in range(num_stages):
            yield ("B done", s, 0, m - 1), ("end", 0, 0, 0), 0.0
        for (a, b), x in self.weights.items():
            yield ("B done", a, 0, m - 1), ("weights", a, b, 0), 0.0
            yield ("B done", b, 0, m - 1), ("weights", a, b, 0), 0.0
            yield ("weights", a, b, 0), ("end", 0, 0, 0), x

    def _compute(self, kind: str, s: int, k: int, depth: list[int], m: int) -> Iterable[Wait]:
        """One forward or backward, then its messages in turn, the nearest receiver first.

        At most `window` messages to one receiver are under way; a receive needs a slot.
        """
        table = self.ahead if kind == "F" else self.back
        wire = f"{kind} wire"
        before: Event = (kind, s, 0, k)
        gap = (self.forward if kind == "F" else self.backward)[s]
        for b in sorted((b for a, b in table if a == s), key=lambda b: abs(b - s)):
            x = table[s, b]
            window = max(2, 1 + depth[min(s, b)] - depth[max(s, b)])
            handed: Event = (f"{kind} handed", s, b, k)
            yield before, handed, gap
            if k >= window:
                yield (wire, s, b, k - window), handed, x
            yield handed, (wire, s, b, k), 0.0
            if k:
                yield (wire, s, b, k - 1), (wire, s, b, k), x
            for free in _slot(kind, b, k, depth[b], m):
                yield free, (wire, s, b, k), 0.0
            yield (wire, s, b, k), (kind, b, 0, k), x
            before, gap = handed, 0.0
        yield before, (f"{kind} done", s, 0, k), gap

    def _program(self, s: int, depth: int, m: int, k: int) -> Iterable[Wait]:
        """Forward k of a stage waits for forward k−1 and backward k−1−depth, and so on."""
        if k:
            yield ("F done", s, 0, k - 1), ("F", s, 0, k), 0.0
            yield ("B done", s, 0, k - 1), ("B", s, 0, k), 0.0
        if k > depth:
            yield ("B done", s, 0, k - 1 - depth), ("F", s, 0, k), 0.0
        yield ("F done", s, 0, min(k + depth, m - 1)), ("B", s, 0, k), 0.0


def _longest(waits: Iterable[Wait], end: Event) -> float:
    """When the last event begins if every event begins as early as all waits allow.

    Events are taken when all that they wait for have been, each wait once.  Raises PlanError
    when there is no such order.
    """
    numbers: dict[Event, int] = {}  # lists by number take a third less than tables by event
    after: list[list[tuple[int, float]]] = []
    missing: list[int] = []

    def number(event: Event) -> int:
        known = numbers.setdefault(event, len(after))
        if known == len(after):
            after.append([])
            missing.append(0)
        return known

    for event, later, seconds in waits:
        target = number(later)
        after[number(event)].append((target, seconds))
        missing[target] += 1
    begin = [0.0] * len(after)
    ready = [event for event, count in enumerate(missing) if not count]
    while ready:
        event_number = ready.pop()
        at = begin[event_number]
        for later_number, seconds in after[event_number]:
            if at + seconds > begin[later_number]:
                begin[later_number] = at + seconds
            missing[later_number] -= 1
            if not missing[later_number]:
                ready.append(later_number)
    if any(missing):
        raise PlanError(
            "the forwards and backwards of a minibatch wait for each other in a circle",
            where="plan: training.warmup",
            remedy="make the plan again",
        )
    return begin[numbers[end]] if end in numbers else 0.0


def _slot(kind: str, s: int, k: int, depth: int, m: int) -> Iterable[Event]:
    """What must be over before a stage can take message k: activations, then gradients.

    It has room for those in flight and one more; gradients for two that went forward.
    """
    if kind == "F" and k >= min(depth + 2, m):
        yield ("B done", s, 0, k - min(depth + 2, m))
    if kind == "B":
        yield ("F done", s, 0, k)
        if k >= 2:
            yield ("B done", s, 0, k - 2)
