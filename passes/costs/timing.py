"""Clocks for work on a device, and typical times of repeated work."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch

from pdcompile.hardware import devices

MIN_RUNS, MAX_RUNS = 3, 50


def clock() -> Callable[[], float]:
    """A clock in seconds for work on the CPU by this thread and torch's own threads."""
    return thread_time if torch.get_num_threads() == 1 else perf_counter


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that `run` takes on the device."""
    if not devices.is_host(device):
        return _timed_by_events(run, devices.timed_event)
    now = clock()
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

    One run where that takes more than the budget already.
    """
    first = run()
    if first > budget_seconds:
        return first
    times: list[float] = []
    end = perf_counter() + budget_seconds - first
    while len(times) < MIN_RUNS or (perf_counter() < end and len(times) < MAX_RUNS):
        times.append(run())
    return median(times)
