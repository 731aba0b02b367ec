"""Device order: one sequence of operations for all ranks, one of them at a time on each."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.errors import DeadlockError, ScheduleError
from pdcompile.passes.check import check, check_programs
from pdcompile.passes.check.programs import Programs
from pdcompile.passes.schedules import make_stream
from pdcompile.passes.schedules.alone import written_of
from pdcompile.passes.schedules.between_calls import norms, refresh
from pdcompile.passes.schedules.device_order import in_device_order
from pdcompile.passes.schedules.stream import gradients
from pdcompile.plan import Plan, TiedParameter
from pdcompile.schedule import Instruction, Kind, Phase, Schedule
from pdcompile.schedule.instruction import DATA, ENDS, REPLICATED
from pdcompile.schedule.registry import KINDS, allowed
from pdcompile.schedule.spec import Broadcast
from tests.helpers.schedules import make_plan, microbatches, mutated, plans, rich
from tests.test_check import blocking, programs_of
from tests.test_written import of


def ordered_programs(plan: Plan, counts: Sequence[int]) -> list[Schedule]:
    stream, found = make_stream(plan, ordered=True), []
    for count in counts:
        program, stream = stream.step(count)
        found.append(program)
    return [*found, stream.flush()[0]]


def operations(column: Sequence[Instruction], rank: int) -> list[int]:
    """Places where a rank's data operations begin."""
    return [
        n
        for n, one in enumerate(column)
        if one.action.kind in DATA and one.action.phase in ENDS and one.peer != rank
    ]


# -- what is proved ------------------------------------------------------------------------------


@settings(max_examples=40)
@given(plans(max_stages=6, several=True), st.data())
def test_every_schedule_runs_in_device_order(plan: Plan, data: st.DataObject) -> None:
    """Skips, ties, replicas, clipping, several stages a rank; minibatches of any sizes."""
    check(plan, ordered=True)
    sizes = st.integers(1, plan.training.num_microbatches)
    counts = data.draw(st.lists(sizes, min_size=1, max_size=6))
    check_programs(plan, ordered_programs(plan, counts), ordered=True)


@settings(max_examples=40)
@given(plans(), st.data())
def test_so_do_the_programs_between_calls(plan: Plan, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, plan.training.num_microbatches))
    programs = Programs(plan, plan.edges, ordered=True)
    assert programs.step(count) == make_stream(plan, ordered=True).step(count)[0]
    programs.flush()
    programs.restart(0)
    programs.of(norms)
    programs.evaluation(count, with_loss=True)
    if not KINDS[plan.training.schedule].stream:
        programs.of(gradients, count)
        programs.of(refresh)
    if plan.num_ranks > 1:
        programs.share((Broadcast(Kind.OUTPUT, 0, -1, 0, plan.spec.others(0)),))


@settings(max_examples=40)
@given(plans(several=True), st.data())
def test_nothing_but_the_order_changes(plan: Plan, data: st.DataObject) -> None:
    """Computes stay in their order, and what is sent and received is the same, call after call."""
    sizes = st.integers(1, plan.training.num_microbatches)
    counts = tuple(data.draw(st.lists(sizes, min_size=1, max_size=5)))
    tagged, ordered = programs_of(plan, counts), ordered_programs(plan, counts)
    waits = (Phase.WAIT_RECV, Phase.WAIT_SEND, Phase.WAIT)

    def moved(programs: list[Schedule], rank: int) -> Counter[Instruction]:
        found: Counter[Instruction] = Counter()
        for call, program in enumerate(programs):
            flushes = call == len(counts)
            for one in program.columns[rank]:
                if one.action.kind in DATA and one.action.phase not in (Phase.LOCAL, *waits):
                    base = call - 1 if flushes else call
                    found[one._replace(minibatch=base + one.minibatch + flushes)] += 1
        return found

    for rank in range(plan.num_ranks):
        assert moved(tagged, rank) == moved(ordered, rank)
        for before, after in zip(tagged, ordered, strict=True):
            kept = [
                [one for one in program.columns[rank] if one.action.phase is Phase.COMPUTE]
                for program in (before, after)
            ]
            assert kept[0] == kept[1]


def test_a_written_schedule_runs_in_device_order() -> None:
    for name in ("gpipe", "1f1b", "zb-h1", "interleaved"):
        plan = make_plan(name, 4, 4, per_rank=2 if name == "interleaved" else 1)
        check(of(written_of(plan)), ordered=True)


def test_the_proof_says_so() -> None:
    plan = make_plan("2bw", 3, 4, clip=1.0, replicas=(2, 1, 1))
    text = str(check(plan, ordered=True))
    assert "channels device_order" in text
    assert "at most 1 unfinished on a rank" in text
    assert "unfinished" not in str(check(plan))


# -- what is refused -----------------------------------------------------------------------------


def test_the_order_of_pytorch_172668_is_refused() -> None:
    """Rank 0 sends F1 and then receives B0, rank 1 sends B0 and then receives F1."""
    plan = make_plan("1f1b", 2, 2)
    program = blocking(programs_of(plan, (2,))[0])
    with pytest.raises(DeadlockError) as caught:
        check_programs(plan, [program], ordered=True)
    assert caught.value.message == (
        "deadlock: rank 0 (stage 0) at WAIT_SEND 1 e0 >1 s0, microbatch 1 of this minibatch waits "
        "for rank 1 (stage 1) at WAIT_SEND_GRADIENT 0 e0 >0 s1, microbatch 0 of this minibatch "
        "waits for rank 0"
    )
    order = [str(one) for one in program.columns[0]]
    assert order.index("SEND 1 e0 >1 s0") < order.index("POST_RECV_GRADIENT 0 e0 <1 s0")
    check_programs(plan, ordered_programs(plan, (2,)), ordered=True)


def test_receives_that_are_posted_ahead_are_refused() -> None:
    plan = make_plan("1f1b", 2, 3)
    with pytest.raises(ScheduleError) as caught:
        check_programs(plan, programs_of(plan, (3,)), ordered=True)
    assert "occupies the device: 1 at a time in device order" in caught.value.message
    assert "<-- here" in str(caught.value.where)


def test_what_cannot_be_put_in_order_is_refused() -> None:
    plan = make_plan("1f1b", 2, 4)
    program = blocking(programs_of(plan, (4,))[0])
    with pytest.raises(ScheduleError, match="rank 0 cannot come past") as caught:
        in_device_order(plan.spec, program, ())
    assert caught.value.where == "1f1b, rank 0, instruction 6"
    assert "PDCOMPILE_TRANSPORT" in str(caught.value.remedy)


class Devices:
    """Runs programs as devices do, and knows no `check`: each rank has a queue of operations that
    begin in its order, an operation is over when it is the next one of all its ranks, and a wait
    ends when it is.  `run` says whether all come to the end."""

    def __init__(self, plan: Plan) -> None:
        self.spec = plan.spec
        self.queues: list[deque[Any]] = [deque() for _ in range(plan.num_ranks)]
        self.over: Counter[Any] = Counter()
        self.base = 0

    def name(self, rank: int, one: Instruction) -> Any:
        kind, minibatch = one.action.kind, self.base + one.minibatch
        if one.action.phase in (Phase.POST, Phase.WAIT):
            members = tuple(r for r, _ in self.spec.holders)
            if kind in REPLICATED:
                members = self.spec.ranks[one.stage]
            return kind, minibatch, members
        sends = one.action.phase in (Phase.SEND, Phase.WAIT_SEND)
        ends = (rank, one.peer) if sends else (one.peer, rank)
        return kind, minibatch, one.microbatch, one.edge, ends

    def run(self, programs: Sequence[Schedule]) -> bool:
        for program in programs:
            position, moved = [0] * len(program.columns), True
            while moved:
                moved = False
                for rank, column in enumerate(program.columns):
                    while position[rank] < len(column) and self.do(rank, column[position[rank]]):
                        position[rank] += 1
                        moved = True
                moved = self.exchange() or moved
            if any(at < len(c) for at, c in zip(position, program.columns, strict=True)):
                return False
            self.base += "+" not in program.name
        return not any(self.queues)

    def do(self, rank: int, one: Instruction) -> bool:
        if one.action.kind not in DATA or one.peer == rank or one.action.phase is Phase.COMPUTE:
            return True
        name = self.name(rank, one)
        if one.action.phase in ENDS:
            self.queues[rank].append(name)
        elif one.action.phase in (Phase.WAIT_SEND, Phase.WAIT_RECV, Phase.WAIT):
            return name not in self.queues[rank]
        return True

    def exchange(self) -> bool:
        for queue in self.queues:
            if queue:
                members = queue[0][-1]
                if all(self.queues[m] and self.queues[m][0] == queue[0] for m in members):
                    for member in members:
                        self.queues[member].popleft()
                    return True
        return False


@settings(max_examples=30)
@given(plans(max_stages=4, max_microbatches=4), st.data())
def test_devices_come_to_the_end(plan: Plan, data: st.DataObject) -> None:
    count = plan.training.num_microbatches
    short = data.draw(st.integers(1, count))
    assert Devices(plan).run(ordered_programs(plan, (count, count, short, count)))


def exchanged(column: Sequence[Instruction], rank: int, first: int) -> list[Instruction]:
    """The operations that begin `first` and next change places, each with its wait."""
    starts = operations(column, rank)
    ends = [starts[first], starts[first + 1]]
    ends.append(starts[first + 2] if first + 2 < len(starts) else len(column))
    out = list(column[: ends[0]])

    def split(part: Sequence[Instruction]) -> tuple[list[Instruction], list[Instruction]]:
        wait = ENDS[part[0].action.phase][part[0].action.kind]
        own = [one for one in part if one == part[0] or one.action is wait]
        return own, [one for one in part if one not in own]

    a, rest_a = split(column[ends[0] : ends[1]])
    b, rest_b = split(column[ends[1] : ends[2]])
    return [*out, *b, *rest_a, *a, *rest_b, *column[ends[2] :]]


@settings(max_examples=80)
@given(plans(max_stages=4, max_microbatches=4), st.data())
def test_what_check_accepts_comes_to_the_end(plan: Plan, data: st.DataObject) -> None:
    """Two operations of a rank change places: where devices would stand still, check says so."""
    (program, flush) = ordered_programs(plan, (plan.training.num_microbatches,))
    busy = [r for r, c in enumerate(program.columns) if len(operations(c, r)) > 1]
    if not busy:
        return
    rank = data.draw(st.sampled_from(busy))
    column = program.columns[rank]
    first = data.draw(st.integers(0, len(operations(column, rank)) - 2))
    changed = mutated(program, rank, exchanged(column, rank, first))
    try:
        check_programs(plan, [changed, flush], ordered=True)
    except ScheduleError:
        return
    assert Devices(plan).run([changed, flush])


def test_exchanged_operations_are_found() -> None:
    """Nearly every exchange would hang, and each of these is found."""
    plan = make_plan("1f1b", 3, 4, tied=(TiedParameter("w", (0, 2), 1),), clip=1.0)
    (program, flush) = ordered_programs(plan, (4,))
    hang = 0
    for rank, column in enumerate(program.columns):
        for first in range(len(operations(column, rank)) - 1):
            changed = mutated(program, rank, exchanged(column, rank, first))
            if not Devices(plan).run([changed, flush]):
                hang += 1
                with pytest.raises(ScheduleError):
                    check_programs(plan, [changed, flush], ordered=True)
    assert hang > 10


@pytest.mark.sample(4)
@pytest.mark.parametrize("chosen", [{}, {"replicas": (1, 2, 2)}, {"clip": 1.0}])
@pytest.mark.parametrize("name", allowed("any"))
def test_an_operation_that_is_dropped_doubled_or_early_is_found(
    name: str, chosen: dict[str, Any], fast: bool
) -> None:
    count, options = microbatches(name, 3), rich(name, chosen)
    plan = make_plan(name, 3, count, **(options or {}))
    programs = ordered_programs(plan, (count, count, count))
    program = programs[2]
    for rank, column in enumerate(program.columns):
        starts = operations(column, rank)
        for n, index in enumerate(starts):
            for kept in (0, 2):
                changed = [*column[:index], *[column[index]] * kept, *column[index + 1 :]]
                with pytest.raises(ScheduleError):
                    check_programs(plan, [*programs[:2], mutated(program, rank, changed),
                                          programs[3]], ordered=True)  # fmt: skip
            if n and column[index].action.phase is Phase.POST_RECV:  # before the one before ended
                early = [*column[: starts[n - 1] + 1], column[index],
                         *column[starts[n - 1] + 1 : index], *column[index + 1 :]]  # fmt: skip
                with pytest.raises(ScheduleError):
                    check_programs(plan, [*programs[:2], mutated(program, rank, early),
                                          programs[3]], ordered=True)  # fmt: skip
