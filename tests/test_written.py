"""Schedules that somebody wrote down: read, refused with their place, written, and proved."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action

from pdcompile.cluster import Cluster
from pdcompile.errors import DeadlockError, PlanError, ScheduleError
from pdcompile.passes.check import check, check_programs
from pdcompile.passes.schedules import make_stream
from pdcompile.passes.schedules.alone import chain, written_of
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Plan
from pdcompile.plan.times import times_of
from pdcompile.plan.validate import validate
from pdcompile.schedule import Action, Phase, Schedule
from pdcompile.schedule.registry import allowed, find, kind_of, name_of
from pdcompile.schedule.written import Written, from_csv, named, parse, read
from tests.helpers.schedules import make_plan, mutated
from tests.helpers.torch_schedules import CLASSES, dump

CSV = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"
TEXT = "mine: 0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1"
SIZES = [(2, 4), (2, 5), (3, 6), (4, 8)]
MORE = [(r, m) for r, m in product((2, 3, 4, 8), (3, 8, 16)) if (r, m) not in SIZES]


def of(written: Written) -> Plan:
    return chain(str(written), len(written.placement), written.num_microbatches, len(written.rows))


def test_one_schedule_in_its_two_forms(tmp_path: Path) -> None:
    mine = parse(TEXT, "here")
    assert str(mine) == TEXT
    assert mine.to_csv() == CSV
    path = tmp_path / "mine.csv"
    path.write_text(CSV)
    assert read(path) == mine
    assert named(path) == named(str(path)) == named(TEXT) == TEXT
    assert named("1f1b") == "1f1b"
    kind = kind_of(TEXT)
    assert (kind.name, kind.stream, kind.splits_backward) == ("mine", False, False)
    assert name_of(TEXT) == "mine"
    assert find("mine: 0F0 0B0 | ") is None


def test_torch_reads_what_is_written() -> None:
    """Cell by cell, as its reader of files does."""
    for name, n, per_rank in (("gpipe", 3, 1), ("interleaved", 4, 2), ("zb-h1", 3, 1)):
        rows = written_of(make_plan(name, n, 5, per_rank=per_rank)).to_csv().splitlines()
        actions = [_Action.from_str(cell) for row in rows for cell in row.split(",")]
        assert [str(one) for one in actions if one] == [c for r in rows for c in r.split(",") if c]


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_the_schedules_of_torch(name: str, ranks: int, microbatches: int, tmp_path: Path) -> None:
    """Each comes in, is proved, and takes as long by the clock as by the simulator."""
    path = dump(name, ranks, microbatches, tmp_path / f"{name}.csv")
    if path is None:  # torch has no such size
        return
    written = read(path)
    assert len(written.rows) == ranks
    assert written.num_microbatches == microbatches
    plan = of(written)
    proof = str(check(plan))
    assert f"schedule {name}: proved" in proof
    assert ("the schedule's order" in proof) == (name == "ScheduleLoopedBFS")
    assert Plan.from_json(_with_cluster(plan).to_json()) == _with_cluster(plan)
    seconds = simulate(plan).forecast.step_seconds
    times = times_of(plan, Cluster.local(ranks), [edge.value for edge in plan.edges])
    assert times.makespan(plan.training.warmup, microbatches) == pytest.approx(seconds, rel=1e-3)
    assert from_csv(written.to_csv(), "again", name) == written


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("ranks", "microbatches"), MORE)
def test_more_schedules_of_torch(name: str, ranks: int, microbatches: int, tmp_path: Path) -> None:
    test_the_schedules_of_torch(name, ranks, microbatches, tmp_path)


def _with_cluster(plan: Plan) -> Plan:
    return replace(plan, cluster=Cluster.local(plan.num_ranks).to_toml())


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name in CLASSES if CLASSES[name].lowered])
def test_what_torch_adds_to_a_schedule_is_left_out(name: str, tmp_path: Path) -> None:
    """A file with its sends, receives, gathers and reductions is the same schedule."""
    plain, full = (
        dump(name, 2, 4, tmp_path / f"{lowered}.csv", lowered=lowered) for lowered in (False, True)
    )
    assert plain is not None
    assert full is not None
    assert "SEND_F" in full.read_text()
    assert read(full).rows == read(plain).rows


FLUSH = allowed(0)


@settings(max_examples=40)
@given(st.sampled_from(FLUSH), st.integers(1, 8), st.integers(1, 3), st.integers(1, 16))
def test_a_schedule_of_ours_goes_out_and_comes_in(
    name: str, ranks: int, per_rank: int, microbatches: int
) -> None:
    """The same program; only how long a send may be in flight is not in the file."""
    per_rank = per_rank if kind_of(name).holds(per_rank) else 1
    ours = chain(name, ranks * per_rank, microbatches, ranks)
    written = written_of(ours)
    assert written_of(of(written)) == written
    theirs = of(from_csv(written.to_csv(), "x.csv", "x"))
    check(theirs)
    for count in {microbatches, max(1, microbatches - 1)}:
        if count == microbatches or name in ("gpipe", "interleaved"):
            assert _moves(theirs, count) == _moves(ours, count)
    assert _moves(theirs, 1)
    assert [s.ranks or (n,) for n, s in enumerate(ours.stages)] == [s.ranks for s in theirs.stages]


def _moves(plan: Plan, count: int) -> list[list[str]]:
    program, _ = make_stream(plan).step(count)
    return [
        [str(one) for one in column if one.action.phase is not Phase.WAIT_SEND]
        for column in program.columns
    ]


BAD = [
    ("0F0,0X0,0B0\n", ScheduleError, "'0X0' is not a task", "row 1, column 2", "a stage, F, B"),
    ("0F0,F0,0B0\n", ScheduleError, "'F0' is not a task", "row 1, column 2", "a stage, F, B"),
    ("0F0,(0B0;1Z)OVERLAP_F_B\n", ScheduleError, "is not a task", "row 1, column 2", "nothing"),
    ("\n\n", ScheduleError, "there is no task in it", None, "one row a rank"),
    ("0F0,0B0\n,,\n1F0,1B0\n", ScheduleError, "row 2 computes nothing", "row 2", "remove the row"),
    ("0F0,0B0,1F0\n1B0\n", ScheduleError, "stage 1 is on two ranks: 1B0 is in row 2, and row 1, "
     "column 3", "row 2, column 1", "in one row"),
    ("0F0,0B0,0F0\n", ScheduleError, "0F0 is there twice, first in row 1, column 1",
     "row 1, column 3", "once"),
    ("0F0,0B0\n2F0,2B0\n", ScheduleError, "there is a stage 2, and no stage 1", "row 2, column 1",
     "without gaps"),
    ("0F0,0F1,0B0,0B1\n1F0,1B0\n", ScheduleError, "stage 1 has nothing of microbatch 1", "row 2, "
     "column 2", "2 microbatches on every stage"),
    ("0F0,0F1,,0B0,,0B1\n,1F1,1B0,1F2,1B1\n", ScheduleError, "stage 0 has nothing of microbatch 2",
     "row 1, column 6", "3 microbatches"),  # as torch draws 1F1B
    ("0F0,0F2,0B0,0B2\n", ScheduleError, "stage 0 has nothing of microbatch 1", "row 1, column 4",
     "without gaps"),
    ("0F0,0F1,0B0\n", ScheduleError, "stage 0 has 0F1 of microbatch 1, not one forward and one",
     "row 1, column 2", "as F and B"),
    ("0F0,0I0\n", ScheduleError, "stage 0 has 0F0, 0I0 of microbatch 0", "row 1, column 2",
     "as F, I and W"),
    ("0F0,0B0,0B1\n", ScheduleError, "stage 0 has 0B1 of microbatch 1", "row 1, column 3", "as F"),
    ("0F0,0B0,,0W0\n", ScheduleError, "stage 0 has 0F0, 0B0, 0W0 of microbatch 0",
     "row 1, column 4", "as F and B, or"),
    ("0B0,0F0\n", DeadlockError, "0B0 (row 1, column 1) waits for 0F0, which comes after 0B0",
     "row 1, column 1", "behind what it holds up"),
    ("0F0,(0B1;0F1)OVERLAP_F_B,0B0\n", DeadlockError, "0B1 (row 1, column 2) waits for 0F1",
     "row 1, column 2", "behind what it holds up"),
    ("0F0,(0B0;0F1)OVERLAP_F_B,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n", DeadlockError, "0B0 (row 1, "
     "column 2) waits for 1B0", "row 1, column 2", "behind what it holds up"),
    ("0F0,0W0,0I0\n", DeadlockError, "0W0 (row 1, column 2) waits for 0I0", "row 1, column 2",
     "behind what it holds up"),
    ("0F1,0F0,0B0,0B1\n", ScheduleError, "0F1 comes where stage 0 is to go forward with "
     "microbatch 0", "row 1, column 1", "in which they are numbered"),
    ("0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1\n", ScheduleError, "0B1 comes where stage 0 is to go "
     "backward with microbatch 0", "row 1, column 3", "of stage 1"),
    ("0F0,0F1,0I0,0I1,0W1,0W0\n", ScheduleError, "0W1 comes where stage 0 is to go backward with "
     "microbatch 0", "row 1, column 5", "one order"),
    ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", DeadlockError, "deadlock: 0B0 (row 1, column 2) waits "
     "for 1B0, which comes after 1F1 (row 2, column 2) waits for 0F1, which comes after 0B0",
     "row 1, column 2", "behind what it holds up"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "message", "place", "remedy"), BAD)
def test_what_is_no_schedule(
    text: str,
    kind: type[ScheduleError],
    message: str,
    place: str | None,
    remedy: str,
    tmp_path: Path,
) -> None:
    """Refused with file, row and column, and what to do."""
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(kind) as caught:
        read(path)
    assert message in caught.value.message
    assert str(caught.value.where).startswith(str(path) + (f": {place}" if place else ""))
    assert remedy in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("a.txt", "such as a.csv"), ("a.json", "such as a.csv")],
)
def test_what_is_no_file_of_one(name: str, remedy: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text('{"ranks": ["0F0 0B0"]}')
    with pytest.raises(ScheduleError, match=rf"read from \.csv, not from {path.suffix}") as caught:
        read(path)
    assert str(path) in str(caught.value.where)
    assert remedy in str(caught.value.remedy)
    with pytest.raises(ScheduleError, match="cannot read the schedule: No such file"):
        read(tmp_path / "none.csv")


def test_what_cannot_be_written() -> None:
    with pytest.raises(ScheduleError, match="'2bw' leaves microbatches in flight") as caught:
        written_of(make_plan("2bw", 2, 4))
    assert "gpipe, 1f1b" in str(caught.value.remedy)
    with pytest.raises(ScheduleError, match="stage 1 has 2 replicas"):
        written_of(make_plan("1f1b", 2, 4, replicas=(1, 2)))


def test_a_plan_that_is_not_as_its_schedule_says() -> None:
    plan = _with_cluster(of(parse(TEXT, "here")))
    validate(plan)
    training, (first, second) = plan.training, plan.stages
    edited = {
        "stages": replace(plan, stages=(first,), edges=()),
        "training.num_microbatches": replace(plan, training=replace(training, num_microbatches=3)),
        "stages[0].replicas": replace(plan, stages=(replace(first, replicas=2, ranks=()), second)),
        "stages[0].ranks": replace(
            plan, stages=(replace(first, ranks=(1,)), replace(second, ranks=(0,)))
        ),
        "training.schedule: row 1, column 2": replace(
            plan, training=replace(training, schedule=TEXT.replace("0F1", "0Z1"))
        ),
    }
    for place, wrong in edited.items():
        with pytest.raises(PlanError) as caught:
            validate(wrong)
        assert caught.value.where == f"plan.json: {place}"
        assert caught.value.remedy


def test_an_edited_program_is_refused(tmp_path: Path) -> None:
    """Also where microbatches go backward in another order than they came."""
    path = dump("ScheduleLoopedBFS", 2, 3, tmp_path / "looped.csv")
    assert path is not None
    plan = of(read(path))
    program, _ = make_stream(plan).step(3)
    check_programs(plan, [program])
    tried = 0
    for rank, column in enumerate(program.columns):
        for at, one in enumerate(column):
            if one.action in (Action.FORWARD, Action.BACKWARD, Action.STEP):
                for wrong in _mutations(program, rank, at):
                    tried += 1
                    with pytest.raises(ScheduleError):
                        check_programs(plan, [wrong])
    assert tried > 60


def _mutations(program: Schedule, rank: int, at: int) -> list[Schedule]:
    """Dropped, doubled, of another microbatch, exchanged with the next of its kind."""
    column = program.columns[rank]
    one = column[at]
    changed = [(*column[:at], *column[at + 1 :]), (*column[: at + 1], *column[at:])]
    if one.microbatch >= 0:
        other = one._replace(microbatch=(one.microbatch + 1) % 3)
        changed.append((*column[:at], other, *column[at + 1 :]))
        later = [n for n in range(at + 1, len(column)) if column[n].action is one.action]
        for n in later[:1]:
            swapped = list(column)
            swapped[at], swapped[n] = swapped[n], swapped[at]
            changed.append(tuple(swapped))
    return [mutated(program, rank, each) for each in changed]
