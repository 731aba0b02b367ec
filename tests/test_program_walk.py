"""The one walk over programs: what its visitors are told."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.passes.schedules.program_walk import (
    Operation,
    ProgramWalk,
    Step,
    Visitor,
    numbered,
)
from pdcompile.plan import Plan
from pdcompile.schedule import Instruction, Phase
from tests.helpers.schedules import make_plan, mutated, plans
from tests.test_check import programs_of

BEGINS = (Phase.SEND, Phase.POST_RECV, Phase.POST)


class Reader(Visitor):
    """Notes all that it is told; everything may take time, and messages do."""

    def __init__(self, plan: Plan, delay: float):
        self.delay = delay
        self.walk = ProgramWalk(plan.spec, self)
        self.seen: list[list[Instruction]] = [[] for _ in range(plan.num_ranks)]
        self.begun = Counter[int]()
        self.complete: list[Operation] = []

    def came(self, step: Step, operation: Operation) -> None:
        self.begun[id(operation)] += 1
        assert operation.ends[step.rank] is step

    def completed(self, step: Step, operation: Operation) -> None:
        assert not operation.over
        self.complete.append(operation)
        self.walk.later(operation, self.walk.now + self.delay)

    def arrived(self, operation: Operation) -> None:
        self.walk.end(operation)

    def stray(self, step: Step) -> None:
        raise AssertionError(step)

    def executed(self, step: Step, operation: Operation | None) -> float:
        one = step.one
        if one.action.phase in (Phase.WAIT_SEND, Phase.WAIT_RECV, Phase.WAIT):
            assert operation is not None
            assert operation.over
        self.seen[step.rank].append(one)
        return self.delay if one.action.phase is Phase.COMPUTE else 0.0


@settings(max_examples=40)
@given(plans(max_stages=5, several=True), st.sampled_from([0.0, 1.0]))
def test_each_operation_is_complete_once_and_each_rank_executes_its_column(
    plan: Plan, delay: float
) -> None:
    programs = programs_of(plan, (plan.training.num_microbatches,) * 2)
    reader = Reader(plan, delay)
    reader.walk.run(numbered(reader.walk.spec, programs))
    assert not reader.walk.standing
    for rank, seen in enumerate(reader.seen):
        assert seen == [one for program in programs for one in program.columns[rank]]
    begins = [one for seen in reader.seen for one in seen if one.action.phase in BEGINS]
    assert sum(reader.begun.values()) == len(begins)
    assert len({id(one) for one in reader.complete}) == len(reader.complete) == len(reader.begun)
    for operation in reader.complete:
        assert set(operation.ends) == set(operation.members)
        if operation.ends[operation.members[0]].one.action.phase is not Phase.POST:
            assert len({step.label for step in operation.ends.values()}) == 1


def test_ranks_that_wait_for_ever_are_left_standing() -> None:
    plan = make_plan("1f1b", 2, 2)
    (program, _) = programs_of(plan, (2,))
    sent = [one for one in program.columns[0] if one.action.phase is not Phase.SEND]
    reader = Reader(plan, 1.0)
    reader.walk.run([(0, mutated(program, 0, sent))])
    (step, operation) = reader.walk.standing[1]
    assert step.one.action.phase is Phase.WAIT_RECV
    assert set(operation.ends) == {1}
