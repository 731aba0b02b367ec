"""Walk over programs: every rank executes its instructions in order, and transfers complete once.

The two ends of a transfer come to it in the order of its channel (first in, first out), and so do
the members of a collective.  What an instruction takes and what a complete operation means is a
visitor's: tokens (`passes.check.exchange`), seconds (`passes.simulate.clock`), a sequence of events
(`device_order`).  Bytes need no other rank (`passes.simulate.ledger`): `steps` is enough.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from pdcompile.schedule import Instruction, Phase, Schedule
from pdcompile.schedule.instruction import REPLICATED
from pdcompile.schedule.spec import PipelineSpec

Label = tuple[int, int]  # minibatch from the beginning of training, microbatch or −1
#: of a transfer its kind, edge, sender, receiver and the stage that receives; of a collective its
#: kind and stage (−1: it is that of all ranks)
Key = tuple[int, ...]

_SENDS = frozenset((Phase.SEND, Phase.WAIT_SEND))
_BEGINS = {Phase.WAIT_SEND: Phase.SEND, Phase.WAIT_RECV: Phase.POST_RECV, Phase.WAIT: Phase.POST}
_BEGUN = frozenset(_BEGINS.values())


class Step(NamedTuple):
    """An instruction at its place: of which rank, and where in which of the programs."""

    rank: int
    one: Instruction
    label: Label
    program: int
    position: int


Programs = Sequence[tuple[int, Schedule]]  # each with the minibatches that begin before it


def numbered(spec: PipelineSpec, programs: Iterable[Schedule]) -> Programs:
    """Successive programs from the beginning of training."""
    found, base = [], 0
    for program in programs:
        found.append((base, program))
        base += program.name == spec.name
    return found


def steps(programs: Programs, rank: int) -> Iterator[Step]:
    """All that a rank executes."""
    for number, (base, program) in enumerate(programs):
        for position, one in enumerate(program.columns[rank]):
            yield Step(rank, one, (base + one.minibatch, one.microbatch), number, position)


@dataclass(slots=True, eq=False)
class Operation:
    """A transfer or collective, with the step of each rank that has come to it.

    `over`: waiting for it ends, at the second `until`.  `awaited`: its receiver has come to the
    wait.  `note` is the visitor's.
    """

    key: Key
    members: tuple[int, ...]  # sender and receiver (one where they are the same rank), or all ranks
    ends: dict[int, Step] = field(default_factory=dict)
    over: bool = False
    until: float = 0.0
    awaited: bool = False
    asleep: tuple[int, ...] = ()  # ranks that wait for it
    note: Any = None


class Visitor:
    """Reads along; as it stands nothing takes time."""

    walk: ProgramWalk

    def came(self, step: Step, operation: Operation) -> None:
        """A rank has begun its part of an operation."""

    def completed(self, step: Step, operation: Operation) -> None:
        """All have come, the last one with this step.  The visitor ends it, here or later."""
        self.walk.end(operation)

    def arrived(self, operation: Operation) -> None:
        """The second of `ProgramWalk.later` has come."""

    def lacks(self, step: Step) -> Operation | None:
        """An operation that has to be over before a step which is no part of any."""

    def stray(self, step: Step) -> None:
        """A wait for what its rank has not begun, or not as the next one."""

    def executed(self, step: Step, operation: Operation | None) -> float:
        """A step is executed, which begins this operation or waited for it; returns its seconds."""
        return 0.0


class ProgramWalk:
    """Transfers that are begun and not waited for; `run` executes programs that follow each other.

    `rendezvous`: waiting for a send ends only when its receiver has come to the wait.
    """

    def __init__(self, spec: PipelineSpec, visitor: Visitor, *, rendezvous: bool = False):
        self.spec, self.visitor, self.rendezvous = spec, visitor, rendezvous
        visitor.walk = self
        self.stage_of = {rank: stages[0] for rank, stages in spec.holders}
        self.incomplete: dict[Key, deque[Operation]] = {}
        self.begun: dict[tuple[int, Phase, Key], deque[Operation]] = {}  # by rank, not waited for
        self.standing: dict[int, tuple[Step, Operation]] = {}  # of ranks that wait
        self.now = 0.0

    def run(self, programs: Programs) -> None:
        """Runs all ranks as far as they come: those that come to no end are left `standing`."""
        ranks = range(self.spec.num_ranks)
        self.todo = [steps(programs, rank) for rank in ranks]
        self.agenda: list[tuple[float, int, int, Operation | None]] = []
        self.ticket = count()
        for rank in ranks:
            self._at(self.now, rank)
        while self.agenda:
            self.now, _, rank, arriving = heapq.heappop(self.agenda)
            if arriving is None:
                self._advance(rank)
            else:
                self.visitor.arrived(arriving)
        self.todo = []

    def _at(self, seconds: float, rank: int, operation: Operation | None = None) -> None:
        heapq.heappush(self.agenda, (seconds, next(self.ticket), rank, operation))

    def later(self, operation: Operation, seconds: float) -> None:
        """Tell the visitor of an operation at this second."""
        self._at(seconds, -1, operation)

    def end(self, operation: Operation, until: float = 0.0) -> None:
        """Nobody has to wait for it beyond this second."""
        operation.over, operation.until = True, until
        self._wake(operation)

    def _wake(self, operation: Operation) -> None:
        for rank in operation.asleep:
            self._at(self.now, rank)
        operation.asleep = ()

    def _sleep(self, step: Step, operation: Operation) -> None:
        self.standing[step.rank] = step, operation
        operation.asleep += (step.rank,)

    def _advance(self, rank: int) -> None:
        """Go on until the rank computes, waits or is finished."""
        visitor, todo = self.visitor, self.todo[rank]
        again = self.standing.pop(rank, None)
        step = again[0] if again else next(todo, None)
        while step is not None:
            phase, operation = step.one.action.phase, None
            if phase in _BEGUN:
                operation = self.begin(step)
            elif phase in _BEGINS:
                queue = self.begun.get((rank, _BEGINS[phase], self.key_of(step)))
                if not queue or queue[0].ends[rank].label != step.label:
                    visitor.stray(step)
                elif self._waits(step, queue[0]):
                    return
                else:
                    operation = queue.popleft()
            elif (lacking := visitor.lacks(step)) is not None:
                self._sleep(step, lacking)
                return
            seconds = visitor.executed(step, operation)
            if seconds > 0:
                self._at(self.now + seconds, rank)
                return
            step = next(todo, None)

    def begin(self, step: Step) -> Operation:
        """A rank comes to an operation, the next one of its channel."""
        rank, one, key = step.rank, step.one, self.key_of(step)
        waiting = self.incomplete.get(key)
        if waiting is None:
            waiting = self.incomplete[key] = deque()
        if waiting and rank not in waiting[-1].ends:  # else it has come to all of them
            found = next(each for each in waiting if rank not in each.ends)
        else:
            found = Operation(key, self._members(key))
            waiting.append(found)
        found.ends[rank] = step
        phase = Phase.POST_RECV if rank == one.peer else one.action.phase
        queue = self.begun.get((rank, phase, key))
        if queue is None:
            queue = self.begun[rank, phase, key] = deque()
        queue.append(found)
        self.visitor.came(step, found)
        if len(found.ends) == len(found.members):
            waiting.popleft()
            self.visitor.completed(step, found)
        return found

    def _waits(self, step: Step, operation: Operation) -> bool:
        """True if a rank has to wait."""
        meets = True
        if self.rendezvous:
            phase = step.one.action.phase
            if phase is Phase.WAIT_RECV and not operation.awaited:
                operation.awaited = True
                self._wake(operation)
            meets = phase is not Phase.WAIT_SEND or operation.awaited
        if not (operation.over and meets):
            self._sleep(step, operation)
            return True
        if operation.until > self.now:
            self.standing[step.rank] = step, operation
            self._at(operation.until, step.rank)
            return True
        return False

    def key_of(self, step: Step) -> Key:
        """The channel, or the collective."""
        rank, one = step.rank, step.one
        kind, phase = one.action.kind, one.action.phase
        if phase is Phase.POST or phase is Phase.WAIT:
            return kind, one.stage if kind in REPLICATED else -1
        if phase not in _SENDS:
            return kind, one.edge, one.peer, rank, one.stage
        # Where a rank holds several stages, a send says which one receives.
        alone = -1 if one.stage < 0 else self.stage_of.get(one.peer, -1)
        return kind, one.edge, rank, one.peer, one.target if one.target >= 0 else alone

    def _members(self, key: Key) -> tuple[int, ...]:
        if len(key) > 2:
            return key[2:4] if key[2] != key[3] else key[2:3]
        return self.spec.ranks[key[1]] if key[1] >= 0 else tuple(self.stage_of)
