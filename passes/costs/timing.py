"""Clocks for work on a device, and typical times of repeated work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch

from pdcompile.hardware import devices

MIN_RUNS, MAX_RUNS = 3, 50
# On a GPU: first runs, in which libraries choose algorithms and caches fill; seconds of runs that
# are queued between two events, at least and at most so many; and repetitions of all that.
WARMUPS = 2
QUEUED_SECONDS, LEAST_QUEUED, MOST_QUEUED = 2e-3, 5, 100
MIN_ROUNDS, MAX_ROUNDS = 2, 5
MARGIN = 1.2  # for which the device is kept occupied, of what queueing took before


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that `run` takes on the device."""
    if not devices.is_host(device):
        return _timed_by_events(run, devices.timed_event)
    # Torch's own threads, where it has some, are in no clock of this one.
    now = thread_time if torch.get_num_threads() == 1 else perf_counter
    began = now()
    run()
    return now() - began


def _timed_by_events(run: Callable[[], object], event: Callable[[], Any]) -> float:
    """Kernels are queued, not done, when `run` returns: the device stamps begin and end."""
    begin, end = event(), event()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) / 1e3)  # of milliseconds


def typical(run: Callable[[], float], budget_seconds: float) -> float:
    """Median of the seconds that several runs say they took, after a warm-up; at least three.

    The shorter of two runs where one takes more than the budget already: the first of a process may
    be held up by threads and libraries that start.
    """
    first = run()
    if first > budget_seconds:
        return min(first, run())
    times: list[float] = []
    end = perf_counter() + budget_seconds - first
    while len(times) < MIN_RUNS or (perf_counter() < end and len(times) < MAX_RUNS):
        times.append(run())
    return median(times)


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one run: on the device, and of the host to queue it there.

    A program takes the larger sum of the two, as the host goes on while the device works.  The CPU
    queues nothing: 0.
    """

    seconds: float
    dispatch_seconds: float = 0.0


def took(
    prepare: Callable[[], Callable[[], object]],
    device: torch.device,
    budget_seconds: float,
    *,
    most_queued: int = MOST_QUEUED,
) -> Took:
    """Typical seconds of what `prepare` makes ready to run, in about as long as the budget.

    `most_queued`: runs in a row on a GPU, which all are made ready before the first.
    """
    if devices.is_host(device):
        return Took(typical(lambda: timed(prepare(), device), budget_seconds))
    for _ in range(WARMUPS - 1):
        prepare()()
    devices.synchronize(device)
    # The shorter of two: one of them may be held up.
    once = min(timed(prepare(), device), timed(prepare(), device))
    if once > budget_seconds:
        return Took(once)
    runs = min(most_queued, max(LEAST_QUEUED, ceil(QUEUED_SECONDS / max(once, 1e-9))))
    rounds: list[Took] = []
    end = perf_counter() + budget_seconds
    while len(rounds) < MIN_ROUNDS or (perf_counter() < end and len(rounds) < MAX_ROUNDS):
        rounds.append(_queued(prepare, device, runs))
    return Took(
        median(one.seconds for one in rounds), median(one.dispatch_seconds for one in rounds)
    )


def kept_busy(run: Callable[[], object], device: torch.device, dispatch_seconds: float) -> float:
    """Seconds of a GPU, which is kept occupied while the host queues it and so never waits."""
    devices.synchronize(device)
    devices.occupy(MARGIN * dispatch_seconds)
    return timed(run, device)


def _queued(prepare: Callable[[], Callable[[], object]], device: torch.device, runs: int) -> Took:
    """Seconds of several runs in a row, queued on a GPU that has nothing to do, and again while it
    is kept occupied, so that it never waits for the host."""

    def row() -> Callable[[], None]:
        ready = [prepare() for _ in range(runs)]

        def run() -> None:
            for one in ready:
                one()

        return run

    queued = row()
    devices.synchronize(device)
    began = perf_counter()
    queued()
    dispatch = perf_counter() - began
    return Took(kept_busy(row(), device, dispatch) / runs, dispatch / runs)
