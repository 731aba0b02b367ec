"""PipelineSpec: the few numbers of a plan that decide its schedule.

Small and hashable, so that programs can be cached by it.  Who talks to whom is derived here,
once, for both ends of every transfer: a send and its receive cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from pdcompile.schedule.instruction import Kind
from pdcompile.schedule.registry import ScheduleKind, kind_of
from pdcompile.schedule.turns import (
    Pattern,
    horizon,
    in_turn,
    largest_share,
    share_of,
    uneven,
    window,
)

if TYPE_CHECKING:
    from pdcompile.plan.schema import Edge, TiedParameter

FORWARD_ONLY_SLOTS = 2
#: data transfers and collectives of a rank that may be unfinished in device order: one group call
OPERATIONS = 1
#: of gradients that replicas sum at one time: enough for a link's full rate, and to overlap
BUCKET_BYTES = 4 << 20


class Hop(NamedTuple):
    """One end of the transfers of an edge (or tied parameter) between two stages.

    `window`: how many sends of one channel may be in flight before the oldest is waited for.
    """

    kind: Kind
    edge: int
    stage: int  # at the other end
    window: int
    local: bool = False  # both stages are on one rank: nothing is sent, and nobody waits
    ambiguous: bool = False  # the rank at the other end holds more than this stage
    peer: int = -1  # the rank at the other end; −1: the replica that takes the microbatch


class Hops(NamedTuple):
    """All transfers of a stage, by the moment at which they happen."""

    before_forward: tuple[Hop, ...] = ()  # received
    after_forward: tuple[Hop, ...] = ()  # sent
    before_backward: tuple[Hop, ...] = ()
    after_backward: tuple[Hop, ...] = ()
    sums_in: tuple[Hop, ...] = ()  # of tied gradients, once an update, from later holders
    sums_out: tuple[Hop, ...] = ()
    after_step: tuple[Hop, ...] = ()  # the owner's new weights
    weights: tuple[Hop, ...] = ()  # received from owners


class Broadcast(NamedTuple):
    """A tensor that one rank has and others need: a loss, an output."""

    kind: Kind
    item: int  # which output
    microbatch: int
    root: int
    receivers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """Parts of a plan that the schedule functions read.  `ranks[s][q]`: replica q of stage s."""

    schedule: str  # its name, or its tasks: see `kind_of`
    num_microbatches: int
    warmup: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    edges: tuple[Edge, ...]
    tied: tuple[TiedParameter, ...]
    clipping: bool
    homes: bool = False  # of updates are spread over the replicas of a stage
    patterns: tuple[Pattern, ...] = ()  # of each stage, see `turns`; empty: each in turn
    once: bool = False  # replicas of a stage read its weights in one memory
    fetched: bool = False  # which is not that of their devices

    @property
    def kind(self) -> ScheduleKind:
        return kind_of(self.schedule)

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def num_ranks(self) -> int:
        """Ranks are numbered through; one that no stage uses has a column of its own."""
        return 1 + max(rank for ranks in self.ranks for rank in ranks)

    @property
    def holders(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Every rank that holds stages, with them: by its first stage, then by replica."""
        found: dict[int, tuple[int, ...]] = {}
        for stage, ranks in enumerate(self.ranks):
            for rank in ranks:
                found[rank] = (*found.get(rank, ()), stage)
        return tuple(found.items())

    def turns(self, stage: int) -> Pattern:
        """The replicas of a stage in the order in which they take microbatches, over and over."""
        found = self.patterns[stage] if self.patterns else ()
        return found or in_turn(len(self.ranks[stage]))

    def rank(self, stage: int, microbatch: int, minibatch: int = 0) -> int:
        """The rank that takes a microbatch, the same one forward and backward.

        Where every microbatch is a minibatch turns go on from one minibatch to the next.
        """
        turn, turns = microbatch + minibatch * self.kind.updates_each, self.turns(stage)
        return self.ranks[stage][turns[turn % len(turns)]]

    def share(
        self, stage: int, replica: int, num_microbatches: int, minibatch: int = 0
    ) -> Sequence[int]:
        """The microbatches of a minibatch that a replica takes."""
        turns = self.turns(stage)
        first = minibatch * self.kind.updates_each % len(turns)
        return share_of(turns, replica, num_microbatches, first)

    def roots(self, num_microbatches: int, minibatch: int = 0) -> tuple[int, ...]:
        """The ranks of the last stage that have a microbatch."""
        last, indices = len(self.ranks) - 1, range(num_microbatches)
        return tuple(dict.fromkeys(self.rank(last, i, minibatch) for i in indices))

    def losses(self, num_microbatches: int, minibatch: int = 0) -> list[Broadcast]:
        """Broadcasts from every rank of the last stage that has a microbatch to all others."""
        roots = self.roots(num_microbatches, minibatch)
        return [Broadcast(Kind.LOSS, -1, -1, root, self.others(root)) for root in roots]

    def others(self, rank: int) -> tuple[int, ...]:
        return tuple(one for one in range(self.num_ranks) if one != rank)

    def group(self, stage: int) -> int:
        """Minibatches whose gradients one update of the stage averages."""
        return self.kind.group(len(self.ranks[stage]))

    def cycle(self, stage: int) -> int:
        """Calls after which whose turn it is repeats on a stage."""
        return len(self.turns(stage)) if self.kind.updates_each else 1

    @property
    def period(self) -> int:
        """Calls after which whose turn it is repeats on all stages, and programs with it."""
        return lcm(*map(self.cycle, range(len(self.ranks))))

    @property
    def rescales(self) -> bool:
        """True if learning rates are by how seldom a replica has its turn."""
        return self.kind.alone and any(len(ranks) > 1 for ranks in self.ranks)

    def rate(self, stage: int, minibatch: int) -> float:
        """Factor of the learning rate of an update of one replica alone (Rescaled ASGD).

        In proportion to the turns from one of the replica's to its next, with a mean of 1 over
        the replicas: in a cycle of turns each of them has as much weight as any other.
        """
        turns = self.turns(stage)
        if not self.kind.alone:
            return 1.0
        apart = {one: len(turns) / turns.count(one) for one in turns}
        return apart[turns[minibatch % len(turns)]] * len(apart) / sum(apart.values())

    def gathers(self, stage: int) -> bool:
        """True if replicas of the stage get weights that others of them have updated."""
        return self.homes and len(self.ranks[stage]) > 1

    def closing(self, stage: int, minibatch: int) -> int:
        """The last minibatch of those that one update takes: that update is named by it."""
        return minibatch + (-1 - minibatch) % self.group(stage)

    def lag(self, stage: int) -> int:
        """Age in updates of the weights that the stage runs on."""
        return self.kind.lag_of(self.warmup[stage], self.warmup[0])

    def version(self, stage: int, minibatch: int) -> int:
        """The weights that a minibatch runs on, by the updates before them."""
        return max(minibatch // self.group(stage) - self.lag(stage), 0)

    def before(self, stage: int, minibatch: int, updates: int) -> int:
        """The minibatches before this one are those whose updates precede the `updates` newest
        groups, and the one that the minibatch belongs to."""
        group = self.group(stage)
        return (minibatch // group - updates) * group

    def versions(self, stage: int) -> int:
        """Weight versions that the stage holds."""
        return self.kind.versions(self.warmup[stage], self.warmup[0])

    def gradient_buffers(self, stage: int) -> int:
        """Minibatches whose gradients the stage holds at one time."""
        late = self.late(stage)
        return self.kind.gradient_buffers(self.warmup[stage], self.warmup[0], late=late)

    @property
    def reach(self) -> int:
        """Number of calls back from which a program may still deal with a minibatch.

        That is until its update, and until its values are known to have been received: a channel
        between replicas that take minibatches in turn has one of them every so many calls.
        """
        stages = range(len(self.ranks))
        sent = (
            self.window(one.source, target) * lcm(self.cycle(one.source), self.cycle(target))
            for one in (self.edges if self.period > 1 else ())
            for target in one.targets
        )
        return max(2, *((1 + self.lag(s)) * self.group(s) for s in stages), *sent)

    def late(self, stage: int) -> bool:
        """True if STEP waits for other ranks; a stream then places it as late as legal.

        The update of a tied parameter waits for the sums of its other holders, which in turn wait
        for the new weights.
        """
        tied = any(stage in one.stages for one in self.tied)
        return self.clipping or tied or len(self.ranks[stage]) > 1

    def halfway(self, stage: int) -> int | None:
        """The microbatch before whose forward weights of a stream that come back, tied ones or
        those from homes, have their late update.

        In the middle of a minibatch the new weights have as much time to come back to other stages
        as the sums had, and every stage has all gradients of the minibatch before.  None: the
        stage holds no such weights, each microbatch is a minibatch, a replica takes fewer turns,
        whose last backward comes later, or a replica without microbatches, which adds to sums and
        norms no earlier than with its own update, may hold it up.
        """
        tied = {one for parameter in self.tied for one in parameter.stages}
        alone = self.gathers(stage) and stage not in tied and not self.clipping
        if not (alone or stage in tied) or self.kind.drains or self.kind.updates_each:
            return None
        if any(map(uneven, filter(None, self.patterns))):
            return None
        waited_for = range(len(self.ranks)) if self.clipping else tied
        if not alone and any(len(self.ranks[one]) > 1 for one in waited_for):
            return None
        held = (horizon(self.turns(s), w + 1) for s, w in enumerate(self.warmup))
        return max(self.num_microbatches // 2, *held)

    def in_flight(self, stage: int) -> int:
        """The most microbatches of one replica between forward and backward."""
        return self.kind.in_flight(self._held(stage), self._most(stage))

    def pool(self, stage: int) -> int:
        """Receive slots of each activation edge that enters the stage, per replica."""
        return self.kind.slots(self._held(stage), self._most(stage))

    def delay(self, stage: int) -> int:
        """Number of microbatches by which gradients of weights may come after those of inputs."""
        return self._held(stage) - self.warmup[stage]

    def _held(self, stage: int) -> int:
        return self.kind.depth_held(self.warmup[stage], self.warmup[0])

    def _most(self, stage: int) -> int:
        """The most microbatches of a minibatch that a replica of a stage takes."""
        return largest_share(self.turns(stage), self.num_microbatches)

    def serving(self, stage: int, other: int, replica: int) -> int:
        """The rank of a stage with whom a replica of another one shares tied parameters: its own
        where that holds both."""
        own = self.ranks[other][replica]
        there = self.ranks[stage]
        return own if own in there else there[replica % len(there)]

    def peer(self, hop: Hop, microbatch: int, minibatch: int) -> int:
        """The rank at the other end of a hop."""
        return hop.peer if hop.peer >= 0 else self.rank(hop.stage, microbatch, minibatch)

    def hop(self, kind: Kind, edge: int, stage: int, other: int) -> Hop:
        """An end at `stage`, the other end at `other`.

        New weights are sent from where they live, and updates write the oldest version there is.
        The sum of a tied gradient is on its way until the late update of its owner.
        """
        window = self.window(*sorted((stage, other)))
        if kind is Kind.TIED:
            late = max(map(len, self.ranks)) > 1 or self.kind.drains
            window = max(1, self.lag(stage) + late)
        elif kind is Kind.WEIGHT:
            window = max(1, self.versions(stage) - 1)
        local = self.ranks[stage] == self.ranks[other] and self.turns(stage) == self.turns(other)
        held = sum(self.ranks[other][0] in ranks for ranks in self.ranks)  # stages of that rank
        return Hop(kind, edge, other, window, local, held > 1)

    def window(self, first: int, last: int) -> int:
        """Sends in flight on one channel between two stages, first < last.

        Where ranks hold several stages, replicas have patterns, or in an order that somebody wrote,
        that is whatever the first stage has in flight: what has gone backward there has been
        received by every later stage, and back.
        """
        flat = [rank for ranks in self.ranks for rank in ranks]
        if len(set(flat)) < len(flat) or self.kind.written is not None or any(self.patterns):
            return self.in_flight(first)
        ends = [(self.warmup[stage], len(self.ranks[stage])) for stage in (first, last)]
        return window(*ends)


def with_edges(spec: PipelineSpec, edges: tuple[Edge, ...]) -> PipelineSpec:
    """The same pipeline for a forward-only program over other edges."""
    return replace(spec, edges=edges, tied=())


@lru_cache(maxsize=4096)
def hops(spec: PipelineSpec, stage: int, replica: int = 0) -> Hops:
    """Everything that a replica of the stage sends and receives.

    A value goes from its source to every target.  Its gradient goes last target → … → first
    target → source, each adding its own (eager's order of summation).  The sum of a tied
    parameter's gradients goes last holder → … → owner once an update: replica q sends to replica
    q mod r of the next holder, or to that on its own rank.  The owner's new weights go to every
    other holder, whose replicas get them from those of the owner in turn.
    """
    value_in, value_out, down, up = [], [], [], []
    for index, edge in enumerate(spec.edges):
        chain = (edge.source, *edge.targets)
        if stage not in chain:
            continue
        place = chain.index(stage)
        if place:
            value_in.append(spec.hop(Kind.VALUE, index, stage, edge.source))
        else:
            value_out += [spec.hop(Kind.VALUE, index, stage, other) for other in edge.targets]
        if edge.gradient:
            later, earlier = chain[place + 1 : place + 2], chain[place - 1 : place] if place else ()
            down += [spec.hop(Kind.GRADIENT, index, stage, one) for one in later]
            up += [spec.hop(Kind.GRADIENT, index, stage, one) for one in earlier]
    for sent in (value_out, up):
        sent.sort(key=lambda hop: abs(hop.stage - stage))  # as the clock has them
    sums_in, sums_out, weight_out, weight_in = (list[Hop]() for _ in range(4))
    for index, tied in enumerate(spec.tied):
        if stage not in tied.stages:
            continue
        owner, place = tied.stages[0], tied.stages.index(stage)
        for one in tied.stages[place + 1 : place + 2]:
            sums_in += _served(spec, Kind.TIED, index, stage, replica, one)
        if place:
            for kind, other, found in (
                (Kind.TIED, tied.stages[place - 1], sums_out),
                (Kind.WEIGHT, owner, weight_in),
            ):
                hop, own = spec.hop(kind, index, stage, other), spec.ranks[stage][replica]
                peer = spec.serving(other, stage, replica)
                found.append(hop._replace(peer=peer, local=peer == own))
        else:
            for one in tied.stages[1:]:
                weight_out += _served(spec, Kind.WEIGHT, index, stage, replica, one)
    found_hops = value_in, value_out, down, up, sums_in, sums_out, weight_out, weight_in
    return Hops(*map(tuple, found_hops))


def _served(
    spec: PipelineSpec, kind: Kind, edge: int, stage: int, replica: int, other: int
) -> list[Hop]:
    """The hops between a replica and those of another stage that fall to it, in turn."""
    hop, own = spec.hop(kind, edge, stage, other), spec.ranks[stage][replica]
    served = [p for q, p in enumerate(spec.ranks[other]) if spec.serving(stage, other, q) == own]
    return [hop._replace(peer=peer, local=peer == own) for peer in served]
