"""Seconds of a pipeline from its stages, ranks and messages: loads, periods, makespans."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise, product, starmap
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pdcompile.cluster import GLOO, Cluster, Link, message_seconds, ring_seconds, slowest
from pdcompile.plan.makespan import End, EventWalk, Path
from pdcompile.plan.wires import DIRECTIONS, Direction, StagePair, Wire, by_distance
from pdcompile.schedule.fetches import Fetches, fetched_by, fetches
from pdcompile.schedule.registry import DEFAULT, kind_of
from pdcompile.schedule.turns import Pattern, horizon, in_turn, share_of, uneven

if TYPE_CHECKING:
    from pdcompile.plan.schema import Plan


#: stages, and seconds for each two ranks that take a microbatch, in turn
Sent: TypeAlias = list[tuple[StagePair, dict[StagePair, float]]]


class Message(NamedTuple):
    """Message from one stage to another for each microbatch; final ones once a minibatch, after the
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
        ranks: of each stage.
        messages: in the order in which a stage sends them.
        link: between two ranks.
        half_duplex: whether both directions share the links of a stage.
        reduced: bytes that the ranks of a stage reduce once an update.
        clips: whether an update waits for the norms of all ranks.
        schedule: whose order the ranks follow.
        again: of `backward`, forwards that run again; empty: none.
        homes: whether updates are made at homes: half of a reduction, the weights that come back,
            is after them.
        patterns: the turns in which the ranks of each stage take microbatches; empty: each in turn.
        paces: seconds of each rank of a stage, by those of the slowest; empty: they are all alike.
        once: whether nothing is sent for weights to come back from their homes.
        fetches: of weights that ranks get from their host to run a stage; empty: none.
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
    homes: bool = False
    patterns: Sequence[Pattern] = ()
    paces: Sequence[Sequence[float]] = ()
    once: bool = False
    fetches: Fetches = field(default_factory=dict)

    @cached_property
    def chains(self) -> int:
        """Number of pipelines of a rank each stage that go on side by side, as fast as each other:
        replicas that meet in reductions alone; 1 where that does not hold of all of them."""
        count, unlike = len(self.ranks[0]), any(map(uneven, filter(None, self.patterns)))
        unlike |= bool(self.fetches) or any(pace != 1 for own in self.paces for pace in own)
        if unlike or count == 1 or any(len(own) != count for own in self.ranks):
            return 1
        each = [{own[q] for own in self.ranks} for q in range(count)]
        if sum(map(len, each)) != len(set().union(*each)):
            return 1
        links = ([self.link(*pair) for pair in self._pairs(a, b)] for _, a, b, _ in self.messages)
        return count if all(one == first for first, *others in links for one in others) else 1

    @cached_property
    def straight(self) -> bool:
        """Has every stage one rank of its own?"""
        return self.chained and self.chains == 1 and len({*self.ranks}) == len(self.ranks)

    @cached_property
    def chained(self) -> bool:
        """Has every stage one rank in each of the `chains`?"""
        return all(len(own) == self.chains for own in self.ranks)

    @cached_property
    def hops(self) -> dict[Direction, dict[StagePair, float]]:
        """Seconds of a microbatch's messages on each hop, over the fastest ranks of its stages."""
        tables: dict[Direction, dict[StagePair, float]] = {kind: {} for kind in DIRECTIONS}
        between: dict[StagePair, list[Link]] = {}
        for kind, a, b, size in self.messages:
            links = between.get((a, b))
            if links is None:
                pairs = product(self.ranks[a], self.ranks[b])
                every = starmap(self.link, self._pairs(a, b)[:1] if self.chains > 1 else pairs)
                links = between[a, b] = list({id(one): one for one in every}.values())
            seconds = min(message_seconds(link, size) for link in links)
            tables[kind][a, b] = tables[kind].get((a, b), 0.0) + seconds
        return tables

    def traffic(self, num_microbatches: int) -> tuple[dict[int, float], dict[int, float]]:
        """Seconds per microbatch that each rank sends and receives."""
        sent: dict[int, float] = defaultdict(float)
        received: dict[int, float] = defaultdict(float)
        for kind, a, b, size in self.messages:
            # Final messages concern each replica once a minibatch, microbatches one of them each.
            final = kind == "final"
            pairs = _served(self.ranks, a, b) if final else self._pairs(a, b)
            if self.patterns and not final and not kind_of(self.schedule).updates_each:
                pairs = [pairs[k % len(pairs)] for k in range(num_microbatches)]
            every = num_microbatches if final else len(pairs)
            for x, y in pairs:
                seconds = message_seconds(self.link(x, y), size) / every
                sent[x] += seconds
                received[y] += seconds
        return sent, received

    def computing(self, s: int, num_microbatches: int) -> float:
        """Seconds per microbatch that the busiest rank of a stage computes."""
        turns, restarts = self._turns(s), not kind_of(self.schedule).updates_each
        count = num_microbatches if self.patterns and restarts else len(turns)
        seconds, own = self.forward[s] + self.backward[s], self.ranks[s]
        both = zip(self._paces(s), fetched_by(self.fetches, s, own), strict=True)
        each = [seconds * pace + brought for pace, brought in both]
        return max(one * len(share_of(turns, q, count)) for q, one in enumerate(each)) / count

    def loads(self, num_microbatches: int) -> list[float]:
        """Seconds per microbatch of each stage: its compute, or its busiest rank's links."""
        sent, received = self.traffic(num_microbatches)
        found = []
        for s, ranks in enumerate(self.ranks):
            both = [(sent.get(rank, 0.0), received.get(rank, 0.0)) for rank in ranks]
            link = max(map(sum if self.half_duplex[s] else max, both))
            compute = self.computing(s, num_microbatches)
            every = num_microbatches * kind_of(self.schedule).group(len(ranks))
            found.append(max(compute, link + self.reduction(s) / every))
        return found

    def serial(self, num_microbatches: int) -> float:
        """Seconds per microbatch where one thing is done at a time: no order takes longer, as
        something is always done."""
        sent, _ = self.traffic(num_microbatches)
        group = kind_of(self.schedule).group
        stages = [*enumerate(self.ranks)]
        once = [self.reduction(s) / group(len(ranks)) for s, ranks in stages]
        once += [message_seconds(self._among(), 0.0)] if self.clips else []
        each = [max(fetched_by(self.fetches, s, ranks)) for s, ranks in stages]
        each += (*self.forward, *self.backward, *sent.values())
        return math.fsum(each) + math.fsum(once) / num_microbatches

    def period(self, in_flight: Sequence[int], num_microbatches: int) -> float:
        """Seconds per microbatch of a stream: busiest device, link, or a round trip that is too
        long, where no rank of a stage is faster; at least, where stages have replicas."""
        worst = max(self.loads(num_microbatches))
        if not in_flight or any(min(own) < 1 for own in self.paces):
            return worst
        for (s, t), seconds in round_trips(self).items():
            ahead = horizon(self._turns(s), in_flight[s])
            ahead -= horizon(self._turns(t), in_flight[t] - 1)
            if ahead > 0:  # replicas whose turns are minibatches may hold more than stages before
                worst = max(worst, seconds / ahead)
        return worst

    def makespan(
        self, warmup: Sequence[int], num_microbatches: int, updates: Sequence[float] = ()
    ) -> float:
        """Seconds of one minibatch with a flush, from the first forward to the last update and what
        is sent after it.

        `updates`: seconds of each stage's; empty: it only sums gradients.

        Raises:
            ValueError: the stages wait for each other for ever (warm-up too small for the hops).
        """
        return self._end(self._walk(warmup, num_microbatches), updates).seconds

    def critical_path(self, warmup: Sequence[int], num_microbatches: int) -> Path:
        """A longest path of the schedule, where it is `chained`: its weighted sum is the makespan
        (with full duplex, and stages on ranks of their own).

        With the same warm-up and microbatches, every other partition whose stages have these hops
        takes at least this path's sum of its own seconds, because the order of programs and links
        is fixed.  Links where it is not, half-duplex ones and those that several stages of a rank
        share, are treated as if each hop had its own.
        """
        walk = self._walk(warmup, num_microbatches, fixed=True)
        return walk.path(self._end(walk, fixed=True))

    def _end(self, walk: EventWalk, updates: Sequence[float] = (), *, fixed: bool = False) -> End:
        finals = [
            (hop, (hop, pair) if fixed else pair, seconds)
            for hop, table in self._sent("final", fixed=fixed)
            for pair, seconds in table.items()
        ]
        norms = message_seconds(self._among(), 0.0) if self.clips else None
        reductions = [self.reduction(s) for s in range(len(self.ranks))]
        later = 0.5 if self.homes and not self.once else 0.0
        return walk.end(updates or reductions, later, norms, finals)

    def _walk(
        self, warmup: Sequence[int], num_microbatches: int, *, fixed: bool = False
    ) -> EventWalk:
        """The minibatch, followed to its end; `fixed`: no two hops share a link."""
        stages, ranks = range(len(self.ranks)), self.ranks
        shares = [(self._turns(s), self._paces(s)) for s in stages if self.patterns or self.paces]
        if self.chains > 1 and num_microbatches % self.chains == 0:
            ranks, shares = [own[:1] for own in ranks], []
            num_microbatches //= self.chains
        walk = EventWalk(
            self.forward, self.backward, ranks, warmup, num_microbatches, self.schedule,
            self.again, shares,
        )  # fmt: skip
        walk.fetches = self.fetches
        for kind in DIRECTIONS[:2]:
            sent = self._sent(kind, fixed=fixed)
            of_hop = defaultdict[StagePair, list[Mapping[StagePair, float]]](list)
            for hop, seconds in sent:
                of_hop[hop].append(seconds)
            for hop, listed in of_hop.items():
                wires = {}
                for pair in listed[0]:
                    half = not self.link(*pair).full_duplex
                    shared = not fixed and (half or walk.shares(*hop))
                    ends = (min(pair), max(pair)) if half else pair
                    each = tuple(one[pair] for one in listed)
                    wires[pair] = Wire(hop, kind, each, ends, walk.shared if shared else None)
                walk.join([wires[pair] for pair in self._pairs(*hop) if pair[0] in walk.held])
            walk.send_in_order(kind, [hop for hop, _ in sent])
        walk.run()
        return walk

    def _sent(self, kind: Direction, *, fixed: bool = False) -> Sent:
        """Messages in the order in which a stage sends them, without what stays inside a rank: the
        stages, and seconds for each two ranks that take a microbatch, in turn.

        Where ranks hold a stage each, or hops are `fixed`, all messages of a hop are one.
        """
        if self.chained and (fixed or len({*self.ranks}) == len(self.ranks)):
            table, final = self.hops[kind], kind == "final"
            hops = sorted(table, reverse=True) if final else sorted(table, key=by_distance)
            hops = [(a, b) for a, b in hops if self.ranks[a] != self.ranks[b]]
            return [(hop, dict.fromkeys(self._pairs(*hop), table[hop])) for hop in hops]
        pairs = partial(_served, self.ranks) if kind == "final" else self._pairs
        found: Sent = [
            ((a, b), {one: message_seconds(self.link(*one), size) for one in pairs(a, b)})
            for k, a, b, size in self.messages
            if k == kind and (self.ranks[a], self._turns(a)) != (self.ranks[b], self._turns(b))
        ]
        return found if kind == "final" else sorted(found, key=lambda one: by_distance(one[0]))

    def reduction(self, s: int, size: float | None = None) -> float:
        """Ring all-reduce of a stage's gradients, or of so many bytes, over its slowest level;
        half if none returns."""
        first, *others = self.ranks[s] if kind_of(self.schedule).trains else self.ranks[s][:1]
        link = slowest(self.link(first, other) for other in others) if not self.fetches else GLOO
        size = self.reduced[s] if size is None else size
        return ring_seconds(link, size, 1 + len(others)) / (1 + self.once)

    def _among(self) -> Link:
        first, *others = dict.fromkeys(rank for ranks in self.ranks for rank in ranks)
        return slowest(self.link(first, other) for other in others)

    def _pairs(self, a: int, b: int) -> list[tuple[int, int]]:
        """The ranks of two stages that take a microbatch, in turn."""
        first, second = self._turns(a), self._turns(b)
        turns = range(math.lcm(len(first), len(second)))
        ours, theirs = self.ranks[a], self.ranks[b]
        return [(ours[first[k % len(first)]], theirs[second[k % len(second)]]) for k in turns]

    def _paces(self, s: int) -> Sequence[float]:
        return self.paces[s] if self.paces else (1.0,) * len(self.ranks[s])

    def _turns(self, s: int) -> Pattern:
        return (self.patterns[s] if self.patterns else ()) or in_turn(len(self.ranks[s]))


def _served(ranks: Sequence[tuple[int, ...]], a: int, b: int) -> list[tuple[int, int]]:
    """Each rank of the later stage with the one of the earlier stage that serves it."""
    ours, theirs = ranks[a], ranks[b]
    return [(ours[k % len(ours)], theirs[k % len(theirs)]) for k in range(len(ranks[max(a, b)]))]


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
        plan.training.updates == "home",
        plan.spec.patterns,
        [stage.paces or (1.0,) * stage.replicas for stage in plan.stages],
        plan.spec.once,
        fetches(plan),
    )


def half_duplex(cluster: Cluster, ranks: Sequence[tuple[int, ...]]) -> list[bool]:
    """Answers, by stage, whether a link to a stage next to it carries both directions in turn."""
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


def round_trips(times: PipelineTimes) -> dict[StagePair, float]:
    """Seconds from the begin of a microbatch's forward on stage s to the end of its backward
    there, by way of stage t and no later one, for all s <= t that a path joins.

    They are the cycles of a stream: stage t runs the forward of microbatch k + w_t just before
    the backward of k, and stage s that backward just before the forward of k + w_s + 1, so that a
    round trip is made once in w_s + 1 - w_t microbatches (w times the replicas).  Every other
    cycle of the events is made of these and of one device's or one link's own.
    """
    found: dict[StagePair, float] = {}
    back = {(b, a): seconds for (a, b), seconds in times.hops["backward"].items()}
    for turn in range(len(times.forward)):
        up = _longest(turn, times.forward, times.hops["forward"])
        down = _longest(turn, times.backward, back)
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
