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

from pdcompile.errors import ScheduleError
from pdcompile.passes.schedules.program_walk import Operation, ProgramWalk, Step, Visitor
from pdcompile.schedule import Action, Instruction, Kind, Phase, Schedule
from pdcompile.schedule.instruction import DATA, ENDS, TO_INPUTS
from pdcompile.schedule.spec import OPERATIONS, PipelineSpec

#: on a clock on which all stages are alike
_TICKS = {
    Action.FORWARD: 2,
    Action.BACKWARD: 4,
    Action.BACKWARD_INPUT: 2,
    Action.BACKWARD_WEIGHT: 2,
    Action.STEP: 1,
}


#: operations that some of their ranks have come to, and others will in a later call: each rank with
#: its instruction, whose minibatch is relative to the next call
HalfBegun = tuple[tuple[int, Instruction], ...]
#: of an event: its time, computes first, then as they were come to
Place = tuple[int, bool, int]
Label = tuple[int, int, int]  # stage, minibatch, microbatch


class _Order(Visitor):
    """All columns on one clock; `note` of an operation is the time at which its last rank came."""

    def __init__(self, spec: PipelineSpec, program: Schedule, before: HalfBegun):
        self.program = program
        self.walk = ProgramWalk(spec, self)
        self.operations: list[Operation] = []
        self.forward_only = program.name.endswith("+eval")
        self.sends: dict[Label, list[Operation]] = {}
        self.sums: dict[Label, list[Operation]] = {}  # of tied gradients, sent
        self.clocks = [0] * len(program.columns)
        self.events: list[list[tuple[Place, Step, Operation | None]]]
        self.events = [[] for _ in program.columns]
        self.count = 0
        for rank, one in before:
            self.walk.begin(Step(rank, one, (one.minibatch, one.microbatch), -1, -1))

    def run(self) -> None:
        """Walk to the end of all columns.  Raises ScheduleError where they come to none."""
        self.walk.run([(0, self.program)])
        for rank, (step, _) in sorted(self.walk.standing.items()):
            raise ScheduleError(
                f"rank {rank} cannot come past {step.one}: what it needs would have to be sent or "
                f"received further ahead than one operation at a time allows",
                where=f"{self.program.name}, rank {rank}, instruction {step.position}",
                remedy="another schedule, or smaller warm-up depths; over gloo with tags "
                "(PDCOMPILE_TRANSPORT unset) several may be in flight",
            )

    def came(self, step: Step, operation: Operation) -> None:
        one = step.one
        if len(operation.ends) == 1:
            self.operations.append(operation)
        operation.note = max(operation.note or 0, self.clocks[step.rank])
        if one.action.phase is Phase.SEND and one.peer != step.rank:
            sends = self.sums if one.action.kind is Kind.TIED else self.sends
            sends.setdefault((one.stage, *step.label), []).append(operation)

    def completed(self, step: Step, operation: Operation) -> None:
        """Make an event of it, with the last rank there."""
        for end in operation.ends.values():
            self._event(operation.note, end, operation)
        self.count += 1
        self.walk.end(operation)

    def lacks(self, step: Step) -> Operation | None:
        return next((one for one in self._before(step.one) if not one.over), None)

    def executed(self, step: Step, operation: Operation | None) -> float:
        if step.one.action.phase in ENDS:
            return 0.0
        rank, ticks = step.rank, _TICKS.get(step.one.action, 0)
        needed = [operation] if operation else self._before(step.one)
        time = max([self.clocks[rank], *(one.note for one in needed)]) + ticks
        self.clocks[rank] = time
        self._event(time, step, operation, computes=ticks > 0)
        self.count += 1
        return 0.0

    def _before(self, one: Instruction) -> list[Operation]:
        """Operations that come before an instruction (none of an earlier call: they are over).

        Values are sent before their backward, weights before the next update, and the sum of a
        minibatch's tied gradients before its update.
        """
        label = (one.stage, one.minibatch, one.microbatch)
        if one.action in TO_INPUTS or (one.action is Action.FREE and self.forward_only):
            return self.sends.get(label, [])
        if one.action is Action.STEP:
            sends = self.sends.items()
            weights = [op for of, ops in sends if of[::2] == (one.stage, -1) for op in ops]
            return weights + self.sums.get(label, [])
        return []

    def _event(
        self, time: int, step: Step, operation: Operation | None, *, computes: bool = False
    ) -> None:
        self.events[step.rank].append(((time, not computes, self.count), step, operation))

    def column(self, rank: int) -> Iterator[Instruction]:
        """A rank's part of the events, with at most `OPERATIONS` begun and not waited for."""
        begun: dict[Operation, Instruction] = {}  # what is to be waited for, in order
        for _, step, operation in sorted(self.events[rank], key=lambda event: event[0]):
            one, phase = step.one, step.one.action.phase
            if one.action.kind not in DATA or one.peer == rank or phase is Phase.LOCAL:
                yield one
            elif phase in ENDS:
                assert operation
                while len(begun) >= OPERATIONS:
                    yield begun.pop(next(iter(begun)))
                yield one
                begun[operation] = one._replace(action=ENDS[phase][one.action.kind])
            elif phase in (Phase.WAIT_SEND, Phase.WAIT_RECV, Phase.WAIT):
                if operation in begun:
                    yield begun.pop(operation)
            else:
                yield one
        yield from begun.values()

    def half_begun(self, shift: int) -> HalfBegun:
        """The rest, seen from the next call (`shift` 1 after a step)."""
        return tuple(
            (rank, end.one._replace(minibatch=end.label[0] - shift))
            for operation in self.operations
            if not operation.over
            for rank, end in operation.ends.items()
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
    walk = _Order(spec, program, before)
    walk.run()
    columns = tuple(tuple(walk.column(rank)) for rank in range(len(program.columns)))
    return Schedule(program.name, columns), walk.half_begun(shift)
