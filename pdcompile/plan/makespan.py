"""Duration of a pipeline: the longest path over who waits for whom.

A rank computes one thing at a time, in the order that its schedule's row in the registry yields;
what it makes is sent when it is finished, in turn; a link carries one message at a time in each
direction (half duplex: in both together); a receiver needs all that was sent to it before it
computes.  A message also needs a free receive slot, of which the row says how many there are, and a
sender waits when too many of its messages are in flight.  A hop inside a rank takes no time.  These
are the rules of the simulator, which walks instructions; here are only seconds, so that the planner
can ask for thousands of candidates.

When a message arrives follows from when its two ends were ready and when the one before arrived
(`wires`), so ranks can be followed in any order, each as far as what it needs is known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import starmap
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from pdcompile.plan.wires import (
    ComputeEvent,
    Direction,
    Event,
    SharedLinks,
    StagePair,
    Wire,
    WireGroup,
    places_of,
)
from pdcompile.schedule.fetches import Fetches
from pdcompile.schedule.instruction import TO_WEIGHTS, Action
from pdcompile.schedule.registry import DEFAULT, GRADIENT_SLOTS, PARTS, StageWork, kind_of
from pdcompile.schedule.turns import Pattern, ahead, in_turn, largest_share, share_of, window

#: of a stage on a rank: its number, warm-up, microbatches, delay, forwards before each backward
Work: TypeAlias = tuple[int, int, int, int, tuple[int, ...]]
#: which of the rank's stages, what it does, which of its microbatches
Turn: TypeAlias = tuple[int, Action, int]


@dataclass(frozen=True, slots=True)
class Path:
    """A chain of work in which each waits for the one before: how often each of it occurs.

    Without traffic on one of its hops the chain falls apart and says nothing.  Either part of a
    split backward is half a backward (of a stage that does not recompute).  `sums`: stages whose
    gradients are reduced at its end, and how much of each reduction it takes.
    """

    forward: tuple[int, ...]  # per stage
    backward: tuple[float, ...]
    hops: tuple[tuple[StagePair, Direction, int], ...]
    sums: tuple[tuple[int, float], ...] = ()


class End(NamedTuple):
    """Time at which something is over, and why: an event, hops and parts of reductions after it."""

    seconds: float
    event: Event = None
    hops: tuple[StagePair, ...] = ()
    sums: tuple[tuple[int, float], ...] = ()

    def after(self, seconds: float, *hops: StagePair, sums: tuple[int, float] = (0, 0.0)) -> End:
        """The end of what takes so many seconds from then on."""
        both = (*self.sums, sums) if sums[1] else self.sums
        return End(self.seconds + seconds, self.event, (*self.hops, *hops), both)


_seconds = itemgetter(0)


def warmup_of(in_flight: Sequence[int], num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Forwards before the first backward, beyond one: in flight − 1, at most m − 1.

    Without `in_flight`, the least that keeps a pipeline of N stages busy: N − 1 − s.
    """
    depths = [count - 1 for count in in_flight] or [num_stages - 1 - s for s in range(num_stages)]
    return tuple(max(0, min(depth, num_microbatches - 1)) for depth in depths)


@lru_cache(maxsize=256)
def order_of(schedule: str, works: tuple[Work, ...], num_stages: int) -> list[Turn]:
    """List the turns of a rank in one minibatch, by the work of its stages.

    Warm-up 1 of 3 microbatches under 1F1B: F0 F1 B0 F2 B1 B2.
    """
    stages = [
        StageWork(s, range(share), warmup, num_stages=num_stages, delay=delay, ahead=ahead)
        for s, warmup, share, delay, ahead in works
    ]
    place = {s: n for n, (s, *_) in enumerate(works)}
    return [(place[s], action, k) for s, action, _, k in kind_of(schedule).order(stages)]


class EventWalk:
    """Follows the ranks of one minibatch.

    Args:
        forward, backward: seconds of one microbatch on each stage.
        ranks: of each stage; one may hold several stages.
        warmup: forwards of each stage before its first backward, beyond one; a written schedule
            has its own.
        again: of `backward`, forwards that run again; empty: none.
        shares: turns of the ranks of each stage, by their place in `ranks`, and the seconds of
            each by those of the slowest; empty: each in turn, and all alike.
    """

    def __init__(
        self,
        forward: Sequence[float],
        backward: Sequence[float],
        ranks: Sequence[tuple[int, ...]],
        warmup: Sequence[int],
        num_microbatches: int,
        schedule: str = DEFAULT,
        again: Sequence[float] = (),
        shares: Sequence[tuple[Pattern, Sequence[float]]] = (),
    ):
        plain = [(in_turn(len(own)), (1.0,) * len(own)) for own in ranks]
        self.taken = shares or plain
        self.fetches: Fetches = {}
        self.unlike = any(
            turns != own[0] for (turns, _), own in zip(self.taken, plain, strict=True)
        )
        self.name, self.schedule = schedule, kind_of(schedule)
        written = self.schedule.written
        self.ranks, self.m = ranks, num_microbatches
        self.warmup = warmup if written is None else written.warmup
        self.turns = [self.schedule.turn(i) for i in range(num_microbatches)]
        parts = list(map(self.schedule.halves, backward, again or (0.0,) * len(backward)))
        self.seconds: dict[Action, Sequence[float]] = {
            Action.FORWARD: forward,
            Action.BACKWARD: backward,
            Action.BACKWARD_INPUT: [first for first, _ in parts],
            Action.BACKWARD_WEIGHT: [later for _, later in parts],
        }
        self.held: dict[int, list[int]] = {}  # stages of each rank
        for s, own in enumerate(ranks):
            for rank in own:
                self.held.setdefault(rank, []).append(s)
        self.ready: list[int] = []
        self.cause: dict[ComputeEvent, Event] = {}
        stages = range(len(ranks))
        self.done = [0.0 for _ in stages]  # when the last rank comes to its update
        self.summed = [0.0 for _ in stages]  # when the last rank has all of its gradients
        self.because: list[Event] = [None for _ in stages]
        self.sums: list[Event] = [None for _ in stages]  # what decided `summed`
        self.into: dict[bool, list[list[WireGroup]]] = {
            f: [[] for _ in stages] for f in (True, False)
        }
        self.out: dict[bool, list[list[tuple[WireGroup, int]]]]
        self.out = {f: [[] for _ in stages] for f in (True, False)}
        self.lanes: dict[tuple[Direction, StagePair], WireGroup] = {}
        self.shared = SharedLinks()

    def join(self, wires: list[Wire]) -> None:
        """Join two stages; `wires` by turn of their ranks."""
        hop, kind = wires[0].hop, wires[0].kind
        first, last = min(hop), max(hop)
        count = len(wires[0].seconds)
        several = self.unlike or any(len(stages) > 1 for stages in self.held.values())
        if self.schedule.written or several:
            share = largest_share(self.taken[first][0], self.m)
            most = self.schedule.in_flight(self.warmup[first], share)
        else:
            most = window(*((self.warmup[s], len(self.ranks[s])) for s in (first, last)))
        lane = WireGroup(wires, places_of(wires, self.m), count, most * count)
        self.into[kind == "forward"][hop[1]].append(lane)
        self.lanes[kind, hop] = lane

    def send_in_order(self, kind: Direction, hops: Iterable[StagePair]) -> None:
        """Set which messages each stage sends after computing, one after the other."""
        sent: Counter[StagePair] = Counter()
        for hop in hops:
            self.out[kind == "forward"][hop[0]].append((self.lanes[kind, hop], sent[hop]))
            sent[hop] += 1

    def run(self) -> None:
        """Follow all ranks.  Raises ValueError: they wait for each other for ever."""
        ranks = [self._rank(rank, stages) for rank, stages in self.held.items()]
        running = len(ranks)
        self.ready += reversed(range(running))
        while self.ready:
            rank = self.ready.pop()
            wire = next(ranks[rank], None)
            if wire is None:
                running -= 1
            else:
                wire.sleepers.append(rank)
            while self.shared.waiting and not self.ready:
                self.shared.carry(self.ready)
        if running:
            raise ValueError(f"warm-up {list(self.warmup)} never ends: stages wait for each other")

    def later(self, now: float, because: Event, wire: Wire, i: int) -> tuple[float, Event]:
        """The time when message i has arrived too, and what decided it."""
        at = wire.arrived[i]
        return (at, (wire, i)) if at > now else (now, because)

    def end(
        self,
        updates: Sequence[float],
        later: float,
        norms: float | None,
        finals: Sequence[tuple[StagePair, object, float]],
    ) -> End:
        """End of what comes last: a stage's step, or the arrival of a copy of a tied parameter.

        `updates`: seconds from a stage's sums to its new weights, `later` of them after its step.
        `finals`: stages, link, seconds of each message, with sums of tied gradients or new weights.
        """
        free: dict[object, End] = defaultdict(lambda: End(0.0))
        summed = list(starmap(End, zip(self.summed, self.sums, strict=True)))
        for hop, link, seconds in finals:
            if hop[0] > hop[1]:
                free[link] = max(free[link], summed[hop[0]], key=_seconds).after(seconds, hop)
                summed[hop[1]] = max(summed[hop[1]], free[link], key=_seconds)
        first = 1 - later
        step = [one.after(updates[s] * first, sums=(s, first)) for s, one in enumerate(summed)]
        for own in self.held.values():  # one after the other
            last = End(0.0)
            for s in own:
                done = End(self.done[s], self.because[s])
                last = step[s] = max(last, step[s], done, key=_seconds)
        if norms is not None:
            step = [max(step, key=_seconds).after(norms)] * len(step)
        step = [one.after(updates[s] * later, sums=(s, later)) for s, one in enumerate(step)]
        for hop, link, seconds in finals:
            if hop[0] < hop[1]:
                sent = max(free[link], step[hop[0]], step[hop[1]], key=_seconds)
                free[link] = sent.after(seconds, hop)
        return max((*step, *free.values()), key=_seconds)

    def shares(self, a: int, b: int) -> bool:
        """Does a rank of one of these stages hold others too?"""
        return any(len(self.held[rank]) > 1 for s in (a, b) for rank in self.ranks[s])

    def path(self, end: End) -> Path:
        """Path to an end: how often forward and backward of a stage, and each hop, lead to it."""
        forward, backward = [0] * len(self.ranks), [0.0] * len(self.ranks)
        hops: Counter[tuple[StagePair, Direction]] = Counter((hop, "final") for hop in end.hops)
        event = end.event
        while event is not None:
            if len(event) == 3:
                s, action, _ = event
                if action is Action.FORWARD:
                    forward[s] += 1
                else:
                    backward[s] += 1 if action is Action.BACKWARD else 1 / PARTS
                event = self.cause[event]
            else:
                wire, i = event
                hops[wire.hop, wire.kind] += 1
                event = wire.cause(i)
        found = tuple((hop, kind, times) for (hop, kind), times in sorted(hops.items()))
        return Path(tuple(forward), tuple(backward), found, end.sums)

    def _rank(self, rank: int, stages: Sequence[int]) -> Iterator[Wire]:
        """Wires that a rank waits for."""
        now, ready = 0.0, self.ready
        because: Event = None  # what decided `now`
        held = [_Stage(self, s, rank) for s in stages]

        def post(own: _Stage, kind: bool) -> None:
            k = own.microbatches[own.expected[kind]]
            own.expected[kind] += 1
            for lane in own.into[kind]:
                lane.wires[k % len(lane.wires)].post(now, because, ready)

        for own in held:
            for _ in range(min(own.pool, own.share)):
                post(own, True)
        works = tuple((own.index, own.warmup, own.share, own.delay, own.ahead) for own in held)
        for n, action, j in order_of(self.name, works, len(self.ranks)):
            own = held[n]
            s = own.index
            if action is Action.STEP:
                if now > self.done[s] or self.because[s] is None:
                    self.done[s], self.because[s] = now, because
                continue
            kind = action is Action.FORWARD
            moves = action is not Action.BACKWARD_WEIGHT
            k = own.microbatches[j if kind else own.turns[j]]
            for lane in own.into[kind] if moves else ():
                last = (lane.places[k] + 1) * lane.messages - 1
                wire = lane.wires[k % len(lane.wires)]
                while len(wire.arrived) <= last:
                    yield wire
                now, because = self.later(now, because, wire, last)
            event = s, action, k
            self.cause[event] = because
            fetched = self.fetches.get((action, s, rank), 0.0)
            now, because = now + fetched + self.seconds[action][s] * own.pace, event
            for lane, place in own.out[kind] if moves else ():
                wire = lane.wires[k % len(lane.wires)]
                early = lane.places[k] * lane.messages + place - lane.window
                if early >= 0:
                    while len(wire.arrived) <= early:
                        yield wire
                    now, because = self.later(now, because, wire, early)
                wire.send(now, because, ready)
            # Gradients are expected for the next microbatches that went forward.
            if kind:
                own.gone[own.turns[j]] = True
            elif moves and own.room < own.share:
                own.room += 1
            while own.returning < own.room and own.gone[own.returning]:
                own.returning += 1
                post(own, False)
            if action in TO_WEIGHTS or not self.schedule.trains:
                if now > self.summed[s]:
                    self.summed[s], self.sums[s] = now, because
                own.ended += 1
                if own.ended + own.pool <= own.share:
                    post(own, True)


class _Stage:
    """One stage on one rank, as far as the walk of the rank has come."""

    __slots__ = (
        "ahead", "delay", "ended", "expected", "gone", "index", "into", "microbatches", "out",
        "pace", "pool", "returning", "room", "share", "turns", "warmup",
    )  # fmt: skip

    def __init__(self, walk: EventWalk, s: int, rank: int):
        replica, (turns, paces) = walk.ranks[s].index(rank), walk.taken[s]
        self.index, self.warmup = s, walk.warmup[s]
        self.microbatches = share_of(turns, replica, walk.m)
        self.ahead = ahead(turns, self.microbatches, self.warmup)
        self.share, self.pace = len(self.microbatches), paces[replica]
        held = walk.schedule.depth_held(self.warmup, walk.warmup[0])
        self.delay = held - self.warmup
        self.pool = walk.schedule.slots(held, largest_share(turns, walk.m))
        self.into = {f: lanes[s] for f, lanes in walk.into.items()}
        self.out = {f: lanes[s] for f, lanes in walk.out.items()}
        self.expected = {True: 0, False: 0}  # the next one that gets a slot
        self.turns = walk.turns  # when each of its microbatches goes backward
        self.gone = bytearray(self.share)  # forward, by that
        self.room = min(GRADIENT_SLOTS, self.share)  # so many gradients may be expected
        self.ended = self.returning = 0
