"""The makespan where no two kinds of messages share a link, without a walk in order of time.

With full duplex a link carries the activations of one stage for one other, or the gradients on
their way back: its messages go in the order of their microbatches whatever else happens.  So
when a message arrives follows from when its two ends were ready and when the one before arrived,
and stages can be followed in any order, each as far as what it needs is known.  The sums are
those of the walk in `makespan`, and so are their results, to the last digit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

Hop = tuple[int, int]


class _Link:
    """Messages of one kind from one stage to another, microbatch by microbatch."""

    __slots__ = ("arrived", "posted", "seconds", "sent", "sleepers")

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.sent: list[float] = []  # when each was handed over
        self.posted: list[float] = []  # when there was a slot for it
        self.arrived: list[float] = []
        self.sleepers: list[int] = []

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
        hops: Mapping[str, Mapping[Hop, float]],
        programs: Sequence[Sequence[tuple[bool, int]]],
        warmup: Sequence[int],
        num_microbatches: int,
        slots: int,
    ):
        self.forward, self.backward = forward, backward
        self.programs, self.warmup, self.m, self.slots = programs, warmup, num_microbatches, slots
        self.ready: list[int] = []
        stages = range(len(forward))
        self.into: dict[str, list[list[_Link]]] = {}
        self.out: dict[str, list[list[tuple[_Link, int]]]] = {}
        for kind, table in hops.items():
            self.into[kind], self.out[kind] = [[] for _ in stages], [[] for _ in stages]
            for a, b in sorted(table, key=lambda hop: (abs(hop[0] - hop[1]), hop)):
                link = _Link(table[a, b])
                window = max(2, 1 + warmup[min(a, b)] - warmup[max(a, b)])
                self.into[kind][b].append(link)
                self.out[kind][a].append((link, window))

    @staticmethod
    def applies(hops: Mapping[str, Mapping[Hop, float]]) -> bool:
        """Whether the hops of all kinds go their own ways, on full-duplex links."""
        ahead = (hop for kind in ("forward", "final") for hop in hops[kind])
        return all(a < b for a, b in ahead) and all(a > b for a, b in hops["backward"])

    def seconds(self) -> float | None:
        """When the last stage is done; None: they wait for each other for ever."""
        stages = [self._stage(s) for s in range(len(self.forward))]
        ends: list[float] = []
        self.ready += reversed(range(len(stages)))
        while self.ready:
            s = self.ready.pop()
            found = next(stages[s])
            if isinstance(found, _Link):
                found.sleepers.append(s)
            else:
                ends.append(found)
        return max(ends) if len(ends) == len(stages) else None

    def _stage(self, s: int) -> Iterator[_Link | float]:
        """Links that the stage waits for, and at last when it was done."""
        now, ready = 0.0, self.ready
        into = {True: self.into["forward"][s], False: self.into["backward"][s]}
        out = {True: self.out["forward"][s], False: self.out["backward"][s]}
        taken = {True: self.forward[s], False: self.backward[s]}
        pool = min(self.warmup[s] + 2, self.m)  # receive slots: in flight, and one travelling

        def post(kind: bool) -> None:
            for link in into[kind]:
                link.posted.append(now)
                link.move(ready)

        for _ in range(pool):
            post(True)
        forwards = backwards = 0
        for kind, k in self.programs[s]:
            for link in into[kind]:
                while len(link.arrived) <= k:
                    yield link
                if link.arrived[k] > now:
                    now = link.arrived[k]
            now += taken[kind]
            for link, window in out[kind]:
                if k >= window:
                    while len(link.arrived) <= k - window:
                        yield link
                    if link.arrived[k - window] > now:
                        now = link.arrived[k - window]
                link.sent.append(now)
                link.move(ready)
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
        for link, _ in self.out["final"][s]:
            link.sent.append(now)
            link.move(ready)
        end = now
        for link in self.into["final"][s]:
            link.posted.append(now)
            link.move(ready)
        for link in self.into["final"][s]:
            while not link.arrived:
                yield link
            end = max(end, link.arrived[0])
        yield end
