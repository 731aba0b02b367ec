"""All ranks together: channels, collectives and the absence of deadlock.

A send is a rendezvous: WAIT_SEND ends only once its receive has been posted, and here even
only once the receiver has come to WAIT_RECV (a transport that first exchanges a header posts the
payload's receive there).  Whatever completes like this completes with earlier receives and with
buffered sends too: conditions only become true, never false, and channels are first in first
out, so no order of events can lead elsewhere.  For the same reason one order of walking is enough.

Each program must complete without the next one having begun: in one process it has to.

Channel models: `per_direction` (gloo with tags), `per_pair` (one communicator for both directions
of two ranks: both ends begin their transfers in one order), and `device_order` (the same, and a
rank has at most `OPERATIONS` transfers and collectives begun and not waited for: on a device they
occupy it).  There a rank waits before it begins the next one; a device that queues them instead
waits for less.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pdcompile.passes.check.transfers import Label
from pdcompile.schedule import Action, Instruction, Kind, Phase, Schedule
from pdcompile.schedule.instruction import (
    DATA,
    ENDS,
    POST_RECV,
    REPLICATED,
    SEND,
    WAIT_RECV,
    WAIT_SEND,
)
from pdcompile.schedule.spec import OPERATIONS, Broadcast, PipelineSpec

ChannelModel = Literal["per_direction", "per_pair", "device_order"]
Told = tuple[int, Action, int, int, int]  # rank, action, item, microbatch, peer
Rule = Callable[[int, int, Instruction, Label], tuple[int, ...]]


@dataclass(slots=True)
class ChannelTokens:
    """All transfers of one edge from one rank to a stage on another, in order."""

    sender: int
    receiver: int
    stage: int  # that receives
    sent: deque[Label] = field(default_factory=deque)  # of those not yet received
    posted: deque[Label] = field(default_factory=deque)
    waits: deque[Label] = field(default_factory=deque)  # posted, not yet waited for
    open_sends: deque[Label] = field(default_factory=deque)  # not yet waited for
    num_sent: int = 0
    num_reached: int = 0
    num_received: int = 0
    num_send_waited: int = 0


@dataclass(slots=True)
class Group:
    """One collective of some ranks: how often each posted and waited."""

    members: tuple[int, ...]
    posted: dict[int, int] = field(default_factory=dict)
    waited: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Blocked:
    """A rank that cannot go on, and the ranks that it waits for."""

    rank: int
    position: int
    instruction: Instruction
    ranks: tuple[int, ...]


class Stuck(Exception):
    """No rank can go on."""

    def __init__(self, blocked: dict[int, Blocked]):
        self.blocked = blocked
        super().__init__()


class Misfit(Exception):
    """The two ends of a transfer disagree; `hangs` when both would wait for ever."""

    def __init__(self, rank: int, position: int, message: str, *, hangs: bool = False):
        self.rank, self.position, self.message, self.hangs = rank, position, message, hangs
        super().__init__(message)


class Unfinished:
    """In device order: what each rank has begun as data and not waited for."""

    def __init__(self) -> None:
        self._begun: dict[int, dict[Instruction, Instruction]] = {}  # by what waits for it

    def passed(self, rank: int, position: int, one: Instruction) -> None:
        """A rank has come past an instruction.  Raises Misfit where its device is occupied."""
        kind, phase = one.action.kind, one.action.phase
        if kind not in DATA or one.peer == rank:
            return
        mine = self._begun.setdefault(rank, {})
        if phase not in ENDS:
            mine.pop(one, None)
            return
        if len(mine) >= OPERATIONS:
            first = next(iter(mine.values()))
            raise Misfit(
                rank,
                position,
                f"begins while {first} is unfinished, and occupies the device: {OPERATIONS} at a "
                "time in device order",
            )
        mine[one._replace(action=ENDS[phase][kind])] = one

    def all_over(self, columns: Sequence[Sequence[Instruction]]) -> None:
        """The program has ended.  Raises Misfit where something was not waited for."""
        for rank, mine in self._begun.items():
            for one in mine.values():
                raise Misfit(rank, max(0, len(columns[rank]) - 1), f"{one} was not waited for")


class Exchange:
    """The state of all channels between calls; `run` executes one program."""

    def __init__(self, spec: PipelineSpec, channels: ChannelModel, minibatches: int = 0):
        """`minibatches` are over, and nothing is in flight."""
        self.spec = spec
        self.model = channels
        self.channels: dict[tuple[Kind, int, int, int, int], ChannelTokens] = {}
        everybody = tuple(rank for rank, _ in spec.holders)
        done = dict.fromkeys(everybody, minibatches * spec.clipping)
        self.groups = {(Kind.NORMS, -1): Group(everybody, done, dict(done))}
        for stage, ranks in enumerate(spec.ranks):
            if len(ranks) > 1:
                done = dict.fromkeys(ranks, minibatches // spec.group(stage))
                self.groups |= {
                    (Kind.REDUCE, stage): Group(ranks, done, dict(done)),
                    (Kind.BUFFERS, stage): Group(ranks),
                }
        self.stage_of = {rank: stages[0] for rank, stages in spec.holders}
        self.pairs: dict[tuple[int, int], deque[tuple[object, ...]]] = {}
        self.unfinished = Unfinished()
        self.told: Counter[Told] = Counter()  # this program's part in broadcasts
        #: what executes an instruction: the ranks that it waits for when it cannot go on
        self.by_phase: dict[Phase, Rule] = {
            Phase.SEND: self._send,
            Phase.POST_RECV: self._post,
            Phase.WAIT_RECV: self._wait,
            Phase.WAIT_SEND: self._wait_send,
            Phase.POST: self._post_all,
            Phase.WAIT: self._wait_all,
        }
        shared = (Kind.LOSS, Kind.OUTPUT, Kind.STATE)
        self.rules: dict[Action, Rule] = {
            one: self._share if one.kind in shared else self.by_phase[one.phase]
            for one in Action
            if one.phase not in (Phase.COMPUTE, Phase.LOCAL)
        }
        self.num_transfers = 0

    def run(self, program: Schedule, base: int) -> None:
        """Execute to the end.  Raises Stuck or Misfit."""
        columns, rules = program.columns, self.rules
        self.told.clear()
        positions = [0] * len(columns)
        ready = deque(rank for rank, column in enumerate(columns) if column)
        queued = set(ready)
        blocked: dict[int, Blocked] = {}
        sleeping: dict[int, set[int]] = {}  # rank -> those that may go on when it does
        while ready:
            rank = ready.popleft()
            queued.discard(rank)
            before = blocked.pop(rank, None)
            column, position = columns[rank], positions[rank]
            while position < len(column):
                one = column[position]
                rule = rules.get(one.action)
                if rule is not None and (
                    waits_for := rule(rank, position, one, (base + one.minibatch, one.microbatch))
                ):
                    blocked[rank] = Blocked(rank, position, one, waits_for)
                    for other in waits_for:
                        sleeping.setdefault(other, set()).add(rank)
                    break
                if rule is not None and self.model == "device_order":
                    self.unfinished.passed(rank, position, one)
                position += 1
            positions[rank] = position
            if before is not None and before.position == position:
                continue  # nothing new for anybody
            for other in sleeping.pop(rank, ()):
                if other in blocked and other not in queued:
                    queued.add(other)
                    ready.append(other)
        if blocked:
            raise Stuck(blocked)
        self.unfinished.all_over(columns)

    def _share(self, rank: int, position: int, one: Instruction, label: Label) -> tuple[int, ...]:
        """A part in a broadcast; who tells or hears of a loss waits for nobody."""
        rule = self.by_phase.get(one.action.phase)
        waits_for = rule(rank, position, one, label) if rule else ()
        if not waits_for:
            self.told[rank, one.action, one.edge, one.microbatch, one.peer] += 1
        return waits_for

    def _send(self, rank: int, position: int, one: Instruction, label: Label) -> tuple[int, ...]:
        channel = self._sending(one, rank)
        channel.num_sent += 1
        channel.sent.append(label)
        if rank == one.peer:
            return ()
        channel.open_sends.append(label)
        self._match(channel, rank, position)
        self._pair(rank, position, one, channel, label)
        return ()

    def _post(self, rank: int, position: int, one: Instruction, label: Label) -> tuple[int, ...]:
        channel = self._channel(one, one.peer, rank, one.stage)
        channel.posted.append(label)
        channel.waits.append(label)
        self._match(channel, rank, position)
        self._pair(rank, position, one, channel, label)
        return ()

    def _wait(self, rank: int, position: int, one: Instruction, label: Label) -> tuple[int, ...]:
        channel = self._channel(one, one.peer, rank, one.stage)
        if rank == one.peer:
            if not channel.sent or channel.sent[0] != label:
                raise Misfit(rank, position, "takes what another stage of the rank did not make")
            channel.sent.popleft()
            self.num_transfers += 1
            return ()
        if not channel.waits or channel.waits[0] != label:
            raise Misfit(rank, position, "receives of a channel are waited for out of order")
        channel.num_reached = channel.num_received + 1
        if channel.num_sent <= channel.num_received:
            return (one.peer,)
        channel.num_received += 1
        channel.waits.popleft()
        self.num_transfers += 1
        return ()

    def _wait_send(
        self, rank: int, position: int, one: Instruction, label: Label
    ) -> tuple[int, ...]:
        channel = self._sending(one, rank)
        if not channel.open_sends or channel.open_sends[0] != label:
            raise Misfit(rank, position, "sends of a channel are waited for out of order")
        if channel.num_reached <= channel.num_send_waited:
            return (one.peer,)
        channel.num_send_waited += 1
        channel.open_sends.popleft()
        return ()

    def _post_all(self, rank: int, _: int, one: Instruction, __: Label) -> tuple[int, ...]:
        group = self._group(one)
        group.posted[rank] = group.posted.get(rank, 0) + 1
        return ()

    def _wait_all(self, rank: int, _: int, one: Instruction, __: Label) -> tuple[int, ...]:
        group = self._group(one)
        count = group.waited.get(rank, 0)
        missing = tuple(m for m in group.members if group.posted.get(m, 0) <= count)
        if not missing:
            group.waited[rank] = count + 1
        return missing

    def _sending(self, one: Instruction, rank: int) -> ChannelTokens:
        """By the stage that receives: where a rank holds several, a send says which."""
        stage = one.target if one.target >= 0 or one.stage < 0 else self.stage_of.get(one.peer, -1)
        return self._channel(one, rank, one.peer, stage)

    def _channel(self, one: Instruction, sender: int, receiver: int, stage: int) -> ChannelTokens:
        key = (one.action.kind, one.edge, sender, receiver, stage)
        found = self.channels.get(key)
        if found is None:
            found = self.channels[key] = ChannelTokens(sender, receiver, stage)
        return found

    def _every(self, stage: int) -> int:
        """Minibatches for which there is one collective of a stage (−1: of all ranks)."""
        return self.spec.group(stage) if stage >= 0 else 1

    def _group(self, one: Instruction) -> Group:
        kind = one.action.kind
        return self.groups[kind, one.stage if kind in REPLICATED else -1]

    def _match(self, channel: ChannelTokens, rank: int, position: int) -> None:
        """First in, first out: the k-th receive posted gets the k-th send."""
        while channel.sent and channel.posted:
            sent, posted = channel.sent.popleft(), channel.posted.popleft()
            if sent != posted:
                raise Misfit(
                    rank,
                    position,
                    f"rank {channel.receiver} would receive microbatch {sent[1]} of minibatch "
                    f"{sent[0]} for microbatch {posted[1]} of minibatch {posted[0]}",
                )

    def _pair(
        self, rank: int, position: int, one: Instruction, channel: ChannelTokens, label: Label
    ) -> None:
        """One communicator for both directions: both ends must post in the same order."""
        if self.model == "per_direction":
            return
        if self.model == "device_order" and one.action.kind not in DATA:
            return  # goes with tags
        mine = self.pairs.setdefault((rank, one.peer), deque())
        other = self.pairs.setdefault((one.peer, rank), deque())
        mine.append((channel.sender, SEND[one.action.kind], one.edge, label, channel.stage))
        while mine and other:
            if mine[0] != other[0]:
                raise Misfit(
                    rank,
                    position,
                    f"on the one communicator of ranks {rank} and {one.peer} the next transfer "
                    f"is {_transfer(mine[0])} here and {_transfer(other[0])} there: both would "
                    "wait for ever",
                    hangs=True,
                )
            mine.popleft()
            other.popleft()

    def expect(self, program: Schedule, broadcasts: Sequence[Broadcast]) -> None:
        """Raise Misfit unless the program had these broadcasts, each once, and no others."""
        due: Counter[Told] = Counter()
        for kind, item, microbatch, root, receivers in broadcasts:
            loss = kind is Kind.LOSS
            for peer in receivers:
                for table in () if loss else (SEND, WAIT_SEND):
                    due[root, table[kind], item, microbatch, peer] += 1
                for table in () if loss else (POST_RECV, WAIT_RECV):
                    due[peer, table[kind], item, microbatch, root] += 1
                if loss:
                    due[root, Action.TELL_LOSS, item, microbatch, peer] += 1
                    due[peer, Action.HEAR_LOSS, item, microbatch, root] += 1
        for wrong, text in (
            (due - self.told, "was forgotten"),
            (self.told - due, "is not expected, or was done before"),
        ):
            for rank, action, item, microbatch, peer in wrong:
                one = Instruction(action, -1, 0, microbatch, item, peer)
                column = program.columns[rank] if rank < len(program.columns) else ()
                raise Misfit(rank, max(0, len(column) - 1), f"{one.text(-1)} {text}")

    def state(self, base: int) -> tuple[object, ...]:
        """What the future depends on, relative to the next call."""
        channels = []
        for key, one in sorted(self.channels.items()):
            labels = (one.sent, one.posted, one.waits, one.open_sends)
            relative = tuple(tuple((t - base, i) for t, i in each) for each in labels)
            if any(relative):
                channels.append((key, relative))
        groups = tuple(
            (key, tuple(one.posted.get(m, 0) * self._every(key[1]) - base for m in one.members))
            for key, one in sorted(self.groups.items())
            if key[0] is Kind.REDUCE or (key[0] is Kind.NORMS and self.spec.clipping)
        )
        return tuple(channels), groups


def _transfer(one: tuple[object, ...]) -> str:
    sender, action, edge, label, _ = one
    return f"{action} {edge} {label} from rank {sender}"


def shortest_cycle(blocked: dict[int, Blocked]) -> list[int]:
    """Ranks that wait for each other in a circle; or a chain that ends at a finished rank."""
    best: list[int] = []
    for start in sorted(blocked):
        paths = deque([[start]])
        seen = {start}
        while paths:
            path = paths.popleft()
            for other in blocked[path[-1]].ranks if path[-1] in blocked else ():
                if other == start and (not best or len(path) < len(best)):
                    best = path
                if other not in seen:
                    seen.add(other)
                    paths.append([*path, other])
    if best:
        return best
    chain = [min(blocked)]
    while chain[-1] in blocked:
        chain.append(blocked[chain[-1]].ranks[0])
    return chain
