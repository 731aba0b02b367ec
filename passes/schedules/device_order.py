"""Device order: what a rank communicates as data, one operation after the other.

NCCL has no tags, a posted receive occupies the device until its message comes, and communicators
that are used at one time without order can block each other.  So a rank's transfers and collectives
begin in the order of its program, and at most `OPERATIONS` of them are unfinished: each begins
only when an earlier one has been waited for.

The order is the same for all ranks.  A program of `lower_comm` is walked on a clock of equal
stages; a transfer is one event, when both its ends are there (a collective: all), and so is a
compute, when it ends.  What a rank does is its part of this one sequence of events:

    POST_RECV, SEND, POST   at the event's place
    WAIT_…                  where the program waits for it, at the latest before the rank's next one

Why nothing blocks: of all operations that ranks wait for, take the first one of the sequence.  Its
other ranks cannot wait for a later one, because they would have waited for this one before, nor
for an earlier one, because it is the first; so they go on until they come to it.  `passes.check`
proves it for each program all the same, from the columns alone (model `device_order`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pdcompile.errors import ScheduleError
from pdcompile.schedule import Action, Instruction, Kind, Phase, Schedule
from pdcompile.schedule.instruction import DATA, ENDS, REPLICATED, TO_INPUTS
from pdcompile.schedule.spec import OPERATIONS, PipelineSpec

#: on a clock on which all stages are alike
_TICKS = {
    Action.FORWARD: 2,
    Action.BACKWARD: 4,
    Action.BACKWARD_INPUT: 2,
    Action.BACKWARD_WEIGHT: 2,
    Action.STEP: 1,
}

#: what an operation is, for all of its ranks: a transfer (kind, edge, sender, receiver, receiving
#: stage, minibatch, microbatch), or a collective (kind, stage, minibatch)
Name = tuple[int, ...]


class HalfBegun(NamedTuple):
    """Operations that some of their ranks have come to, and others will in a later call: each rank
    with its instruction, whose minibatch is relative to the next call."""

    ends: tuple[tuple[int, Instruction], ...] = ()


@dataclass(slots=True)
class _Operation:
    """A transfer or collective: the ranks that have come to it, and when the last one did."""

    size: int  # ranks that it takes
    ends: dict[int, Instruction] = field(default_factory=dict)
    time: int = 0

    @property
    def done(self) -> bool:
        return len(self.ends) == self.size


#: of an event: its time, computes first, then as they were come to
Place = tuple[int, bool, int]
Label = tuple[int, int, int]  # stage, minibatch, microbatch


class _Walk:
    """All columns on one clock."""

    def __init__(self, spec: PipelineSpec, program: Schedule, before: HalfBegun):
        self.spec, self.program = spec, program
        self.forward_only = program.name.endswith("+eval")
        self.stage_of = {rank: stages[0] for rank, stages in spec.holders}
        self.operations: dict[Name, _Operation] = {}
        self.sends: dict[Label, list[_Operation]] = {}
        self.sums: dict[Label, list[_Operation]] = {}  # of tied gradients, sent
        self.clocks = [0] * len(program.columns)
        self.position = [0] * len(program.columns)
        self.events: list[list[tuple[Place, Instruction]]] = [[] for _ in program.columns]
        self.count = 0
        for rank, one in before.ends:
            self._begin(rank, one)

    def run(self) -> None:
        """To the end of all columns.  Raises ScheduleError where they come to none."""
        columns, moved = self.program.columns, True
        while moved:
            moved = False
            for rank, column in enumerate(columns):
                while self.position[rank] < len(column) and self._do(
                    rank, column[self.position[rank]]
                ):
                    self.position[rank] += 1
                    moved = True
        for rank, column in enumerate(columns):
            if self.position[rank] < len(column):
                one = column[self.position[rank]]
                raise ScheduleError(
                    f"rank {rank} cannot come past {one}: what it needs would have to be sent or "
                    f"received further ahead than one operation at a time allows",
                    where=f"{self.program.name}, rank {rank}, instruction {self.position[rank]}",
                    remedy="another schedule, or smaller warm-up depths; over gloo with tags "
                    "(PDCOMPILE_TRANSPORT unset) several may be in flight",
                )

    def _do(self, rank: int, one: Instruction) -> bool:
        """Whether the rank comes past this instruction."""
        data = one.action.kind in DATA and one.peer != rank
        if data and one.action.phase in ENDS:
            self._begin(rank, one)
            return True
        needed = self._needed(rank, one, waits=data)
        if not all(operation.done for operation in needed):
            return False
        ticks = _TICKS.get(one.action, 0)
        time = max([self.clocks[rank], *(operation.time for operation in needed)]) + ticks
        self.clocks[rank] = time
        self._event(time, {rank: one}, computes=ticks > 0)
        return True

    def _needed(self, rank: int, one: Instruction, *, waits: bool) -> list[_Operation]:
        """Operations that come before an instruction (none of an earlier call: they are over).

        Values are sent before their backward, weights before the next update, and the sum of a
        minibatch's tied gradients before its update.
        """
        if waits and one.action.phase in (Phase.WAIT_SEND, Phase.WAIT_RECV, Phase.WAIT):
            found = self.operations.get(self._name(rank, one))
            return [] if found is None else [found]
        if one.action in TO_INPUTS or (one.action is Action.FREE and self.forward_only):
            return self.sends.get((one.stage, one.minibatch, one.microbatch), [])
        if one.action is Action.STEP:
            sends = self.sends.items()
            weights = [op for label, ops in sends if label[::2] == (one.stage, -1) for op in ops]
            return weights + self.sums.get((one.stage, one.minibatch, one.microbatch), [])
        return []

    def _begin(self, rank: int, one: Instruction) -> None:
        """This rank comes to an operation; with the last one there, it is an event."""
        name = self._name(rank, one)
        found = self.operations.get(name)
        if found is None:
            found = self.operations[name] = _Operation(self._size(one))
        found.ends[rank] = one
        found.time = max(found.time, self.clocks[rank])
        if one.action.phase is Phase.SEND:
            sends = self.sums if one.action.kind is Kind.TIED else self.sends
            sends.setdefault((one.stage, one.minibatch, one.microbatch), []).append(found)
        if found.done:
            self._event(found.time, found.ends, computes=False)

    def _event(self, time: int, ends: dict[int, Instruction], *, computes: bool) -> None:
        for rank, one in ends.items():
            self.events[rank].append(((time, not computes, self.count), one))
        self.count += 1

    def _name(self, rank: int, one: Instruction) -> Name:
        kind = one.action.kind
        if one.action.phase in (Phase.POST, Phase.WAIT):
            return kind, one.stage if kind in REPLICATED else -1, one.minibatch
        if one.action.phase in (Phase.SEND, Phase.WAIT_SEND):
            stage = one.target if one.target >= 0 else self.stage_of.get(one.peer, -1)
            ends = rank, one.peer, stage
        else:
            ends = one.peer, rank, one.stage
        return kind, one.edge, *ends, one.minibatch, one.microbatch

    def _size(self, one: Instruction) -> int:
        if one.action.phase is not Phase.POST:
            return 2
        replicated = one.action.kind in REPLICATED
        return len(self.spec.ranks[one.stage]) if replicated else len(self.stage_of)

    def column(self, rank: int) -> Iterator[Instruction]:
        """A rank's part of the events, with at most `OPERATIONS` begun and not waited for."""
        begun: dict[Name, Instruction] = {}  # what is to be waited for, in order
        for _, one in sorted(self.events[rank], key=lambda event: event[0]):
            phase = one.action.phase
            if one.action.kind not in DATA or one.peer == rank or phase is Phase.LOCAL:
                yield one
            elif phase in ENDS:
                while len(begun) >= OPERATIONS:
                    yield begun.pop(next(iter(begun)))
                yield one
                action = ENDS[phase][one.action.kind]
                begun[self._name(rank, one)] = one._replace(action=action)
            elif phase in (Phase.WAIT_SEND, Phase.WAIT_RECV, Phase.WAIT):
                if (name := self._name(rank, one)) in begun:
                    yield begun.pop(name)
            else:
                yield one
        yield from begun.values()

    def half_begun(self, shift: int) -> HalfBegun:
        """What is left, seen from the next call (`shift` 1 after a step)."""
        return HalfBegun(
            tuple(
                (rank, end._replace(minibatch=end.minibatch - shift))
                for found in self.operations.values()
                if not found.done
                for rank, end in found.ends.items()
            )
        )


def in_device_order(
    spec: PipelineSpec, program: Schedule, before: HalfBegun, shift: int = 0
) -> tuple[Schedule, HalfBegun]:
    """A program whose communication is in device order, and what it leaves half begun.

    Args:
        program: of `lower_comm`, which may have any number of operations in flight.
        before: what the programs before it left.
        shift: 1 where the next program belongs to the next minibatch.

    Raises ScheduleError where one operation at a time does not get to the end.
    """
    walk = _Walk(spec, program, before)
    walk.run()
    columns = tuple(tuple(walk.column(rank)) for rank in range(len(program.columns)))
    return Schedule(program.name, columns), walk.half_begun(shift)
