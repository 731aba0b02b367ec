"""The clock: when every instruction of successive programs runs.

The timing model, all of it:
- A rank executes its instructions in order; posts, sends and FREE take no time.  FORWARD and
  BACKWARD take the stage's seconds (those of its slowest rank; where replicas have turns of their
  own, each rank's own; a stage that recomputes adds its forward to its backward, after the gradient
  has come; the two parts of a split backward take half of it each), STEP what is given (0).  After
  a program the rank goes on with the next one at once.
- Where ranks get weights from their host to run a stage, FORWARD and BACKWARD take the time of that
  too, by the rank's own link, and BACKWARD that of its gradients' way there, one after the other;
  gradients are summed over gloo, and STEP moves its bytes at the rate of the slowest such link.
- A transfer is ready when its SEND and its POST_RECV have both been executed (rendezvous).
  It takes latency + bytes / bandwidth of the level between the two ranks and runs beside
  compute.  A link (an ordered pair of ranks; the unordered pair where the level is half duplex)
  carries one transfer at a time, in the order in which they became ready.
- WAIT_RECV and WAIT_SEND end when their transfer ends.  A hop inside a rank takes no time.
- WAIT_REDUCE ends 2 (r − 1) (bytes / r / bandwidth + latency) after the last of r replicas
  has posted (ring); where updates are made at homes, half of it (reduce-scatter), and WAIT_GATHER
  the other half (all-gather) after the last has given its weights, at once where all read them in
  one memory.  WAIT_NORMS ends one latency
  after the last rank has posted.  All use the slowest level between members and do not slow
  transfers down.  LOSS takes no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pdcompile.cluster import GLOO, Link, message_seconds, slowest
from pdcompile.errors import ScheduleError
from pdcompile.passes.schedules.program_walk import (
    Operation,
    ProgramWalk,
    Step,
    Visitor,
    numbered,
)
from pdcompile.plan import Plan
from pdcompile.schedule import Action, Instruction, Kind, Phase, Schedule
from pdcompile.schedule.fetches import fetches
from pdcompile.schedule.instruction import ENDS, REPLICATED

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


def compute_seconds(plan: Plan) -> dict[tuple[Action, int], float]:
    """Seconds of each action on each stage."""
    found, kind = {}, plan.training.kind
    devices, stream = plan.machines.devices if plan.fetched else (), kind.stream
    for s, stage in enumerate(plan.stages):
        again = stage.deployment.again(stage.forward_seconds)
        found[Action.FORWARD, s] = stage.forward_seconds
        found[Action.BACKWARD, s] = stage.backward_pass_seconds
        found[Action.STEP, s] = stage.update_seconds
        if devices:  # on the host
            owned = max(stage.home_bytes, default=stage.trainable_bytes)
            rate = min(one.host_rate for one in devices)
            found[Action.STEP, s] = plan.training.update_seconds(owned, versions=stream, rate=rate)
        first, later = kind.halves(stage.backward_pass_seconds, again)
        found[Action.BACKWARD_INPUT, s], found[Action.BACKWARD_WEIGHT, s] = first, later
    return found


class Clock(Visitor):
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
        self.spec = plan.spec
        self.seconds, self.fetches = compute_seconds(plan), fetches(plan)
        self.events: list[TimelineEvent] = []
        num_ranks = self.spec.num_ranks
        self.causes: list[TimelineEvent | None] = [None] * num_ranks  # whose end each rank goes by
        self.passed: list[list[float]] = [[] for _ in range(num_ranks)]
        self.ends = [[0.0] * num_ranks for _ in programs]
        self.programs = numbered(self.spec, programs)
        self.walk = ProgramWalk(self.spec, self)
        self.link_queue: dict[tuple[int, int], deque[Operation]] = {}

    @property
    def timeline(self) -> tuple[TimelineEvent, ...]:
        return tuple(sorted(self.events, key=lambda one: (one.start_seconds, one.rank)))

    @property
    def passed_seconds(self) -> tuple[tuple[float, ...], ...]:
        return tuple(map(tuple, self.passed)) if self.keeps_events else ()

    def run(self) -> tuple[float, ...]:
        """Run, and return when each program's last rank was done.

        Raises ScheduleError when ranks wait for ever (`check` says more).
        """
        self.walk.run(self.programs)
        for rank, (step, _) in sorted(self.walk.standing.items()):
            raise ScheduleError(f"rank {rank} waits for ever at {step.one}")
        return tuple(map(max, self.ends))

    def executed(self, step: Step, operation: Operation | None) -> float:
        rank, one, now = step.rank, step.one, self.walk.now
        seconds = 0.0
        if one.action.phase is Phase.COMPUTE:
            seconds = self.seconds[one.action, one.stage] * self._pace(step)
            seconds += self.fetches.get((one.action, one.stage, rank), 0.0)
            if self.keeps_events:
                event = TimelineEvent(
                    rank, one.stage, one.action, *step.label,
                    now, now + seconds, cause=self.causes[rank],
                )  # fmt: skip
                self.events.append(event)
                self.causes[rank] = event
        elif operation is not None and one.action.phase not in ENDS:
            waited, own = operation.note, self.causes[rank]
            if waited is not None and (own is None or own.end_seconds < waited.end_seconds):
                self.causes[rank] = waited  # where it was busy as long, it goes by its own work
        self.ends[step.program][rank] = now + seconds
        if self.keeps_events:
            self.passed[rank].append(now + seconds)
        return seconds

    def _pace(self, step: Step) -> float:
        """Seconds of a rank by those of its stage: of an update, by the bytes of its home."""
        stage, updates = self.plan.stages[step.one.stage], step.one.action is Action.STEP
        each = stage.home_bytes if updates else stage.paces
        if not any(each):
            return 1.0
        own = each[self.spec.ranks[step.one.stage].index(step.rank)]
        return own / max(each) if updates else own

    def stray(self, step: Step) -> None:
        raise ScheduleError(f"rank {step.rank} at {step.one} waits for what was not begun before")

    def completed(self, step: Step, operation: Operation) -> None:
        """A transfer joins the queue of its link, a collective begins."""
        if step.one.action.phase is Phase.POST:
            self._sum(step, operation)
        elif len(operation.members) == 1:
            self.walk.end(operation)
        else:
            queue = self.link_queue.setdefault(self._link(operation), deque())
            queue.append(operation)
            if len(queue) == 1:
                self._start(operation, self.causes[step.rank])

    def _start(self, operation: Operation, cause: TimelineEvent | None) -> None:
        sender, receiver = operation.members
        sent, now = operation.ends[sender], self.walk.now
        link, size = self.links(sender, receiver), self.bytes_of(sent.one)
        end = now + message_seconds(link, size)
        if self.keeps_events:
            operation.note = TimelineEvent(
                sender, sent.one.stage, sent.one.action, *sent.label,
                now, end, receiver, size, cause,
            )  # fmt: skip
            self.events.append(operation.note)
        self.walk.later(operation, end)

    def arrived(self, operation: Operation) -> None:
        queue = self.link_queue[self._link(operation)]
        queue.popleft()
        if queue:
            self._start(queue[0], operation.note)
        self.walk.end(operation)

    def _link(self, operation: Operation) -> tuple[int, int]:
        first, second = operation.members
        full_duplex = self.links(first, second).full_duplex
        return (first, second) if full_duplex else (min(first, second), max(first, second))

    def _sum(self, step: Step, operation: Operation) -> None:
        """All members have posted: from now on they sum in a ring, or exchange one message."""
        one, now, members = step.one, self.walk.now, operation.members
        link = slowest(self.links(members[0], other) for other in members[1:])
        link = GLOO if self.spec.fetched and one.action.kind in REPLICATED else link
        if one.action.kind in REPLICATED:
            stage = self.plan.stages[one.stage]
            seconds = stage.deployment.sum_seconds(link, stage.trainable_bytes)
            end = now + (seconds / 2 if self.spec.homes else seconds) * self._sent(one)
        else:
            end = now + message_seconds(link, 0.0)
        operation.note = TimelineEvent(
            step.rank, one.stage, one.action, *step.label, now, end,
            num_bytes=self.bytes_of(one), cause=self.causes[step.rank],
        )  # fmt: skip
        if self.keeps_events:
            self.events += [replace(operation.note, rank=each) for each in members]
        self.walk.end(operation, until=end)

    def _sent(self, one: Instruction) -> bool:
        """False for weights that come from their homes without being sent."""
        return not (self.spec.once and one.action.kind is Kind.GATHER)

    def bytes_of(self, one: Instruction) -> int:
        """Bytes that a rank puts on its links: of a send, or its part of a ring."""
        if one.action.phase is Phase.POST and one.action.kind in REPLICATED:
            stage = self.plan.stages[one.stage]
            both = stage.deployment.summed_bytes(stage.trainable_bytes)
            return -(-both // 2) * self._sent(one) if self.spec.homes else both
        if one.action.phase is not Phase.SEND:
            return 0
        values = one.action.kind in (Kind.VALUE, Kind.GRADIENT)
        return (self.plan.edges if values else self.plan.tied)[one.edge].bytes
