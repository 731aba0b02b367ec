"""Programs: what a runtime interprets, each program proved before it is handed out."""

from __future__ import annotations

from collections.abc import Callable

from pdcompile.passes.check import check, check_program
from pdcompile.passes.schedules import evaluation, gradients, make_stream, norms, refresh, share
from pdcompile.plan import Edge, Plan
from pdcompile.schedule import Schedule
from pdcompile.schedule.spec import Broadcast


class Programs:
    """The programs of one plan, call after call; `eval_edges` cross stages in evaluation.

    Every method raises ScheduleError or DeadlockError for a program that cannot be proved.
    """

    def __init__(self, plan: Plan, eval_edges: tuple[Edge, ...]) -> None:
        self._plan, self._eval_edges = plan, eval_edges
        self._stream = make_stream(plan)
        self._counts: set[int] = set()  # microbatches of minibatches that were proved
        self._proved: dict[object, Schedule] = {}

    def step(self, num_microbatches: int) -> Schedule:
        """One minibatch and its update; of a stream also what earlier calls left."""
        if num_microbatches not in self._counts:
            usual = num_microbatches in (1, self._plan.training.num_microbatches)
            check(self._plan, None if usual else (num_microbatches,))
            self._counts.add(num_microbatches)
        program, self._stream = self._stream.step(num_microbatches)
        return program

    def flush(self) -> Schedule:
        """Drain what is in flight."""
        program, self._stream = self._stream.flush()
        return program

    def gradients(self, num_microbatches: int) -> Schedule:
        """One minibatch without its update."""
        make = lambda: gradients(self._plan, num_microbatches)  # noqa: E731
        return self._once(("gradients", num_microbatches), make)

    def evaluation(self, num_microbatches: int, *, with_loss: bool) -> Schedule:
        """One minibatch forward, on the newest weights."""
        edges = self._eval_edges
        return self._once(
            ("evaluation", num_microbatches, with_loss),
            lambda: evaluation(self._plan, edges, num_microbatches, with_loss=with_loss),
            edges,
        )

    def refresh(self) -> Schedule:
        """Bring tied copies up to date."""
        return self._once("refresh", lambda: refresh(self._plan))

    def norms(self) -> Schedule:
        """Exchange the norms of the gradients that there are."""
        return self._once("norms", lambda: norms(self._plan))

    def share(self, broadcasts: tuple[Broadcast, ...]) -> Schedule:
        """Bring what one rank has to those that need it."""
        return self._once(broadcasts, lambda: share(self._plan, broadcasts), None, broadcasts)

    def _once(
        self,
        key: object,
        make: Callable[[], Schedule],
        edges: tuple[Edge, ...] | None = None,
        broadcasts: tuple[Broadcast, ...] = (),
    ) -> Schedule:
        if key not in self._proved:
            program = make()
            check_program(self._plan, program, edges, broadcasts)
            self._proved[key] = program
        return self._proved[key]
