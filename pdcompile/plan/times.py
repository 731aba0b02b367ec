"""Seconds of a pipeline from its stages, ranks and messages: loads, periods, makespans."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from pdcompile.cluster import Cluster, Link, message_seconds, ring_seconds, slowest
from pdcompile.plan.makespan import DIRECTIONS, EventWalk, Timing, makespan
from pdcompile.plan.wires import Direction, StagePair, Wire
from pdcompile.schedule.registry import DEFAULT, kind_of

if TYPE_CHECKING:
    from pdcompile.plan.schema import Plan


class Message(NamedTuple):
    """What one stage sends another for each microbatch; final ones once a minibatch, after the
    last backward: sums of tied gradients to earlier stages, and new weights to later ones."""

    kind: Direction
    source: int
    target: int
    bytes: int


def messages_of(
    values: Iterable[tuple[Sequence[int], int, int | None]],
    tied: Iterable[tuple[Sequence[int], int]],
) -> list[Message]:
    """Every hop of one microbatch: who sends what to whom.

    A value goes directly from its stage to each stage that consumes it; its gradient goes from the
    last of these to the one before, …, to the first, to the source.  A tied parameter's gradient is
    chained in the same way once a minibatch; its new weights then go from the first holder to the
    others.

    Args:
        values: stages of each, its own first, bytes, and those of its gradient (None: none).
        tied: stages that hold each parameter, and its bytes.
    """
    found: list[Message] = []
    for chain, size, gradient in values:
        found += [Message("forward", chain[0], target, size) for target in chain[1:]]
        if gradient is not None:
            found += [Message("backward", b, a, gradient) for a, b in pairwise(chain)]
    for chain, size in tied:
        found += [Message("final", b, a, size) for a, b in reversed([*pairwise(chain)])]
        found += [Message("final", chain[0], other, size) for other in chain[1:]]
    return found


@dataclass(frozen=True)
class PipelineTimes:
    """The seconds of a pipeline's stages on their ranks, and its messages.

    Args:
        forward, backward: of one microbatch on one rank of each stage.
        ranks: of each stage; they take microbatches in turn.
        messages: in the order in which a stage sends them.
        link: between two ranks.
        half_duplex: whether both directions share the links of a stage.
        reduced: bytes that the ranks of a stage reduce once an update.
        clips: whether an update waits for the norms of all ranks.
        schedule: whose order the ranks follow.
        again: of `backward`, forwards that run again; empty: none.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    ranks: Sequence[tuple[int, ...]]
    messages: Sequence[Message]
    link: Callable[[int, int], Link]
    half_duplex: Sequence[bool]
    reduced: Sequence[int]
    clips: bool = False
    schedule: str = DEFAULT
    again: Sequence[float] = ()

    @property
    def straight(self) -> bool:
        """Has every stage one rank of its own?"""
        alone = len(set(self.ranks)) == len(self.ranks)
        return alone and all(len(ranks) == 1 for ranks in self.ranks)

    @cached_property
    def timing(self) -> Timing:
        """One microbatch over the fastest ranks of each stage: all there is without replicas."""
        tables: dict[Direction, dict[StagePair, float]] = {kind: {} for kind in DIRECTIONS}
        between: dict[StagePair, list[Link]] = {}
        for kind, a, b, size in self.messages:
            links = between.get((a, b))
            if links is None:
                every = (self.link(x, y) for x in self.ranks[a] for y in self.ranks[b])
                links = between[a, b] = list({id(one): one for one in every}.values())
            seconds = min(message_seconds(link, size) for link in links)
            tables[kind][a, b] = tables[kind].get((a, b), 0.0) + seconds
        return Timing(
            tuple(self.forward),
            tuple(self.backward),
            tables["forward"],
            tables["backward"],
            tables["final"],
            not any(self.half_duplex),
            tuple(self.again),
        )

    def traffic(self, num_microbatches: int) -> tuple[dict[int, float], dict[int, float]]:
        """Seconds per microbatch that each rank sends and receives."""
        sent: dict[int, float] = defaultdict(float)
        received: dict[int, float] = defaultdict(float)
        if self.straight:
            for kind in DIRECTIONS:
                every = num_microbatches if kind == "final" else 1
                for (a, b), seconds in self.timing.of_kind(kind).items():
                    sent[self.ranks[a][0]] += seconds / every
                    received[self.ranks[b][0]] += seconds / every
            return sent, received
        for kind, a, b, size in self.messages:
            # Final messages concern each replica once a minibatch, microbatches one of them each.
            pairs, final = self._pairs(a, b), kind == "final"
            pairs = pairs[: len(self.ranks[max(a, b)])] if final else pairs
            every = num_microbatches if final else len(pairs)
            for x, y in pairs:
                seconds = message_seconds(self.link(x, y), size) / every
                sent[x] += seconds
                received[y] += seconds
        return sent, received

    def loads(self, num_microbatches: int) -> list[float]:
        """Seconds per microbatch of each stage: its compute, or its busiest rank's links."""
        sent, received = self.traffic(num_microbatches)
        found = []
        for s, ranks in enumerate(self.ranks):
            both = [(sent.get(rank, 0.0), received.get(rank, 0.0)) for rank in ranks]
            link = max(map(sum if self.half_duplex[s] else max, both))
            compute = (self.forward[s] + self.backward[s]) / len(ranks)
            every = num_microbatches * kind_of(self.schedule).group(len(ranks))
            found.append(max(compute, link + self.reduction(s) / every))
        return found

    def serial(self, num_microbatches: int) -> float:
        """Seconds per microbatch where one thing is done at a time: no order takes longer, as
        something is always done."""
        sent, _ = self.traffic(num_microbatches)
        group = kind_of(self.schedule).group
        stages = enumerate(self.ranks)
        once = [self.reduction(s) / group(len(ranks)) for s, ranks in stages]
        once += [message_seconds(self._among(), 0.0)] if self.clips else []
        each = (*self.forward, *self.backward, *sent.values())
        return math.fsum(each) + math.fsum(once) / num_microbatches

    def period(self, in_flight: Sequence[int], num_microbatches: int) -> float:
        """Seconds per microbatch of a stream: busiest device, link, or a round trip that is too
        long; at least, where stages have replicas."""
        worst = max(self.loads(num_microbatches))
        if not in_flight:
            return worst
        for (s, t), seconds in round_trips(self.timing).items():
            ahead = len(self.ranks[s]) * in_flight[s] - len(self.ranks[t]) * (in_flight[t] - 1)
            worst = max(worst, seconds / ahead)
        return worst

    def makespan(self, warmup: Sequence[int], num_microbatches: int) -> float:
        """Seconds of one minibatch with a flush.  Raises ValueError as `makespan` does."""
        if self.straight and not self.clips:
            return makespan(self.timing, warmup, num_microbatches, self.schedule)
        walk = EventWalk(
            self.forward, self.backward, self.ranks, warmup, num_microbatches, self.schedule,
            self.again,
        )  # fmt: skip
        for kind in DIRECTIONS[:2]:
            listed = [one for one in self._sent if one.kind == kind]
            pairs: dict[StagePair, list[int]] = {}
            for one in listed:
                pairs.setdefault((one.source, one.target), []).append(one.bytes)
            for (a, b), sizes in pairs.items():
                wires = []
                for x, y in self._pairs(a, b):
                    link = self.link(x, y)
                    seconds = tuple(message_seconds(link, size) for size in sizes)
                    half = any(self.half_duplex) and not link.full_duplex
                    ends = (min(x, y), max(x, y)) if half else (x, y)
                    shared = walk.shared if half or walk.shares(a, b) else None
                    wires.append(Wire((a, b), kind, seconds, ends, shared))
                walk.join(wires)
            walk.send_in_order(kind, [(one.source, one.target) for one in listed])
        walk.run()
        return walk.updated(
            [self.reduction(s) for s in range(len(self.ranks))],
            message_seconds(self._among(), 0.0) if self.clips else None,
            [
                ((a, b), pair, message_seconds(self.link(*pair), size))
                for kind, a, b, size in self._sent
                if kind == "final"
                for pair in self._pairs(a, b)[: len(self.ranks[max(a, b)])]
            ],
        )

    @property
    def _sent(self) -> list[Message]:
        """Without what stays inside a rank."""
        return [one for one in self.messages if self.ranks[one.source] != self.ranks[one.target]]

    def reduction(self, s: int) -> float:
        """Ring all-reduce of the stage's gradients over the slowest level that it spans."""
        first, *others = self.ranks[s]
        link = slowest(self.link(first, other) for other in others)
        return ring_seconds(link, self.reduced[s], 1 + len(others))

    def _among(self) -> Link:
        first, *others = dict.fromkeys(rank for ranks in self.ranks for rank in ranks)
        return slowest(self.link(first, other) for other in others)

    def _pairs(self, a: int, b: int) -> list[tuple[int, int]]:
        """The ranks of two stages that take a microbatch, in turn; the first ones are each rank
        of b, with the one of a that serves it."""
        ours, theirs = self.ranks[a], self.ranks[b]
        turns = range(math.lcm(len(ours), len(theirs)))
        return [(ours[k % len(ours)], theirs[k % len(theirs)]) for k in turns]


def times_of(plan: Plan, cluster: Cluster, returning: Collection[str]) -> PipelineTimes:
    """The seconds of a plan's stages and edges; `returning`: values whose gradients travel."""
    ranks = plan.ranks
    chains = (
        ((edge.source, *edge.targets), edge.bytes, edge.bytes if edge.value in returning else None)
        for edge in plan.edges
    )
    messages = messages_of(chains, ((one.stages, one.bytes) for one in plan.tied))
    return PipelineTimes(
        [stage.forward_seconds for stage in plan.stages],
        [stage.backward_pass_seconds for stage in plan.stages],
        ranks,
        messages,
        cluster.level_between,
        half_duplex(cluster, ranks),
        [stage.trainable_bytes for stage in plan.stages],
        plan.training.joint,
        plan.training.schedule,
        [stage.backward_pass_seconds - stage.backward_seconds for stage in plan.stages],
    )


def half_duplex(cluster: Cluster, ranks: Sequence[tuple[int, ...]]) -> list[bool]:
    """For each stage whether a link to a stage next to it carries both directions in turn."""
    last = len(ranks) - 1
    return [
        any(
            not cluster.level_between(a, b).full_duplex
            for near in (s - 1, s + 1)
            if 0 <= near <= last
            for a in own
            for b in ranks[near]
        )
        for s, own in enumerate(ranks)
    ]


def round_trips(timing: Timing) -> dict[StagePair, float]:
    """Seconds from the begin of a microbatch's forward on stage s to the end of its backward
    there, by way of stage t and no later one, for all s <= t that a path joins.

    They are the cycles of a stream: stage t runs the forward of microbatch k + w_t just before
    the backward of k, and stage s that backward just before the forward of k + w_s + 1, so that a
    round trip is made once in w_s + 1 - w_t microbatches (w times the replicas).  Every other
    cycle of the events is made of these and of one device's or one link's own.
    """
    found: dict[StagePair, float] = {}
    back = {(b, a): seconds for (a, b), seconds in timing.backward_hops.items()}
    for turn in range(len(timing.forward)):
        up = _longest(turn, timing.forward, timing.forward_hops)
        down = _longest(turn, timing.backward, back)
        found |= {(s, turn): up[s] + down[s] for s in up if s in down}
    return found


def _longest(
    end: int, stages: Sequence[float], hops: Mapping[StagePair, float]
) -> dict[int, float]:
    """Seconds of the longest path from each stage to a later one, both of them included."""
    found = {end: stages[end]}
    for s in reversed(range(end)):
        onward = [x + found[b] for (a, b), x in hops.items() if a == s and b in found]
        if onward:
            found[s] = stages[s] + max(onward)
    return found
