"""The makespan where no two kinds of messages share a link, without a walk in order of time.

With full duplex a link carries the activations of one stage for one other, or the gradients on
their way back: its messages go in the order of their microbatches whatever else happens.  So
when a message arrives follows from when its two ends were ready and when the one before arrived,
and stages can be followed in any order, each as far as what it needs is known.  The sums are
those of the walk in `makespan`, and so are their results, to the last digit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias, Union

Hop: TypeAlias = tuple[int, int]
Kind: TypeAlias = Literal["forward", "backward", "final"]
Compute: TypeAlias = tuple[int, bool, int]  # stage, is forward, microbatch
Event: TypeAlias = Union[Compute, tuple["_Link", int], None]  # noqa: UP007  (a name in quotes)


class _Link:
    """Messages of one kind from one stage to another, microbatch by microbatch."""

    __slots__ = (
        "arrived", "hop", "kind", "posted", "posted_after", "seconds", "sent", "sent_after",
        "sleepers",
    )  # fmt: skip

    def __init__(self, hop: Hop, kind: Kind, seconds: float):
        self.hop, self.kind, self.seconds = hop, kind, seconds
        self.sent: list[float] = []  # when each was handed over
        self.sent_after: list[Event] = []  # what decided that time
        self.posted: list[float] = []  # when there was a slot for it
        self.posted_after: list[Event] = []
        self.arrived: list[float] = []
        self.sleepers: list[int] = []

    def send(self, now: float, after: Event, ready: list[int]) -> None:
        self.sent.append(now)
        self.sent_after.append(after)
        self.move(ready)

    def post(self, now: float, after: Event, ready: list[int]) -> None:
        self.posted.append(now)
        self.posted_after.append(after)
        self.move(ready)

    def cause(self, k: int) -> Event:
        """What message k set out after."""
        before = self.arrived[k - 1] if k else 0.0
        found: Event = (self, k - 1) if k else self.sent_after[0]
        if self.sent[k] > before:
            before, found = self.sent[k], self.sent_after[k]
        return self.posted_after[k] if self.posted[k] > before else found

    def move(self, ready: list[int]) -> None:
        """Add the arrivals that follow from what is known; who waited for them is ready."""
        sent, posted, arrived = self.sent, self.posted, self.arrived
        first = len(arrived)
        last = min(len(sent), len(posted))
        if first == last:
            return
        before = arrived[-1] if arrived else 0.0
        for k in range(first, last):
            if sent[k] > before:
                before = sent[k]
            if posted[k] > before:
                before = posted[k]
            before += self.seconds
            arrived.append(before)
        if self.sleepers:
            ready += self.sleepers
            self.sleepers.clear()


class Recurrence:
    """Follows the stages of one minibatch.

    Args:
        forward, backward: seconds of one microbatch on each stage.
        hops: by kind ("forward", "backward", "final") seconds of each hop.
        programs: (is forward, microbatch) of each stage in order.
        warmup: forwards of each stage before its first backward, beyond one.
        slots: gradients that a stage expects at a time.
    """

    def __init__(
        self,
        forward: Sequence[float],
        backward: Sequence[float],
        hops: Mapping[Kind, Mapping[Hop, float]],
        programs: Sequence[Sequence[tuple[bool, int]]],
        warmup: Sequence[int],
        num_microbatches: int,
        slots: int,
    ):
        self.forward, self.backward = forward, backward
        self.programs, self.warmup, self.m, self.slots = programs, warmup, num_microbatches, slots
        self.ready: list[int] = []
        self.end = 0.0  # when the last stage is done
        self.last: Event = None  # what decides that
        self.cause: dict[Compute, Event] = {}
        stages = range(len(forward))
        self.into: dict[Kind, list[list[_Link]]] = {}
        self.out: dict[Kind, list[list[tuple[_Link, int]]]] = {}
        for kind, table in hops.items():
            self.into[kind], self.out[kind] = [[] for _ in stages], [[] for _ in stages]
            for a, b in sorted(table, key=lambda hop: (abs(hop[0] - hop[1]), hop)):
                link = _Link((a, b), kind, table[a, b])
                window = max(2, 1 + warmup[min(a, b)] - warmup[max(a, b)])
                self.into[kind][b].append(link)
                self.out[kind][a].append((link, window))

    @staticmethod
    def applies(hops: Mapping[Kind, Mapping[Hop, float]]) -> bool:
        """Whether the hops of all kinds go their own ways, on full-duplex links."""
        ahead = (*hops["forward"], *hops["final"])
        return all(a < b for a, b in ahead) and all(a > b for a, b in hops["backward"])

    def run(self) -> bool:
        """Find `end`; False: stages wait for each other for ever."""
        stages = [self._stage(s) for s in range(len(self.forward))]
        running = len(stages)
        self.ready += reversed(range(running))
        while self.ready:
            s = self.ready.pop()
            link = next(stages[s], None)
            if link is None:
                running -= 1
            else:
                link.sleepers.append(s)
        return not running

    def path(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[Hop, Kind, int], ...]]:
        """How often forward and backward of each stage, and each hop, are on a longest path."""
        computed = {True: [0] * len(self.forward), False: [0] * len(self.forward)}
        hops: Counter[tuple[Hop, Kind]] = Counter()
        event = self.last
        while event is not None:
            if len(event) == 3:
                computed[event[1]][event[0]] += 1
                event = self.cause[event]
            else:
                link, k = event
                hops[link.hop, link.kind] += 1
                event = link.cause(k)
        found = tuple((hop, kind, times) for (hop, kind), times in sorted(hops.items()))
        return tuple(computed[True]), tuple(computed[False]), found

    def _done(self, now: float, because: Event) -> None:
        if self.last is None or now > self.end:
            self.end, self.last = now, because

    def _stage(self, s: int) -> Iterator[_Link]:
        """Links that the stage waits for."""
        now, ready = 0.0, self.ready
        because: Event = None  # what decided `now`
        into = {True: self.into["forward"][s], False: self.into["backward"][s]}
        out = {True: self.out["forward"][s], False: self.out["backward"][s]}
        taken = {True: self.forward[s], False: self.backward[s]}
        pool = min(self.warmup[s] + 2, self.m)  # receive slots: in flight, and one travelling

        def post(kind: bool) -> None:
            for link in into[kind]:
                link.post(now, because, ready)

        for _ in range(pool):
            post(True)
        forwards = backwards = 0
        for kind, k in self.programs[s]:
            for link in into[kind]:
                while len(link.arrived) <= k:
                    yield link
                if link.arrived[k] > now:
                    now, because = link.arrived[k], (link, k)
            self.cause[s, kind, k] = because
            now, because = now + taken[kind], (s, kind, k)
            for link, window in out[kind]:
                if k >= window:
                    while len(link.arrived) <= k - window:
                        yield link
                    if link.arrived[k - window] > now:
                        now, because = link.arrived[k - window], (link, k - window)
                link.send(now, because, ready)
            # Gradients are expected for the next microbatches that went forward.
            if kind:
                forwards += 1
                if forwards - backwards <= self.slots:
                    post(False)
            else:
                backwards += 1
                if k + self.slots < forwards:
                    post(False)
                if k + pool < self.m:
                    post(True)
        self._done(now, because)
        for link, _ in self.out["final"][s]:
            link.send(now, because, ready)
        for link in self.into["final"][s]:
            link.post(now, because, ready)
        for link in self.into["final"][s]:
            while not link.arrived:
                yield link
            self._done(link.arrived[0], (link, 0))
