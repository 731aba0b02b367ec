"""Schedules that somebody wrote down, from a file to training: bit for bit as the reference."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pdcompile
from pdcompile.cluster import Cluster
from pdcompile.errors import ConfigError, LaunchError, ScheduleError
from pdcompile.options import Options
from pdcompile.options.configuration import machines
from pdcompile.plan import Plan
from pdcompile.schedule import written
from tests.helpers.alike import COMMON, PLANNED, compiled, train_alike
from tests.helpers.cases import case
from tests.helpers.launch import processes
from tests.helpers.models import batch_for, convnet, gpt, loss_for, mlp, unet
from tests.helpers.torch_schedules import CLASSES, dump

#: V-shaped, its last stage whole and its others in two parts, each of another order of microbatches
FOLDED = (
    "folded: 0F0 0F1 0F2 3F0 3F1 3F2 3B1 3B2 3B0 0I1 0I2 0W1 0W2 0B0 | "
    "1F0 1F1 1F2 2F0 2F1 2F2 2I1 2I2 2I0 1B1 2W1 2W2 2W0 1B2 1B0"
)


BUILDS = {
    "ScheduleGPipe": mlp,
    "Schedule1F1B": convnet,
    "ScheduleLoopedBFS": partial(gpt, dropout=0.2, tied=True),
    "ScheduleInterleaved1F1B": unet,
    "ScheduleInterleavedZeroBubble": partial(gpt, tied=True),
    "ScheduleZBVZeroBubble": partial(gpt, dropout=0.2),
    "ScheduleDualPipeV": unet,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CLASSES)
def test_the_schedules_of_torch(name: str, tmp_path: Path) -> None:
    """Planned, read back from the plan alone, and trained."""
    path = dump(name, 2, 4, tmp_path / f"{name}.csv")
    assert path is not None
    build: Any = BUILDS[name]
    pipe = compiled(build, schedule=path)
    text = written.named(path)
    path.unlink()
    plan = Plan.from_json(pipe.plan.to_json())
    assert plan.training.schedule == text
    assert f"{name}: " in pipe.explain()
    assert text not in pipe.explain()
    again = compiled(build, schedule=plan.training.schedule, plan=plan)
    train_alike(again, build, schedule=text)


OWN = {
    "mlp": mlp, "tied": partial(gpt, tied=True), "dropout": partial(gpt, dropout=0.2), "unet": unet,
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "again"),
    [case(again == (name == "dropout"), name, again) for name in OWN for again in (False, True)],
)
def test_in_any_order(name: str, again: bool) -> None:
    """Sums of gradients are in the order of the schedule, in the reference too."""
    recompute = (True, False, True, False) if again else False
    pipe = compiled(OWN[name], schedule=FOLDED, recompute=recompute)
    assert [stage.ranks for stage in pipe.plan.stages] == [(0,), (1,), (1,), (0,)]
    assert pipe.plan.training.num_microbatches == 3
    train_alike(pipe, OWN[name], schedule=FOLDED)


def test_statistics_are_in_the_order_of_the_forwards() -> None:
    """Batch norm's running statistics, where microbatches go backward in another order."""
    pipe = compiled(convnet, schedule="back: 0F0 0F1 0B1 0B0 | 1F0 1F1 1B1 1B0")
    train_alike(pipe, convnet, schedule="back: 0F0 0F1 0B1 0B0 | 1F0 1F1 1B1 1B0")


def test_stages_on_other_ranks_than_their_number() -> None:
    pipe = compiled(mlp, schedule="turned: 1F0 1B0 1F1 1B1 | 0F0 0F1 0B0 0B1 | 2F0 2B0 2F1 2B1")
    assert [stage.ranks for stage in pipe.plan.stages] == [(1,), (0,), (2,)]
    train_alike(pipe, mlp, schedule=pipe.plan.training.schedule)


def test_a_later_stage_may_hold_more_microbatches() -> None:
    """Its weights' gradients come late, when the stage before has long let go of all."""
    late = "late: 0F0 0B0 0F1 0B1 | 1F0 1I0 1F1 1I1 1W0 1W1"
    pipe = compiled(mlp, schedule=late)
    assert pipe.plan.problem is not None
    assert pipe.plan.problem.in_flight == (1, 2)
    train_alike(pipe, mlp, schedule=late)


MINE = "mine: 0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1"


@pytest.mark.parametrize(
    ("options", "processes", "error", "message", "remedy"),
    [
        ({"stages": 4}, None, ConfigError, "stages=4, and the schedule 'mine' is written for 2",
         "leave stages out"),
        ({"microbatches": 4}, None, ConfigError, "microbatches=4, and the schedule 'mine' is "
         "written for 2", "leave microbatches out"),
        ({"replicas": 2}, None, ConfigError, "replicas=2, and the schedule 'mine' is written for 1",
         "leave replicas out"),
        ({}, 4, LaunchError, "2 stages, but WORLD_SIZE is 4", "--nproc-per-node=2"),
        ({"cluster": "1x4"}, None, ConfigError, "2 stages on a cluster of 4 devices",
         "give a cluster of 2 devices"),
        ({"schedule": "mine: 0F0"}, None, ScheduleError, "has 0F0 of microbatch 0", "as F and B"),
        ({"schedule": "none.csv"}, None, ScheduleError, "cannot read the schedule", "pdcompile"),
        ({"schedule": "mine"}, None, ConfigError, "'mine' is not available", "the path of a .csv"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    options: dict[str, Any],
    processes: int | None,
    error: type[Exception],
    message: str,
    remedy: str,
) -> None:
    """The refusal comes from compile before anything is captured, and from the reference."""
    given = {"schedule": MINE, **options}
    refuse = partial(pdcompile.compile, mlp(), **given)
    if processes:
        refuse = partial(machines, Options(**given), processes)
    with pytest.raises(error) as caught:
        refuse()
    assert message in str(caught.value)
    assert remedy in str(caught.value)


def test_counts_that_a_minibatch_does_not_have() -> None:
    x, y = batch_for("mlp", 1)
    options = {**PLANNED, "loss_fn": loss_for("mlp"), "schedule": MINE}
    with pytest.raises(ConfigError, match="2 microbatches of a minibatch of 1 samples"):
        pdcompile.compile(mlp(), (x,), example_target=y, **options)
    with pytest.raises(ConfigError, match="2 microbatches are asked for, and nothing in the"):
        pdcompile.compile(mlp(), (x,), example_target=y, batch_dims=None, **options)


def test_a_plan_of_another_schedule_is_refused() -> None:
    plan = compiled(mlp, schedule=MINE).plan
    other = MINE.replace("0F0 0F1 0B0 0B1", "0F0 0B0 0F1 0B1")
    for schedule, message in (
        (other, "the plan has schedule='mine', but the options ask for 'mine' with other tasks"),
        ("1f1b", "the plan has schedule='mine', but the options ask for '1f1b'"),
    ):
        with pytest.raises(ConfigError, match=message):
            compiled(mlp, schedule=schedule, plan=plan)


def test_the_option_that_asks_for_other_processes_is_named() -> None:
    for options, named in (
        ({"replicas": (2, 1)}, "replicas"), ({"stages": 4}, "stages"),
        ({"replicas": 3, "stages": 1}, "stages and replicas"),
    ):  # fmt: skip
        with pytest.raises(LaunchError, match=f", or leave {named} out"):
            machines(Options(**options), 2)


@pytest.mark.slow
def test_its_stages_fit_into_memory() -> None:
    """Less than the fastest plan needs: another cut, or stages that recompute."""
    cluster = Cluster.local(2)
    build = partial(gpt, tied=True)
    free = compiled(build, schedule=FOLDED, cluster=cluster).plan
    assert free.forecast is not None
    limit = int(0.97 * max(ledger.total_bytes for ledger in free.forecast.ledgers))
    plan = compiled(build, schedule=FOLDED, cluster=cluster, memory=limit, recompute="auto").plan
    assert plan.forecast is not None
    assert max(ledger.total_bytes for ledger in plan.forecast.ledgers) <= limit


TORCHRUN = (
    COMMON
    + """
build = partial(models.gpt, tied=True, dropout=0.2)
pipe = compiled(build, schedule=sys.argv[1])
train_alike(pipe, build, schedule=sys.argv[1])
say("equal", *pipe.stages)
pipe.close()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ScheduleDualPipeV", pytest.param("ScheduleLoopedBFS", marks=pytest.mark.slow)]
)
def test_on_two_ranks(name: str, tmp_path: Path) -> None:
    path = dump(name, 2, 4, tmp_path / "theirs.csv")
    run = processes(TORCHRUN, 2, tmp_path, str(path))
    assert run.code == 0, run
    held = ("0 3", "1 2") if CLASSES[name].folded else ("0 2", "1 3")
    assert all(f"[{rank}] equal {stages}" in run.output for rank, stages in enumerate(held)), run
