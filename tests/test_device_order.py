"""Device order: one sequence of operations for all ranks, one of them at a time on each."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.cluster import Cluster
from pdcompile.errors import DeadlockError, LaunchError, ScheduleError
from pdcompile.hardware import devices
from pdcompile.passes.check import check, check_programs
from pdcompile.passes.check.programs import Programs
from pdcompile.passes.schedules import make_stream
from pdcompile.passes.schedules.alone import written_of
from pdcompile.passes.schedules.device_order import HalfBegun, in_device_order
from pdcompile.plan import Edge, Plan, TiedParameter
from pdcompile.runtime.transport.contract import Channel, Expected
from pdcompile.runtime.transport.launch import DataPath, data_path
from pdcompile.runtime.transport.links import OrderedLink, pairs
from pdcompile.runtime.transport.point_to_point import GroupTransport
from pdcompile.schedule import Instruction, Kind, Phase, Schedule
from pdcompile.schedule.instruction import DATA, ENDS
from pdcompile.schedule.registry import KINDS
from pdcompile.schedule.spec import Broadcast
from tests.helpers.alike import COMMON, compiled
from tests.helpers.launch import processes
from tests.helpers.models import batch_for, gpt, mlp, unet
from tests.helpers.schedules import chain, make_plan, microbatches, mutated, plans, rich
from tests.test_check import blocking, programs_of
from tests.test_programs import cases
from tests.test_runtime_distributed import BITWISE, FAILURES, OWN_LOOP
from tests.test_written import of


def ordered_programs(plan: Plan, counts: Sequence[int]) -> list[Schedule]:
    stream, found = make_stream(plan, ordered=True), []
    for count in counts:
        program, stream = stream.step(count)
        found.append(program)
    return [*found, stream.flush()[0]]


def operations(column: Sequence[Instruction], rank: int) -> list[int]:
    """Where a rank's data operations begin."""
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
    check(plan, channels="device_order")
    sizes = st.integers(1, plan.training.num_microbatches)
    counts = data.draw(st.lists(sizes, min_size=1, max_size=6))
    check_programs(plan, ordered_programs(plan, counts), channels="device_order")


@settings(max_examples=40)
@given(plans(), st.data())
def test_so_do_the_programs_between_calls(plan: Plan, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, plan.training.num_microbatches))
    programs = Programs(plan, plan.edges, ordered=True)
    assert programs.step(count) == make_stream(plan, ordered=True).step(count)[0]
    programs.flush()
    programs.restart(0)
    programs.norms()
    programs.evaluation(count, with_loss=True)
    if not KINDS[plan.training.schedule].stream:
        programs.gradients(count)
        programs.refresh()
    if plan.num_ranks > 1:
        programs.share((Broadcast(Kind.STATE, 0, -1, 0, plan.spec.others(0)),))


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
        check(of(written_of(plan)), channels="device_order")


def test_the_proof_says_so() -> None:
    plan = make_plan("2bw", 3, 4, clip=1.0, replicas=(2, 1, 1))
    text = str(check(plan, channels="device_order"))
    assert "channels device_order" in text
    assert "at most 1 unfinished on a rank" in text
    assert "unfinished" not in str(check(plan))


# -- what is refused -----------------------------------------------------------------------------


def test_the_order_of_pytorch_172668_is_refused() -> None:
    """Rank 0 sends F1 and then receives B0, rank 1 sends B0 and then receives F1."""
    plan = make_plan("1f1b", 2, 2)
    program = blocking(programs_of(plan, (2,))[0])
    with pytest.raises(DeadlockError) as caught:
        check_programs(plan, [program], channels="device_order")
    assert caught.value.message == (
        "rank 0, instruction 5 (SEND 1 e0 >1 s0): on the one communicator of ranks 0 and 1 the "
        "next transfer is SEND 0 (0, 1) from rank 0 here and SEND_GRADIENT 0 (0, 0) from rank 1 "
        "there: both would wait for ever"
    )
    order = [str(one) for one in program.columns[0]]
    assert order.index("SEND 1 e0 >1 s0") < order.index("POST_RECV_GRADIENT 0 e0 <1 s0")
    check_programs(plan, ordered_programs(plan, (2,)), channels="device_order")


def test_receives_that_are_posted_ahead_are_refused() -> None:
    plan = make_plan("1f1b", 2, 3)
    with pytest.raises(ScheduleError) as caught:
        check_programs(plan, programs_of(plan, (3,)), channels="device_order")
    assert "occupies the device: 1 at a time in device order" in caught.value.message
    assert "<-- here" in str(caught.value.where)


def test_what_cannot_be_put_in_order_is_refused() -> None:
    plan = make_plan("1f1b", 2, 4)
    program = blocking(programs_of(plan, (4,))[0])
    with pytest.raises(ScheduleError, match="rank 0 cannot come past") as caught:
        in_device_order(plan.spec, program, HalfBegun())
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
            if kind in (Kind.REDUCE, Kind.BUFFERS):
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
        check_programs(plan, [changed, flush], channels="device_order")
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
                    check_programs(plan, [changed, flush], channels="device_order")
    assert hang > 10


@pytest.mark.sample(4)
@pytest.mark.parametrize("chosen", [{}, {"replicas": (1, 2, 2)}, {"clip": 1.0}])
@pytest.mark.parametrize("name", list(KINDS))
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
                                          programs[3]], channels="device_order")  # fmt: skip
            if n and column[index].action.phase is Phase.POST_RECV:  # before the one before ended
                early = [*column[: starts[n - 1] + 1], column[index],
                         *column[starts[n - 1] + 1 : index], *column[index + 1 :]]  # fmt: skip
                with pytest.raises(ScheduleError):
                    check_programs(plan, [*programs[:2], mutated(program, rank, early),
                                          programs[3]], channels="device_order")  # fmt: skip


# -- the transport -------------------------------------------------------------------------------


class Group:
    """A process group that notes what it is given; everything is over at once."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def send(self, _: list[torch.Tensor], peer: int, tag: int) -> Group:
        self.calls.append(("send", peer, tag))
        return self

    def recv(self, _: list[torch.Tensor], peer: int, tag: int) -> Group:
        self.calls.append(("recv", peer, tag))
        return self

    def allreduce(self, _: list[torch.Tensor]) -> Group:
        return self

    def wait(self) -> None:
        pass


def test_control_has_tags_and_data_has_none() -> None:
    control, lower, upper = Group(), Group(), Group()
    data = OrderedLink(1, {0: lower, 2: upper})
    transport = GroupTransport(control, rank=1, plan=7, reach=2, data=data)
    value = Channel(Kind.VALUE, 5, 2)
    transport.send(value, torch.zeros(3), 0).wait()
    transport.send(value, torch.zeros(3), 0).wait()
    transport.send(Channel(Kind.LOSS, 0, 0), torch.zeros(()), 0).wait()
    transport.receive(Channel(Kind.CALL, 0, 0), Expected((3,), torch.int64, 0)).wait()
    transport.receive(Channel(Kind.GRADIENT, 1, 0), Expected((3,), torch.float32, 0))
    headers = [("send", 2, value.tag), ("send", 0, int(Kind.LOSS)), ("recv", 0, 29)]
    assert [one for one in control.calls if one in headers] == [
        ("send", 2, value.tag), ("send", 0, int(Kind.LOSS)), ("send", 0, int(Kind.LOSS)),
    ]  # fmt: skip
    assert upper.calls == [("send", 1, 0), ("send", 1, 0)]
    assert lower.calls == []  # before its header was read


@settings(max_examples=60)
@given(plans(several=True))
def test_there_are_groups_for_what_programs_send_and_no_others(plan: Plan) -> None:
    count = plan.training.num_microbatches
    sent = set()
    for program in (
        *programs_of(plan, (count,) * 12),
        *(case[0] for case in cases(plan, count) if not case[2]),
    ):
        for rank, column in enumerate(program.columns):
            sent |= {
                tuple(sorted((rank, one.peer)))
                for one in column
                if one.action.kind in DATA and one.action.phase is Phase.SEND
            }
    found = pairs(plan.spec)
    assert found == sorted(found)
    assert {pair for pair in sent if pair[0] != pair[1]} <= set(found)
    updates_each = KINDS[plan.training.schedule].updates_each
    if updates_each or count % lcm(*map(len, plan.spec.ranks)) == 0:
        assert set(found) == {pair for pair in sent if pair[0] != pair[1]}


def test_replicas_meet_only_those_of_their_turn() -> None:
    plan = make_plan("1f1b", 2, 4, replicas=(2, 2))
    assert pairs(plan.spec) == [(0, 2), (1, 3)]
    edges = (*chain(2), Edge("more", 0, (1,), 1, False))
    assert pairs(make_plan("1f1b", 2, 4, edges=edges).spec) == [(0, 1)]


def test_another_wish_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(make_plan("1f1b", 2, 4), cluster=Cluster.local(2).to_toml())
    on_gpus = replace(plan, cluster=Cluster.local(2, kind="h100").to_toml())

    def chosen(wanted: str, plan: Plan = plan, *, alone: bool = False) -> DataPath:
        monkeypatch.setenv("PDCOMPILE_TRANSPORT", wanted)
        return data_path(plan, alone=alone)

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(devices, "gpus", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert chosen("") is chosen("tags") is DataPath.TAGS
    assert chosen("ordered") is DataPath.ORDERED
    with pytest.raises(LaunchError, match="'infiniband'"):
        chosen("infiniband")
    with pytest.raises(LaunchError, match="is 'nccl', and the plan has CPUs on ranks 0, 1"):
        chosen("nccl")
    assert chosen("nccl", on_gpus) is chosen("", on_gpus) is DataPath.NCCL
    assert chosen("tags", on_gpus) is chosen("nccl", on_gpus, alone=True) is DataPath.TAGS
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")  # ranks share a GPU, as NCCL has it on demand alone
    assert chosen("", on_gpus) is DataPath.TAGS
    assert chosen("nccl", on_gpus) is DataPath.NCCL
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert chosen("", on_gpus) is DataPath.TAGS
    with pytest.raises(LaunchError, match="'nccl', and this torch is built without NCCL"):
        chosen("nccl", on_gpus)


# -- running -------------------------------------------------------------------------------------

TIED = partial(gpt, tied=True)
LOCAL: list[tuple[Any, dict[str, Any]]] = [
    (TIED, {"schedule": "gpipe", "stages": 3}),
    (unet, {"schedule": "1f1b", "stages": 3, "replicas": (2, 1, 1)}),
    (TIED, {"schedule": "2bw", "stages": 3}),
    (mlp, {"schedule": "stash", "stages": 3, "microbatches": 1, "max_grad_norm": None}),
    (TIED, {"schedule": "vsync", "stages": 2, "microbatches": 1}),
    (TIED, {"schedule": "zb-h1", "stages": 2}),
    (mlp, {"schedule": "interleaved", "stages": 4}),
    (mlp, {"schedule": "zb-v", "stages": 4, "replicas": 2}),
]


def trained(build: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    """Losses of minibatches of several sizes, an evaluation and the state."""
    model = build()
    pipe = compiled(lambda: model, **{"microbatches": 4, **options})
    losses = []
    for t, size in enumerate((8, 8, 3, 8)):
        x, y = batch_for(model, size, t)
        losses.append(pipe.step(x, target=y).loss)
    losses.append(pipe.eval_step(x, target=y).loss)
    found = [torch.tensor(float(loss)) for loss in losses]
    found += [pipe.predict(x), *pipe.full_state_dict().values()]
    pipe.close()
    return found


@pytest.mark.sample(1)
@pytest.mark.usefixtures("one_capture_a_model")
@pytest.mark.parametrize(("build", "options"), LOCAL)
def test_in_one_process_it_is_the_same(
    build: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PDCOMPILE_TRANSPORT", raising=False)
    tagged = trained(build, options)
    monkeypatch.setenv("PDCOMPILE_TRANSPORT", "ordered")
    ordered = trained(build, options)
    assert all(torch.equal(a, b) for a, b in zip(tagged, ordered, strict=True))


RANKS = (
    COMMON
    + """
import ast
from tests.test_device_order import trained
# On ranks every schedule over tags, and in device order: to the bit the same.
for name, options in ast.literal_eval(sys.argv[1]):
    build = {"gpt": partial(models.gpt, tied=True)}.get(name) or getattr(models, name)
    found = []
    for transport in ("", "ordered"):
        os.environ["PDCOMPILE_TRANSPORT"] = transport
        found.append(trained(build, {"outputs": "all", **options}))
    unlike = [n for n, (a, b) in enumerate(zip(*found, strict=True)) if not torch.equal(a, b)]
    assert not unlike, (name, options, unlike)
say("equal")
"""
)


def on_ranks(cases: list[tuple[str, dict[str, Any]]], num_ranks: int, folder: Path) -> None:
    run = processes(RANKS, num_ranks, folder, repr(cases))
    assert run.code == 0, run
    assert run.output.count("equal") == num_ranks, run


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("2bw", marks=pytest.mark.slow)])
def test_a_schedule_on_two_ranks(tmp_path: Path, schedule: str) -> None:
    on_ranks([("mlp", {"schedule": schedule})], 2, tmp_path)


SINGLE = {"microbatches": 1, "max_grad_norm": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [("gpt", {"schedule": name}) for name in ("gpipe", "2bw", "zb-h1")]),
        (2, [("gpt", {"schedule": name, "stages": 4}) for name in ("interleaved", "zb-v")]),
        (2, [("gpt", {"schedule": "vsync", "microbatches": 1}),
             ("unet", {"schedule": "stash", **SINGLE})]),
        (3, [("unet", {"schedule": "1f1b", "replicas": (1, 2)}),
             ("gpt", {"schedule": "2bw", "replicas": (2, 1)}),
             ("mlp", {"schedule": "stash", "replicas": (1, 2), **SINGLE})]),
        (4, [("gpt", {"schedule": "gpipe", "replicas": 2, "stages": 2}),
             ("mlp", {"schedule": "zb-v", "replicas": 2, "stages": 4}),
             ("convnet", {"schedule": "1f1b", "replicas": (2, 2)})]),
    ],
)  # fmt: skip
def test_every_schedule_on_ranks(
    ranks: int, cases: list[tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    on_ranks(cases, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "ranks", "said"),
    [
        (BITWISE, 3, "equal"),
        (OWN_LOOP, 2, "refused: GPT: this model is split over several ranks"),
        (FAILURES, 3, "packages rank"),
    ],
)
def test_scripts_of_the_runtime_in_device_order(
    script: str, ranks: int, said: str, tmp_path: Path
) -> None:
    """What ranks do over tags they do in device order: also fail, and say why."""
    first = 'import os; os.environ["PDCOMPILE_TRANSPORT"] = "ordered"\n'
    run = processes(first + script, ranks, tmp_path)
    assert run.code == 0, run
    assert run.output.count(said) == ranks, run


def test_ranks_agree_on_the_order(tmp_path: Path) -> None:
    script = (
        COMMON
        + """
if rank:
    os.environ["PDCOMPILE_TRANSPORT"] = "ordered"
try:
    pair(models.mlp(), "1f1b")
except LaunchError as error:
    say("refused:", error.message)
"""
    )
    run = processes(script, 2, tmp_path)
    assert run.output.count("and PDCOMPILE_TRANSPORT=ordered") == 2, run
