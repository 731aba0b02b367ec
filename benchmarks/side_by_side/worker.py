"""One rank of a comparison: makes every contestant, lets them take turns, and writes its figures.

    python -m benchmarks.side_by_side.worker JOB.json FOLDER

with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set; `benchmarks/runtime.py` starts all ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from benchmarks.side_by_side.contestants import (
    Contestant,
    Task,
    alone,
    cut_of,
    data_parallel,
    ours,
    torch_pipeline,
)
from benchmarks.side_by_side.counters import interface_bytes, peak_memory, socket_bytes
from benchmarks.side_by_side.job import Figures, Job
from benchmarks.side_by_side.links import cluster_text, measured_links
from benchmarks.side_by_side.shares import python_seconds
from benchmarks.side_by_side.waiting import no_waits, sleep_precisely
from pdcompile.errors import PdcompileError
from pdcompile.plan import Plan
from pdcompile.schedule.registry import DEFAULT, KINDS, allowed

#: torch's schedules, each with ours that has as many stages on the same ranks: one cut for both
TORCH = {
    "torch GPipe": ("ScheduleGPipe", DEFAULT),
    "torch 1F1B": ("Schedule1F1B", DEFAULT),
    "torch interleaved": ("ScheduleInterleaved1F1B", "interleaved"),
    "torch zero bubble": ("ScheduleInterleavedZeroBubble", "interleaved"),
    "torch ZBV": ("ScheduleZBVZeroBubble", "zb-v"),
}
ALONE, DDP, FSDP = "one process", "DDP", "FSDP2"
BASELINE = "torch 1F1B"  # what ratios are to
OURS = "pdcompile "
TIED = OURS + "2bw, tied, clipped"
TIMEOUT = timedelta(minutes=5)


def makers(job: Job) -> dict[str, Callable[[Task], Contestant]]:
    """Every contestant by name.  Stages are cut once for all that hold the same ones on a rank."""
    ranks = dist.get_world_size()

    @cache
    def cut(schedule: str) -> tuple[int, ...]:
        with_own = ours(job.task(), schedule, stages=KINDS[schedule].usual * ranks)
        assert with_own.pipe is not None
        found = cut_of(with_own.pipe)
        with_own.end()
        return tuple(found)

    def pipeline(schedule: str, like: str, task: Task) -> Contestant:
        return torch_pipeline(task, schedule, cut(like))

    def scheduled(schedule: str, task: Task) -> Contestant:
        return ours(task, schedule, cut(DEFAULT if KINDS[schedule].usual == 1 else schedule))

    found: dict[str, Callable[[Task], Contestant]] = {
        ALONE: alone,
        DDP: partial(data_parallel, sharded=False),
        FSDP: partial(data_parallel, sharded=True),
        **{name: partial(pipeline, *one) for name, one in TORCH.items()},
        **{OURS + name: partial(scheduled, name) for name in allowed("any")},
        TIED: lambda _: ours(job.task(tied=True), "2bw", cut(DEFAULT), clip=1.0),
        OURS + "replicas": partial(ours, schedule=DEFAULT, cut=(0,), replicas=ranks),
        OURS + "auto": partial(
            ours, schedule="auto", max_staleness=1, replicas="any", recompute="auto", time_limit=30
        ),
    }
    return {name: found[name] for name in job.names}


def peak_bytes(make: Callable[[Task], Contestant], task: Task) -> int:
    """The most that this rank holds while a contestant trains, which ends after two steps.

    All has to end before the profiler does: what ends a message later writes into the profiler's
    freed memory.
    """
    with peak_memory() as (peak, training):
        one = make(task)
        with training():
            for _ in range(2):
                one.step(task.x, task.y)
        one.end()
        del one
        dist.barrier()
    return peak.num_bytes


def prepared(
    name: str, make: Callable[[Task], Contestant], task: Task, forecasts: Path
) -> tuple[Contestant | None, Figures]:
    """A contestant that has not begun to train, and its forecast, which is in the file first."""
    try:
        one = make(task)
    except PdcompileError as error:  # of torch's too: our planner cuts for them
        return None, Figures(refused=str(error))
    figures = Figures(
        bound_seconds=one.bound_seconds,
        stages="" if one.plan is None else described(one.plan),
    )
    if dist.get_rank() == 0 and one.forecast_seconds is not None:
        with forecasts.open("a") as lines:
            print(json.dumps({"name": name, "seconds": one.forecast_seconds}), file=lines)
    return one, figures


def described(plan: Plan) -> str:
    """Replicas of the stages and their schedule, where they were searched for."""
    counts = "-".join(str(stage.replicas) for stage in plan.stages)
    return f"{plan.training.schedule}, {counts}" if counts.replace("-", "") != "1" else counts


def run(job: Job, folder: Path) -> dict[str, Figures]:
    """Make all contestants, then let them take turns: round after round, each some steps.

    Streams stay in flight from round to round, so that no round pays for filling them.
    """
    found: dict[str, Figures] = {}
    running: dict[str, Contestant] = {}
    if job.cluster is None:
        job = replace(job, cluster=cluster_text(dist.get_world_size(), *measured_links()))
    task = job.task()
    for name, make in makers(job).items():
        dist.barrier()
        one, found[name] = prepared(name, make, task, folder / "forecasts.jsonl")
        if one is not None:
            running[name] = one
            found[name].peak_bytes = peak_bytes(make, task) if job.memory else 0
        if dist.get_rank() == 0:
            print(f"  ready: {name} {found[name].refused}", file=sys.stderr, flush=True)
    for number in range(job.rounds + 1):  # the first one fills streams and warms up
        for name, one in running.items():
            seconds, sent = timed(one, task, job.steps if number else 1, job.interface)
            if number:
                found[name].seconds.append(seconds)
                found[name].sent_bytes += sent / job.rounds
    for name, one in running.items():
        dist.barrier()
        if one.pipe is not None:
            step = partial(one.step, task.x, task.y)
            with no_waits():
                step()
                found[name].python_seconds = python_seconds(one.pipe, step)
        one.end()
    return found


def timed(one: Contestant, task: Task, steps: int, interface: str | None) -> tuple[float, float]:
    """Seconds and bytes of a step, of several in a row.

    The first one does not count: ranks begin it together, and a stream has to fill again.
    """
    count = partial(interface_bytes, interface) if interface else socket_bytes
    dist.barrier()
    before = count()
    one.step(task.x, task.y)
    began = time.perf_counter()
    for _ in range(steps):
        one.step(task.x, task.y)
    seconds = (time.perf_counter() - began) / steps
    dist.barrier()
    return seconds, (count() - before) / (steps + 1)


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    sleep_precisely()
    job, folder = Job.read(Path(arguments[0])), Path(arguments[1])
    dist.init_process_group("gloo", timeout=TIMEOUT)
    found = {name: asdict(figures) for name, figures in run(job, folder).items()}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
