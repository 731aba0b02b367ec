"""What a plan with replicas takes, recomputed from its stages and edges.

The counterpart of `clock` for stages that run on several ranks: replica q of stage s takes
microbatches q, q + r_s, q + 2·r_s, …  Every edge is a message of its own here.  Written apart
from the planner and from the simulator, on purpose.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pdcompile.cluster import Cluster
from pdcompile.plan.model import Plan, StagePlan

Event = tuple[str, int, int, int]  # kind, stage or edge, receiving stage or rank, microbatch
Wait = tuple[Event, Event, float]
Message = tuple[int, int, int, int]  # edge (tied ones after all edges), from, to, bytes


def ranks_of(stages: Sequence[StagePlan]) -> list[tuple[int, ...]]:
    """Ranks of each stage; where a plan names none, they follow each other."""
    found: list[tuple[int, ...]] = []
    following = 0
    for stage in stages:
        given = stage.ranks or tuple(range(following, following + stage.replicas))
        following = max(given) + 1
        found.append(given)
    return found


@dataclass(frozen=True, slots=True)
class ReplicaClock:
    """Seconds of a plan's stages, `backward` with the forward again where it is recomputed."""

    plan: Plan
    cluster: Cluster
    ranks: list[tuple[int, ...]]
    forward: list[float]
    backward: list[float]
    ahead: list[Message]
    back: list[Message]

    @staticmethod
    def of(plan: Plan, cluster: Cluster, returning: Iterable[str]) -> ReplicaClock:
        """`returning`: the values whose gradients travel."""
        gradients, tied = set(returning), len(plan.edges)
        ahead = [(i, e.source, t, e.bytes) for i, e in enumerate(plan.edges) for t in e.targets]
        back = []
        for i, edge in enumerate(plan.edges):
            chain = (edge.source, *edge.targets) if edge.value in gradients else ()
            back += [(i, b, a, edge.bytes) for a, b in pairwise(chain)]
        for i, one in enumerate(plan.tied):
            back += [(tied + i, b, a, one.bytes) for a, b in pairwise(one.stages)]
        again = [s.forward_seconds if s.recompute else 0.0 for s in plan.stages]
        return ReplicaClock(
            plan,
            cluster,
            ranks_of(plan.stages),
            [stage.forward_seconds for stage in plan.stages],
            [s.backward_seconds + more for s, more in zip(plan.stages, again, strict=True)],
            ahead,
            back,
        )

    @property
    def half_duplex(self) -> bool:
        return not all(level.full_duplex for level in self.cluster.levels)

    # -- streams ---------------------------------------------------------------------------

    def period(self, in_flight: Sequence[int]) -> float:
        """Seconds per microbatch of a stream, at least: busiest device, link, or round trip."""
        m = self.plan.training.num_microbatches
        traffic: dict[tuple[int, str], float] = defaultdict(float)
        for _, a, b, size in (*self.ahead, *self.back):
            for k in range(period := math.lcm(len(self.ranks[a]), len(self.ranks[b]))):
                x, y = self._rank(a, k), self._rank(b, k)
                traffic[x, "sent"] += self._seconds(x, y, size) / period
                traffic[y, "received"] += self._seconds(x, y, size) / period
        for one in self.plan.tied:
            x = self.ranks[one.stages[0]][0]
            for holder in one.stages[1:]:
                y = self.ranks[holder][0]
                traffic[x, "sent"] += self._seconds(x, y, one.bytes) / m
                traffic[y, "received"] += self._seconds(x, y, one.bytes) / m
        worst = 0.0
        for s, ranks in enumerate(self.ranks):
            pair = [(traffic[x, "sent"], traffic[x, "received"]) for x in ranks]
            link = max(map(sum if self._shares(s) else max, pair))
            compute = (self.forward[s] + self.backward[s]) / len(ranks)
            trip = self._round_trip(s) / (len(ranks) * in_flight[s])
            worst = max(worst, compute, link + self._reduction(s) / m, trip)
        return worst

    def _shares(self, s: int) -> bool:
        """Does a link next to the stage carry both directions in turn?"""
        near = [self.ranks[t][0] for t in (s - 1, s + 1) if 0 <= t < len(self.ranks)]
        return any(
            not self.cluster.level_between(a, b).full_duplex for a in self.ranks[s] for b in near
        )

    def _round_trip(self, first: int) -> float:
        ends = {first: self.forward[first]}
        for t in range(first + 1, len(self.ranks)):
            into = [
                ends[a] + self._least(a, t, x) for _, a, b, x in self.ahead if b == t and a in ends
            ]
            if into:
                ends[t] = max(into) + self.forward[t]
        done: dict[int, float] = {}
        for t in reversed(range(first, len(self.ranks))):
            into = [
                done[a] + self._least(a, t, x) for _, a, b, x in self.back if b == t and a in done
            ]
            into += [ends[t]] if t in ends else []
            if into:
                done[t] = max(into) + self.backward[t]
        return done[first]

    def _least(self, a: int, b: int, size: int) -> float:
        return min(self._seconds(x, y, size) for x in self.ranks[a] for y in self.ranks[b])

    # -- with a flush ------------------------------------------------------------------------

    def makespan(self, warmup: Sequence[int]) -> float:
        """Seconds of one minibatch, links being full duplex (half duplex: at least).

        The least solution of "nothing starts before what it waits for".
        """
        begin: dict[Event, float] = defaultdict(float)
        waits = list(self._waits(warmup))
        moved = True
        while moved:
            moved = False
            for before, after, seconds in waits:
                least = begin[before] + seconds
                if least > begin[after] * (1 + 1e-15) + 1e-300:
                    begin[after], moved = least, True
        return begin["end", 0, 0, 0]

    def _waits(self, warmup: Sequence[int]) -> Iterator[Wait]:
        m, stages = self.plan.training.num_microbatches, range(len(self.ranks))
        for k in range(m):
            for s in stages:
                yield from self._program(s, k, warmup)
                yield from self._compute("F", s, k, warmup)
            for s in reversed(stages):
                yield from self._compute("B", s, k, warmup)
        clips = self.plan.training.max_grad_norm is not None
        for s in stages:
            for k in range(max(0, m - len(self.ranks[s])), m):
                yield ("B done", s, 0, k), ("reduced", s, 0, 0), self._reduction(s)
            yield ("reduced", s, 0, 0), ("norms", 0, 0, 0), 0.0
            yield ("reduced", s, 0, 0), ("step", s, 0, 0), 0.0
            if clips:
                yield ("norms", 0, 0, 0), ("step", s, 0, 0), self._norms()
            yield ("step", s, 0, 0), ("end", 0, 0, 0), 0.0
        for i, one in enumerate(self.plan.tied):
            owner = one.stages[0]
            for holder in one.stages[1:]:
                x, y = self.ranks[owner][0], self.ranks[holder][0]
                sent: Event = ("weights", i, holder, 0)
                yield ("step", owner, 0, 0), sent, 0.0
                yield ("step", holder, 0, 0), sent, 0.0
                yield sent, ("end", 0, 0, 0), self._seconds(x, y, one.bytes)
                for j, other in enumerate(self.plan.tied[:i]):
                    if owner == other.stages[0] and holder in other.stages[1:]:
                        late = self._seconds(x, y, other.bytes)
                        yield ("weights", j, holder, 0), sent, late

    def _program(self, s: int, k: int, warmup: Sequence[int]) -> Iterator[Wait]:
        """A replica's own order: `depth` forwards, then one forward and one backward."""
        r, m = len(self.ranks[s]), self.plan.training.num_microbatches
        depth = self._depth(s, k, warmup)
        if k >= r:
            yield ("F done", s, 0, k - r), ("F", s, 0, k), 0.0
            yield ("B done", s, 0, k - r), ("B", s, 0, k), 0.0
        if k >= (depth + 1) * r:
            yield ("B done", s, 0, k - (depth + 1) * r), ("F", s, 0, k), 0.0
        last = k + r * ((m - 1 - k) // r)
        yield ("F done", s, 0, min(k + depth * r, last)), ("B", s, 0, k), 0.0

    def _depth(self, s: int, k: int, warmup: Sequence[int]) -> int:
        r, m = len(self.ranks[s]), self.plan.training.num_microbatches
        return min(warmup[s], len(range(k % r, m, r)) - 1)

    def _compute(self, kind: str, s: int, k: int, warmup: Sequence[int]) -> Iterator[Wait]:
        """One forward or backward, then its messages; a message that many too early is awaited."""
        table = self.ahead if kind == "F" else self.back
        before: Event = (kind, s, 0, k)
        gap = (self.forward if kind == "F" else self.backward)[s]
        for n, (edge, a, b, size) in enumerate(table):
            if a != s:
                continue
            x, y = self._rank(a, k), self._rank(b, k)
            turn = math.lcm(len(self.ranks[a]), len(self.ranks[b]))
            early = k - self._window(min(a, b), max(a, b), warmup) * turn
            handed: Event = (f"{kind} handed {n}", edge, b, k)
            wire: Event = (f"{kind} wire {n}", edge, b, k)
            yield before, handed, gap
            if early >= 0:
                yield (f"{kind} wire {n}", edge, b, early), handed, self._seconds(x, y, size)
            yield handed, wire, 0.0
            yield from self._in_turn(kind, table, n, k, turn)
            for free in self._slot(kind, b, k, warmup):
                yield free, wire, 0.0
            yield wire, (kind, b, 0, k), self._seconds(x, y, size)
            before, gap = handed, 0.0
        yield before, (f"{kind} done", s, 0, k), gap

    def _in_turn(
        self, kind: str, table: list[Message], n: int, k: int, turn: int
    ) -> Iterator[Wait]:
        """The message before on the same link: of this microbatch, else of `turn` earlier."""
        edge, a, b, _ = table[n]
        same = [i for i, one in enumerate(table) if one[1:3] == (a, b)]
        place = same.index(n)
        if not place and k < turn:
            return
        before, at = (same[place - 1], k) if place else (same[-1], k - turn)
        late = self._seconds(self._rank(a, k), self._rank(b, k), table[before][3])
        wires = (f"{kind} wire {before}", table[before][0], b, at)
        yield wires, (f"{kind} wire {n}", edge, b, k), late

    def _slot(self, kind: str, s: int, k: int, warmup: Sequence[int]) -> Iterator[Event]:
        """What must be over before a replica has room for message k."""
        r, m = len(self.ranks[s]), self.plan.training.num_microbatches
        pool = min(min(warmup[s] + 1, len(range(0, m, r))) + 1, len(range(0, m, r)))
        if kind == "F" and k >= pool * r:
            yield "B done", s, 0, k - pool * r
        if kind == "B":
            yield "F done", s, 0, k
            if k >= 2 * r:
                yield "B done", s, 0, k - 2 * r

    def _window(self, first: int, last: int, warmup: Sequence[int]) -> int:
        a, b = len(self.ranks[first]), len(self.ranks[last])
        return max(2, 1 + math.ceil((warmup[first] * a - warmup[last] * b) / math.lcm(a, b)))

    # -- links -------------------------------------------------------------------------------

    def _rank(self, s: int, k: int) -> int:
        return self.ranks[s][k % len(self.ranks[s])]

    def _seconds(self, a: int, b: int, size: float) -> float:
        level = self.cluster.level_between(a, b)
        return size / level.bytes_per_second + level.latency_seconds

    def _reduction(self, s: int) -> float:
        """Ring all-reduce of the stage's gradients over the slowest level that it spans."""
        ranks = self.ranks[s]
        levels = [self.cluster.level_between(ranks[0], other) for other in ranks[1:]]
        if not levels:
            return 0.0
        slowest = min(level.bytes_per_second for level in levels)
        latency = max(level.latency_seconds for level in levels)
        piece = self.plan.stages[s].trainable_bytes / len(ranks)
        return 2 * (len(ranks) - 1) * (piece / slowest + latency)

    def _norms(self) -> float:
        every = [rank for ranks in self.ranks for rank in ranks]
        between = (self.cluster.level_between(every[0], other) for other in every[1:])
        return max((level.latency_seconds for level in between), default=0.0)
