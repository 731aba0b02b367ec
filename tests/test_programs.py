"""Everything that is sent between calls of step is in a program, and each program is proved."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.errors import ScheduleError
from pdcompile.passes.check import check_programs
from pdcompile.passes.check.programs import Programs
from pdcompile.passes.schedules.between_calls import norms, refresh, share
from pdcompile.passes.schedules.stream import evaluation, gradients, make_stream
from pdcompile.plan import Edge, Plan, TiedParameter
from pdcompile.schedule import Action, Instruction, Kind, Schedule
from pdcompile.schedule.registry import KINDS, allowed
from pdcompile.schedule.spec import Broadcast
from tests.helpers.schedules import chain, make_plan, microbatches, mutated, plans, rich
from tests.test_imports import modules
from tests.test_stages_per_rank import on_ranks

Case = tuple[Schedule, tuple[Edge, ...] | None, tuple[Broadcast, ...]]
FLUSH = allowed(0)


def broadcasts_of(plan: Plan, num_items: int) -> tuple[Broadcast, ...]:
    """Outputs of the last rank to all others, and one of every other rank to rank 0."""
    spec = plan.spec
    last = spec.ranks[-1][0]
    outputs = [
        Broadcast(Kind.OUTPUT, item, microbatch, last, spec.others(last))
        for item in range(num_items)
        for microbatch in range(plan.training.num_microbatches)
    ]
    others = [Broadcast(Kind.OUTPUT, num_items + r, -1, r, (0,)) for r in spec.others(0)]
    return (*outputs, *others)


def cases(plan: Plan, count: int) -> Iterator[Case]:
    """Every program of a plan that is complete in itself, with what it has to bring."""
    if not KINDS[plan.training.schedule].stream:
        yield gradients(plan, count), None, ()
        yield refresh(plan), None, ()
    yield norms(plan), None, ()
    for with_loss in (False, True):
        yield evaluation(plan, plan.edges, count, with_loss=with_loss), plan.edges, ()
    broadcasts = broadcasts_of(plan, 2)
    yield share(plan, broadcasts), None, broadcasts


def prove(plan: Plan, case: Case, program: Schedule | None = None) -> None:
    check_programs(plan, [program or case[0]], case[1], case[2])


@settings(max_examples=100)
@given(plans(), st.data())
def test_every_program_is_proved(plan: Plan, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, plan.training.num_microbatches))
    for case in cases(plan, count):
        prove(plan, case)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=6), st.integers(1, 5), st.data())
def test_also_with_several_stages_on_a_rank(
    ranks: list[int], count: int, data: st.DataObject
) -> None:
    n = len(ranks)
    holders = tuple(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=2))))
    edges = (*chain(n), Edge("skip", 0, tuple(range(1, n)), 1, True))
    plan = make_plan("gpipe", n, count, edges=edges, tied=(TiedParameter("w", holders, 1),))
    plan = on_ranks(plan, tuple(ranks))
    for case in cases(plan, data.draw(st.integers(1, count))):
        prove(plan, case)


RICH = {
    "skips": {"edges": (*chain(3), Edge("skip", 0, (1, 2), 1, True))},
    "tied": {"tied": (TiedParameter("w", (0, 1, 2), 1),), "clip": 1.0},
    "replicas": {"replicas": (1, 2, 2)},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("chosen", RICH)
@pytest.mark.parametrize("name", allowed("any"))
def test_a_message_that_is_dropped_or_doubled_is_caught(name: str, chosen: str, fast: bool) -> None:
    count, options = microbatches(name, 3), rich(name, RICH[chosen])
    plan = make_plan(name, 3, count, **(options or {}))
    for case in cases(plan, count):
        for rank, column in enumerate(case[0].columns):
            for index in range(rank % 2 if fast else 0, len(column), 2 if fast else 1):
                for kept in (0, 2):
                    changed = [*column[:index], *[column[index]] * kept, *column[index + 1 :]]
                    with pytest.raises(ScheduleError):
                        prove(plan, case, mutated(case[0], rank, changed))


def exchanged(column: Sequence[Instruction], action: Action) -> list[Instruction]:
    """The first and the last instruction of an action change places."""
    found = [n for n, one in enumerate(column) if one.action is action]
    changed = list(column)
    changed[found[0]], changed[found[-1]] = column[found[-1]], column[found[0]]
    return changed


@pytest.mark.parametrize("action", [Action.SEND_GRADIENT, Action.FORWARD])
def test_an_order_that_is_exchanged_is_caught_in_gradients(action: Action) -> None:
    plan = make_plan("1f1b", 3, 4, tied=(TiedParameter("w", (0, 2), 1),))
    program = gradients(plan, 4)
    with pytest.raises(ScheduleError):
        check_programs(plan, [mutated(program, 2, exchanged(program.columns[2], action))])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("rank", "action"),
    [(2, Action.SEND_OUTPUT), (0, Action.WAIT_RECV_OUTPUT), (2, Action.WAIT_SEND_OUTPUT)],
)
def test_an_order_that_is_exchanged_is_caught_in_broadcasts(rank: int, action: Action) -> None:
    plan = make_plan("1f1b", 3, 4)
    broadcasts = broadcasts_of(plan, 1)
    program = share(plan, broadcasts)
    changed = mutated(program, rank, exchanged(program.columns[rank], action))
    with pytest.raises(ScheduleError):
        check_programs(plan, [changed], None, broadcasts)


def test_two_ranks_that_first_receive_wait_for_ever() -> None:
    """Each sends the other something, but not before it has what it waits for."""
    plan = make_plan("1f1b", 2, 1)
    both = (Broadcast(Kind.OUTPUT, 0, -1, 0, (1,)), Broadcast(Kind.OUTPUT, 1, -1, 1, (0,)))
    program = share(plan, both)
    check_programs(plan, [program], None, both)
    late = [*program.columns[0][2:], *program.columns[0][:2]]
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0 .* waits for rank 1"):
        check_programs(plan, [mutated(program, 0, late)], None, both)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FLUSH)
def test_gradients_are_a_step_without_its_update(name: str) -> None:
    plan = make_plan(name, 3, 4, tied=(TiedParameter("w", (0, 2), 1),), clip=1.0)
    step, _ = make_stream(plan).step(4)
    update = (Kind.WEIGHT, Kind.NORMS)
    for column, whole in zip(gradients(plan, 4).columns, step.columns, strict=True):
        assert list(column) == [one for one in whole if one.action.kind not in update]


def test_replicas_reduce_their_gradients_without_an_update() -> None:
    plan = make_plan("1f1b", 2, 4, replicas=(1, 2))
    program = gradients(plan, 3)
    actions = [one.action for one in program.columns[2]]
    assert actions.count(Action.POST_REDUCE) == actions.count(Action.WAIT_REDUCE) == 1
    without = [one for one in program.columns[2] if one.action.kind is not Kind.REDUCE]
    with pytest.raises(ScheduleError):
        check_programs(plan, [mutated(program, 2, without)])


def test_a_program_that_updates_is_not_one_for_gradients() -> None:
    plan = make_plan("1f1b", 2, 2)
    step, _ = make_stream(plan).step(2)
    for name in ("1f1b+gradients", "1f1b+norms", "1f1b+broadcast", "1f1b+refresh"):
        with pytest.raises(
            ScheduleError, match=r"an update too many|is not expected|was forgotten"
        ):
            check_programs(plan, [replace(step, name=name)])


def test_a_stream_has_no_gradients_without_updates() -> None:
    with pytest.raises(ScheduleError, match="no gradients without updates") as caught:
        gradients(make_plan("2bw", 2, 2), 2)
    assert caught.value.remedy == f"a flush schedule ({', '.join(FLUSH)})"


def test_programs_are_proved_when_they_are_asked_for() -> None:
    """Nothing reaches a runtime that the proof refuses; what was proved is handed out again."""
    plan = make_plan("1f1b", 3, 4, tied=(TiedParameter("w", (0, 2), 1),))
    whole = Programs(plan, plan.edges)
    assert whole.of(gradients, 3) is whole.of(gradients, 3)
    assert whole.step(4) == make_stream(plan).step(4)[0]

    def broken(*_: object, **__: object) -> Schedule:
        return mutated(refresh(plan), 2, refresh(plan).columns[2][:-1])

    with pytest.raises(ScheduleError):
        whole.of(broken)


# What hands data to another rank.  Which call a rank makes, and the first weights, are agreed on
# before there is a program to interpret.
SENDING = {"send", "receive", "recv", "isend", "irecv", "broadcast", "allreduce", "allgather",
           "reduce"}  # fmt: skip
SENDERS = {
    "pdcompile.runtime.interpreter": {"send", "receive"},
    "pdcompile.runtime.transport.links": {"send", "recv"},  # gloo's own
    "pdcompile.runtime.transport.device_groups": {"send", "recv", "allreduce"},  # once, to connect
    "pdcompile.runtime.transport.reductions": {"allreduce", "reduce", "broadcast"},  # as a whole
    "pdcompile.runtime.failure.guarded": {"send", "receive"},
    "pdcompile.runtime.state.model_state": {"broadcast"},
}


def test_only_the_interpreter_sends() -> None:
    found: dict[str, set[str]] = {}
    for name, path in modules().items():
        if not name.startswith("pdcompile.runtime"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {node.attr} if isinstance(node, ast.Attribute) else set()
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = {node.value}  # of getattr
            if used := names & SENDING:
                found.setdefault(name, set()).update(used)
    assert found == SENDERS


def test_only_the_session_runs_programs() -> None:
    """It runs only those that `Programs` has handed out."""
    callers = {
        name
        for name, path in modules().items()
        if name.startswith("pdcompile.runtime") and "run_together(" in path.read_text("utf-8")
    }
    assert callers == {"pdcompile.runtime.interpreter", "pdcompile.runtime.session"}
    tree = ast.parse(modules()["pdcompile.runtime.session"].read_text(encoding="utf-8"))
    assigned = [ast.unparse(n.value) for n in ast.walk(tree) if isinstance(n, ast.Assign)
                if ast.unparse(n.targets[0]) == "program"]  # fmt: skip
    handed_out = ("self._programs.", "self.evaluation_programs.")
    assert all(any(one in value for one in handed_out) for value in assigned)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    runs = [node.args[0] for node in calls if ast.unparse(node.func) == "self._run"]
    given = {ast.unparse(one) for one in runs if not ast.unparse(one).startswith("self._programs.")}
    assert given == {"program"}
    assert len(runs) == 7
