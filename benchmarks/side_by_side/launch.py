"""Starts the ranks of a comparison, on this host or each in a network of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.job import Figures, Job
from benchmarks.side_by_side.networks import Networks

ROOT = Path(__file__).parents[2]
SHOWN_LINES = 25  # of a rank that failed


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a comparison: the figures of every rank by contestant."""

    title: str
    about: str
    ranks: int
    of_rank: tuple[dict[str, Figures], ...]
    seconds: float
    load: float = 0.0  # mean number of processes that wanted a core, this run's among them

    @staticmethod
    def of_json(found: dict[str, Any]) -> Outcome:
        ranks = [{n: Figures(**one) for n, one in rank.items()} for rank in found["of_rank"]]
        return Outcome(**{**found, "of_rank": tuple(ranks)})


def launched(
    title: str, about: str, job: Job, ranks: int, networks: Networks | None = None
) -> Outcome:
    """Run a job on so many processes; raises SystemExit with the first failure's last lines."""
    print(f"{title}: {', '.join(job.names)}", file=sys.stderr, flush=True)
    began, before = time.perf_counter(), os.getloadavg()[1]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        job.write(folder / "job.json")
        (folder / "forecasts.jsonl").touch()
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.side_by_side.worker",
                   str(folder / "job.json"), str(folder)]  # fmt: skip
        shared = os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()),
        }  # fmt: skip
        processes = []
        for rank in range(ranks):
            prefix, own = networks.place(rank) if networks else ([], {})
            log = stack.enter_context((folder / f"{rank}.log").open("w"))
            processes.append(
                subprocess.Popen(
                    [*prefix, *command], cwd=ROOT, env=shared | own | {"RANK": str(rank)},
                    stdout=log, stderr=log,
                )
            )  # fmt: skip
        failed = _wait(processes)
        if failed is not None:
            lines = (folder / f"{failed}.log").read_text().splitlines()
            raise SystemExit(f"rank {failed} failed:\n" + "\n".join(lines[-SHOWN_LINES:]))
        read = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        forecasts = (folder / "forecasts.jsonl").read_text().splitlines()
    found = [{n: Figures(**one) for n, one in rank.items()} for rank in read]
    for name in job.names:  # a round is as long as its slowest rank's
        longest = [max(each) for each in zip(*(rank[name].seconds for rank in found), strict=True)]
        for rank in found:
            rank[name].seconds = longest
    for one in map(json.loads, forecasts):  # as they were written before the first step
        found[0][one["name"]].forecast_seconds = one["seconds"]
    load = (before + os.getloadavg()[1]) / 2
    return Outcome(title, about, ranks, tuple(found), time.perf_counter() - began, load)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all have ended; the rank that failed first, whose fellows are then ended."""
    running = dict(enumerate(processes))
    try:
        while running:
            time.sleep(0.2)
            for rank, process in list(running.items()):
                code = process.poll()
                if code:
                    return rank
                if code == 0:
                    del running[rank]
        return None
    finally:
        for process in running.values():
            process.kill()
        for process in running.values():
            process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
