"""Programs: what a runtime interprets, each program proved before it is handed out."""

from __future__ import annotations

from collections.abc import Callable

from pdcompile.passes.check import check, check_programs
from pdcompile.passes.schedules.between_calls import buffers, norms, refresh, share
from pdcompile.passes.schedules.device_order import in_device_order
from pdcompile.passes.schedules.stream import Stream, evaluation, gradients, make_stream
from pdcompile.plan import Edge, Plan
from pdcompile.schedule import Schedule
from pdcompile.schedule.spec import Broadcast

__all__ = ["Programs", "buffers", "gradients", "norms", "refresh"]  # what `Programs.of` may make


class Programs:
    """The programs of one plan, call after call; `eval_edges` cross stages in evaluation.

    `ordered`: in device order, which they are then proved for.  Every method raises ScheduleError
    or DeadlockError for a program that cannot be proved.
    """

    def __init__(self, plan: Plan, eval_edges: tuple[Edge, ...], *, ordered: bool = False) -> None:
        self._plan, self._eval_edges = plan, eval_edges
        self._ordered = ordered
        self._stream = make_stream(plan, ordered=ordered)
        self._counts: set[int] = set()  # microbatches of minibatches that were proved
        self._proved: dict[object, Schedule] = {}
        if ordered:  # who made the plan has proved it for tags
            check(plan, ordered=self._ordered)

    def step(self, num_microbatches: int) -> Schedule:
        """One minibatch and its update; of a stream also what earlier calls left."""
        if num_microbatches not in self._counts:
            usual = num_microbatches in (1, self._plan.training.num_microbatches)
            check(self._plan, None if usual else (num_microbatches,), ordered=self._ordered)
            self._counts.add(num_microbatches)
        program, self._stream = self._stream.step(num_microbatches)
        return program

    def restart(self, minibatches: int) -> None:
        """Go on as after so many minibatches; nothing is in flight."""
        self._stream = Stream.begin(self._stream.spec, minibatches, ordered=self._ordered)

    def flush(self) -> Schedule:
        """Drain what is in flight."""
        program, self._stream = self._stream.flush()
        return program

    def evaluation(self, num_microbatches: int, with_loss: bool) -> Schedule:
        """One minibatch forward, on the newest weights."""
        edges = self._eval_edges
        return self.of(evaluation, edges, num_microbatches, with_loss, edges=edges)

    def share(self, broadcasts: tuple[Broadcast, ...]) -> Schedule:
        """Bring what one rank has to those that need it."""
        return self.of(share, broadcasts, broadcasts=broadcasts)

    def of(
        self,
        make: Callable[..., Schedule],
        *given: object,
        edges: tuple[Edge, ...] | None = None,
        broadcasts: tuple[Broadcast, ...] = (),
    ) -> Schedule:
        """The program that `make` makes of the plan and what is given: `gradients` of a minibatch,
        or one between calls."""
        found = self._proved.get((make, *given))
        if found is None:
            found = make(self._plan, *given)
            if self._ordered and not broadcasts:  # those go with tags
                found, _ = in_device_order(self._stream.spec, found, ())
            check_programs(self._plan, [found], edges, broadcasts, ordered=self._ordered)
            self._proved[make, *given] = found
        return found
