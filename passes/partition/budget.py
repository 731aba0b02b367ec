"""Budget: how long a search may go on, and Ctrl-C, which ends it with the best plan so far.

CP-SAT runs within a budget here too, for every integer program of the planner.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NamedTuple

Late = Callable[[], bool]


class OutOfTimeError(Exception):
    """The budget ended before there was an answer."""


class Budget:
    """A deadline that Ctrl-C brings forward.

    With `patience` it also ends once a search has had no news after its first for so many seconds
    of its own work, and for as long as all work before them took.

    As a context manager it catches SIGINT (in the main thread): the first one only sets
    `stopped`, which loops look at through `late`; a second one raises KeyboardInterrupt.
    """

    def __init__(
        self,
        seconds: float | None = None,
        *,
        within: Budget | None = None,
        patience: float = math.inf,
    ) -> None:
        self.begin = time.monotonic()
        self.deadline = math.inf if seconds is None else self.begin + seconds
        self.within = within  # Ctrl-C there is Ctrl-C here
        self.patience = patience
        self._work, self._news = time.process_time(), math.inf  # at the begin, at the last news
        self._stopped = False
        self._previous: Any = None

    @property
    def stopped(self) -> bool:
        """True after Ctrl-C."""
        return self._stopped or (self.within is not None and self.within.stopped)

    @property
    def late(self) -> bool:
        return self.stopped or time.monotonic() >= self.deadline or self.waits <= 0

    @property
    def waits(self) -> float:
        """Seconds of work that news may still take; they pass no faster than the clock does."""
        if math.inf in (self.patience, self._news):
            return math.inf
        return max(self.patience, self._news - self._work) - (time.process_time() - self._news)

    @property
    def left(self) -> float:
        """Seconds until the deadline; 0 when late."""
        return 0.0 if self.late else self.deadline - time.monotonic()

    @property
    def spent(self) -> float:
        return time.monotonic() - self.begin

    def stop(self) -> None:
        self._stopped = True

    def news(self) -> None:
        """The search has found something that is worth its time."""
        self._news = time.process_time()

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
        if self._stopped:
            raise KeyboardInterrupt
        self._stopped = True


def handle_interrupts() -> None:
    """Puts back Python's handler of Ctrl-C: OR-Tools leaves none, and the process would end."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


class Solved(NamedTuple):
    """End of a run of CP-SAT; `bound`, in the model's units, holds unless it was `infeasible`."""

    infeasible: bool
    optimal: bool
    bound: float


def minimize(
    model: Any,
    budget: Budget,
    on_solution: Callable[[Callable[[Any], bool]], bool],
    *,
    seed: int = 0,
    effort: float = math.inf,
    presolve: bool = False,
    on_bound: Callable[[float], None] = lambda _: None,
) -> Solved:
    """Solve a CP-SAT model on one core, until it is proved or the budget ends.

    Ctrl-C ends the search inside the solver, and the budget with it.

    Args:
        on_solution: called with the value of literals in each solution, which are ever better;
            True ends the search.
        effort: limit in CP-SAT's deterministic seconds, which are the same on every machine.
        presolve: for models in which a literal and its negation enforce relations of the same
            variables.
        on_bound: called with improved lower bounds.
    """
    from ortools.sat.python import cp_model

    class Solutions(cp_model.CpSolverSolutionCallback):
        stopped = False

        def on_solution_callback(self) -> None:
            if on_solution(self.boolean_value):
                self.stopped = True
                self.stop_search()

    solver, solutions = cp_model.CpSolver(), Solutions()
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 0
    # OR-Tools 9.15 loses solutions and then certifies a wrong optimum, or that there is none: with
    # presolve in one of some thousand straight pipelines (google/or-tools#5274, #5293), without it
    # where a literal and its negation each enforce a relation of the same two variables.
    solver.parameters.cp_model_presolve = presolve
    solver.parameters.presolve_inclusion_work_limit = 0
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.random_seed = seed
    seconds = min(budget.left, budget.waits)
    if math.isfinite(seconds):
        solver.parameters.max_time_in_seconds = seconds
    if math.isfinite(effort):
        solver.parameters.max_deterministic_time = effort
    solver.best_bound_callback = on_bound
    status = solver.solve(model, solutions)
    handle_interrupts()
    ended = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE, cp_model.MODEL_INVALID)
    ended |= solutions.stopped or solver.deterministic_time >= effort
    if not ended and solver.wall_time < 0.98 * seconds and not budget.late:
        budget.stop()  # it had time left: this was Ctrl-C
    infeasible = status == cp_model.INFEASIBLE
    return Solved(infeasible, status == cp_model.OPTIMAL, solver.best_objective_bound)
