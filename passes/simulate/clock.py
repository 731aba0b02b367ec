"""The clock: when every instruction of successive programs runs.

The timing model, all of it:
- A rank executes its instructions in order; posts, sends and FREE take no time.  FORWARD and
  BACKWARD take the stage's seconds (a stage that recomputes adds its forward to its backward,
  after the gradient has come; the two parts of a split backward take half of it each), STEP what
  is given (0).  After a program the rank goes on
  with the next one at once.
- A transfer is ready when its SEND and its POST_RECV have both been executed (rendezvous).
  It takes latency + bytes / bandwidth of the level between the two ranks and runs beside
  compute.  A link (an ordered pair of ranks; the unordered pair where the level is half duplex)
  carries one transfer at a time, in the order in which they became ready.
- WAIT_RECV and WAIT_SEND end when their transfer ends.  A hop inside a rank takes no time.
- WAIT_REDUCE ends 2 (r − 1) (bytes / r / bandwidth + latency) after the last of r replicas
  has posted (ring), WAIT_NORMS one latency after the last rank has.  Both use the slowest level
  between members and do not slow transfers down.  (The runtime begins to sum within the last
  backward: at most its seconds of such a ring pass unseen.)  LOSS takes no time.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from pdcompile.cluster import Link, message_seconds, ring_seconds, slowest
from pdcompile.errors import ScheduleError
from pdcompile.plan import Plan
from pdcompile.schedule import Action, Instruction, Kind, Phase, Schedule
from pdcompile.schedule.registry import kind_of
from pdcompile.schedule.spec import spec_of

Links = Callable[[int, int], Link]


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Compute on a rank, a transfer (action SEND…, at its sender) while on the wire, or a
    collective (action POST…, on each member) from the last post to its end.

    `minibatch` counts from the first program that was simulated.  `peer` is the rank that a
    transfer goes to, `num_bytes` what it brings there.  `cause` is the event at whose end this one
    began, because it waited for nothing else; None at the beginning.
    """

    rank: int
    stage: int
    action: Action
    minibatch: int
    microbatch: int
    start_seconds: float
    end_seconds: float
    peer: int = -1
    num_bytes: int = 0
    cause: TimelineEvent | None = field(default=None, compare=False, repr=False)


@dataclass(slots=True)
class _Transfer:
    sender: int
    receiver: int
    stage: int
    instruction: Instruction | None = None  # the send
    minibatch: int = 0
    posted: bool = False
    done: bool = False
    event: TimelineEvent | None = None


@dataclass(slots=True)
class _Channel:
    transfers: list[_Transfer] = field(default_factory=list)
    num_sent: int = 0
    num_posted: int = 0
    num_received: int = 0
    num_send_waited: int = 0


def compute_seconds(plan: Plan) -> dict[tuple[Action, int], float]:
    """What each action takes on each stage."""
    found, kind = {}, kind_of(plan.training.schedule)
    for s, stage in enumerate(plan.stages):
        again = stage.forward_seconds if stage.recompute else 0.0
        found[Action.FORWARD, s] = stage.forward_seconds
        found[Action.BACKWARD, s] = stage.backward_pass_seconds
        found[Action.STEP, s] = stage.update_seconds
        first, later = kind.halves(stage.backward_pass_seconds, again)
        found[Action.BACKWARD_INPUT, s], found[Action.BACKWARD_WEIGHT, s] = first, later
    return found


_RECEIVES = frozenset((Phase.POST_RECV, Phase.WAIT_RECV))


class Clock:
    """Runs programs; afterwards `events` and, per program and rank, `ends` are known, and when
    each rank was done with each of its instructions (`passed`).

    Without `timeline` neither events nor these are kept: hundreds of thousands for many stages.
    """

    def __init__(
        self,
        plan: Plan,
        programs: Sequence[Schedule],
        links: Links,
        *,
        timeline: bool = True,
    ):
        self.plan = plan
        self.keeps_events = timeline
        self.links = links
        self.spec = spec_of(plan)
        self.seconds = compute_seconds(plan)
        self.events: list[TimelineEvent] = []
        num_ranks = self.spec.num_ranks
        self.causes: list[TimelineEvent | None] = [None] * num_ranks  # whose end each rank goes by
        self.passed: list[list[float]] = [[] for _ in range(num_ranks)]
        self.ends = [[0.0] * num_ranks for _ in programs]
        self.columns: list[list[tuple[Instruction, int, int]]] = [[] for _ in range(num_ranks)]
        base = 0
        for number, program in enumerate(programs):
            for rank, column in enumerate(program.columns):
                self.columns[rank] += [(one, base, number) for one in column]
            base += program.name == self.spec.name
        self.position = [0] * num_ranks
        self.only_stage = {rank: stages[0] for rank, stages in self.spec.holders}
        self.channels: dict[tuple[Kind, int, int, int, int], _Channel] = {}
        self.posted: Counter[tuple[Kind, int, int]] = Counter()  # members, of each collective
        self.collectives: dict[tuple[Kind, int, int], TimelineEvent] = {}  # on their last member
        #: what executes an instruction that takes no time; False when the rank has to wait
        self.rules: dict[Phase, Callable[[int, Instruction, int], bool]] = {
            Phase.SEND: self._send,
            Phase.POST_RECV: self._post,
            Phase.WAIT_RECV: self._wait,
            Phase.WAIT_SEND: self._wait_send,
            Phase.POST: self._collective,
            Phase.WAIT: self._collective,
        }
        self.sleeping: dict[object, list[int]] = {}
        self.link_queue: dict[tuple[int, int], deque[_Transfer]] = {}
        self.heap: list[tuple[float, int, int, _Transfer | None]] = []
        self.ticket = count()
        self.now = 0.0

    @property
    def timeline(self) -> tuple[TimelineEvent, ...]:
        return tuple(sorted(self.events, key=lambda one: (one.start_seconds, one.rank)))

    def run(self) -> tuple[float, ...]:
        """When each program's last rank was done.

        Raises ScheduleError when ranks wait for ever (`check` says more).
        """
        for rank in range(len(self.columns)):
            self._advance(rank)
        while self.heap:
            self.now, _, rank, transfer = heapq.heappop(self.heap)
            if transfer is None:
                self._advance(rank)
            else:
                self._arrive(transfer)
        for rank, column in enumerate(self.columns):
            if self.position[rank] < len(column):
                raise ScheduleError(
                    f"rank {rank} waits for ever at {column[self.position[rank]][0]}"
                )
        return tuple(map(max, self.ends))

    def _at(self, seconds: float, rank: int, transfer: _Transfer | None = None) -> None:
        heapq.heappush(self.heap, (seconds, next(self.ticket), rank, transfer))

    def _advance(self, rank: int) -> None:
        """Go on until the rank computes, waits or is finished."""
        column, compute, rules = self.columns[rank], Phase.COMPUTE, self.rules
        while self.position[rank] < len(column):
            one, base, number = column[self.position[rank]]
            phase = one.action.phase
            seconds = self.seconds[one.action, one.stage] if phase is compute else None
            if seconds is None:
                rule = rules.get(phase)
                if rule is not None and not rule(rank, one, base):
                    return  # the rank has to wait
                self.position[rank] += 1
                self.ends[number][rank] = self.now
                if self.keeps_events:
                    self.passed[rank].append(self.now)
                continue
            self.position[rank] += 1
            end = self.now + seconds
            self.ends[number][rank] = end
            if self.keeps_events:
                self.passed[rank].append(end)
                event = TimelineEvent(
                    rank, one.stage, one.action, base + one.minibatch, one.microbatch,
                    self.now, end, cause=self.causes[rank],
                )  # fmt: skip
                self.events.append(event)
                self.causes[rank] = event
            if seconds > 0:
                self._at(end, rank)
                return

    def _send(self, rank: int, one: Instruction, base: int) -> bool:
        channel = self._channel(one, rank, one.peer)
        transfer = self._transfer(channel, channel.num_sent, rank, one.peer, one.stage)
        channel.num_sent += 1
        transfer.instruction, transfer.minibatch = one, base + one.minibatch
        if rank == one.peer:
            transfer.done = True
        else:
            self._enqueue(transfer, rank)
        return True

    def _post(self, rank: int, one: Instruction, _: int) -> bool:
        channel = self._channel(one, one.peer, rank)
        transfer = self._transfer(channel, channel.num_posted, one.peer, rank, -1)
        channel.num_posted += 1
        transfer.posted = True
        self._enqueue(transfer, rank)
        return True

    def _wait(self, rank: int, one: Instruction, _: int) -> bool:
        channel = self._channel(one, one.peer, rank)
        done = self._done(channel, channel.num_received, rank)
        channel.num_received += done
        return done

    def _wait_send(self, rank: int, one: Instruction, _: int) -> bool:
        channel = self._channel(one, rank, one.peer)
        done = self._done(channel, channel.num_send_waited, rank)
        channel.num_send_waited += done
        return done

    def _channel(self, one: Instruction, sender: int, receiver: int) -> _Channel:
        """By the stage that receives: where a rank holds several, a send says which."""
        if one.action.phase in _RECEIVES:
            stage = one.stage
        else:
            stage = one.target if one.target >= 0 else self.only_stage[receiver]
        key = (one.action.kind, one.edge, sender, receiver, stage)
        found = self.channels.get(key)
        if found is None:
            found = self.channels[key] = _Channel()
        return found

    def _transfer(
        self, channel: _Channel, index: int, sender: int, receiver: int, stage: int
    ) -> _Transfer:
        """The index-th transfer of a channel, whichever end comes first."""
        if index == len(channel.transfers):
            channel.transfers.append(_Transfer(sender, receiver, stage))
        found = channel.transfers[index]
        found.stage = max(found.stage, stage)
        return found

    def _done(self, channel: _Channel, index: int, rank: int) -> bool:
        if index >= len(channel.transfers):
            raise ScheduleError(f"rank {rank} waits for a transfer that was not posted")
        transfer = channel.transfers[index]
        if not transfer.done:
            self.sleeping.setdefault(id(transfer), []).append(rank)
        return transfer.done

    def _enqueue(self, transfer: _Transfer, rank: int) -> None:
        """One end of a transfer is there, by what this rank has executed."""
        if not transfer.posted or transfer.instruction is None:
            return
        queue = self.link_queue.setdefault(_link_key(self.links, transfer), deque())
        queue.append(transfer)
        if len(queue) == 1:
            self._start(transfer, self.causes[rank])

    def _start(self, transfer: _Transfer, cause: TimelineEvent | None) -> None:
        one = transfer.instruction
        assert one is not None
        link, size = self.links(transfer.sender, transfer.receiver), self.bytes_of(one)
        end = self.now + message_seconds(link, size)
        if self.keeps_events:
            transfer.event = TimelineEvent(
                transfer.sender, transfer.stage, one.action, transfer.minibatch, one.microbatch,
                self.now, end, transfer.receiver, size, cause,
            )  # fmt: skip
            self.events.append(transfer.event)
        self._at(end, transfer.sender, transfer)

    def _arrive(self, transfer: _Transfer) -> None:
        transfer.done = True
        queue = self.link_queue[_link_key(self.links, transfer)]
        queue.popleft()
        if queue:
            self._start(queue[0], transfer.event)
        for rank in self._wake(id(transfer)):
            self._goes_by(rank, transfer.event)

    def _wake(self, key: object) -> list[int]:
        ranks = self.sleeping.pop(key, [])
        for rank in ranks:
            self._at(self.now, rank)
        return ranks

    def _goes_by(self, rank: int, event: TimelineEvent | None) -> None:
        """The rank has waited for an event; where it was busy as long, by its own work."""
        own = self.causes[rank]
        if event is not None and (own is None or own.end_seconds < event.end_seconds):
            self.causes[rank] = event

    def bytes_of(self, one: Instruction) -> int:
        """Bytes that a rank puts on its links: of a send, or its part of a ring."""
        if one.action is Action.POST_REDUCE:
            members = len(self.spec.ranks[one.stage])
            return -(-2 * (members - 1) * self.plan.stages[one.stage].trainable_bytes // members)
        if one.action.phase is not Phase.SEND:
            return 0
        values = one.action.kind in (Kind.VALUE, Kind.GRADIENT)
        return (self.plan.edges if values else self.plan.tied)[one.edge].bytes

    def _collective(self, rank: int, one: Instruction, base: int) -> bool:
        kind, minibatch = one.action.kind, base + one.minibatch
        stage = one.stage if kind is Kind.REDUCE else -1
        key = (kind, stage, minibatch)
        members = self.spec.ranks[stage] if stage >= 0 else tuple(self.only_stage)
        if one.action.phase is Phase.POST:
            self.posted[key] += 1
            if self.posted[key] == len(members):  # they sum from now on
                end = self.now + _collective_seconds(self.plan, self.links, members, stage)
                self.collectives[key] = TimelineEvent(
                    rank, one.stage, one.action, minibatch, -1, self.now, end,
                    num_bytes=self.bytes_of(one), cause=self.causes[rank],
                )  # fmt: skip
                if self.keeps_events:
                    self.events += [replace(self.collectives[key], rank=each) for each in members]
                self._wake(key)
            return True
        if self.posted[key] < len(members):
            self.sleeping.setdefault(key, []).append(rank)
            return False
        self._goes_by(rank, self.collectives[key])
        end = self.collectives[key].end_seconds
        if end > self.now:
            self._at(end, rank)
            return False
        return True


def _link_key(links: Links, transfer: _Transfer) -> tuple[int, int]:
    ends = (transfer.sender, transfer.receiver)
    return ends if links(*ends).full_duplex else (min(ends), max(ends))


def _collective_seconds(plan: Plan, links: Links, members: Sequence[int], stage: int) -> float:
    """A ring over the replicas of a stage, or (−1) one message over all ranks."""
    link = slowest(links(members[0], other) for other in members[1:])
    if stage < 0:
        return message_seconds(link, 0.0)
    return ring_seconds(link, plan.stages[stage].trainable_bytes, len(members))
