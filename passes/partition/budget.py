"""Budget: how long a search may go on, and Ctrl-C, which ends it with the best plan so far."""

from __future__ import annotations

import math
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any


class OutOfTimeError(Exception):
    """The budget ended before there was an answer."""


class Budget:
    """A deadline that Ctrl-C brings forward.

    As a context manager it catches SIGINT (in the main thread): the first one only sets
    `stopped`, which loops look at through `late`; a second one raises KeyboardInterrupt.
    """

    def __init__(self, seconds: float | None = None, *, within: Budget | None = None) -> None:
        self.begin = time.monotonic()
        self.deadline = math.inf if seconds is None else self.begin + seconds
        self.stopped = False
        self.within = within  # Ctrl-C there is Ctrl-C here
        self._previous: Any = None

    @property
    def late(self) -> bool:
        interrupted = self.stopped or (self.within is not None and self.within.stopped)
        return interrupted or time.monotonic() >= self.deadline

    @property
    def left(self) -> float:
        """Seconds; 0 when late."""
        return 0.0 if self.late else self.deadline - time.monotonic()

    @property
    def spent(self) -> float:
        return time.monotonic() - self.begin

    def stop(self) -> None:
        self.stopped = True

    def __enter__(self) -> Budget:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True


def solver_for(budget: Budget, *, seed: int = 0, seconds: float = math.inf) -> Any:
    """A CP-SAT solver for one core, with the settings that our models need.

    While it runs, Ctrl-C ends the search inside the solver; call `noticed` after solving.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 0
    # OR-Tools 9.15 loses solutions in this presolve step and then certifies a wrong optimum
    # (google/or-tools#5293; one in about 400 of our random problems).
    solver.parameters.presolve_inclusion_work_limit = 0
    solver.parameters.random_seed = seed
    limit = min(budget.left, seconds)
    if math.isfinite(limit):
        solver.parameters.max_time_in_seconds = limit
    return solver


def noticed(budget: Budget, solver: Any, status: int, *, seconds: float = math.inf) -> None:
    """Tell the budget when a solve ended early although it had time left: that was Ctrl-C."""
    from ortools.sat.python import cp_model

    done = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE, cp_model.MODEL_INVALID)
    limit = solver.parameters.max_time_in_seconds
    if not done and solver.wall_time < 0.98 * min(limit, seconds) and not budget.late:
        budget.stop()
