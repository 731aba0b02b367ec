"""How long something runs: events on a CUDA device, CPU time of one thread, else wall time.

With one thread an op's CPU time is what it would take on an idle machine, whatever else runs
here; with several threads only the wall tells.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def clock() -> Callable[[], float]:
    """A clock in seconds for work on the CPU by this thread and torch's own threads."""
    return thread_time if torch.get_num_threads() == 1 else perf_counter


def timed(run: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Seconds that `run` takes on the device, and what it returns."""
    if device.type == "cuda":
        return _timed_by_events(run, torch.cuda.Event)
    now = clock()
    began = now()
    result = run()
    return now() - began, result


def _timed_by_events(run: Callable[[], Result], event: Callable[..., Any]) -> tuple[float, Result]:
    """Kernels are queued, not done, when `run` returns: the device stamps begin and end."""
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    result = run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, result  # of milliseconds
