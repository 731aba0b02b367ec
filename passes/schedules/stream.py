"""Stream: the programs of successive calls, one after another.

A schedule with a flush leaves nothing behind: every call has the same program.  2bw leaves
microbatches in flight, so that a call's program depends on what the calls before it left.
Only that remainder is the state, relative to the call; after two calls it repeats, and so does
the program, as the same object.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pdcompile.errors import ScheduleError
from pdcompile.passes.layout import Layout, layout_of
from pdcompile.passes.lower_comm import Column, RankState, Step, lower_evaluation, project
from pdcompile.passes.schedules import gpipe, one_f_one_b, two_bw
from pdcompile.plan import Edge, Plan
from pdcompile.schedule import Action, Schedule


@dataclass(frozen=True, slots=True)
class Stream:
    """Where a pipeline stands between two calls.  `states[s][q]`: replica q of stage s."""

    layout: Layout
    states: tuple[tuple[RankState, ...], ...]

    @staticmethod
    def begin(layout: Layout) -> Stream:
        """A pipeline in which nothing is in flight."""
        return Stream(layout, tuple(tuple(RankState() for _ in ranks) for ranks in layout.ranks))

    def step(self, num_microbatches: int) -> tuple[Schedule, Stream]:
        """The program of one minibatch, and the stream after it.

        Raises ScheduleError when the plan has fewer microbatches.
        """
        if not 1 <= num_microbatches <= self.layout.num_microbatches:
            raise ScheduleError(
                f"{num_microbatches} microbatches, planned are 1 to {self.layout.num_microbatches}",
                remedy="split the minibatch into the planned number of microbatches",
            )
        return _step(self, num_microbatches)

    def flush(self) -> tuple[Schedule, Stream]:
        """The program that drains what is in flight, and the stream after it."""
        return _flush(self)


def make_stream(plan: Plan) -> Stream:
    """The stream of a plan at its beginning.  Raises ScheduleError for an unusable plan."""
    return Stream.begin(layout_of(plan))


def evaluation(
    plan: Plan, edges: tuple[Edge, ...], num_microbatches: int, *, with_loss: bool = False
) -> Schedule:
    """Forward-only program over the given edges, replicas round-robin, complete in itself.

    With `with_loss` the last stage sends the loss of minibatch 0 to every rank.
    """
    return _evaluation(layout_of(plan), edges, num_microbatches, with_loss)


_evaluation = lru_cache(maxsize=32)(lower_evaluation)


@lru_cache(maxsize=64)
def _step(stream: Stream, num_microbatches: int) -> tuple[Schedule, Stream]:
    layout = stream.layout
    columns: list[Column] = []
    limits: dict[tuple[int, int], int] = {}
    for stage, states in enumerate(stream.states):
        following: dict[tuple[int, int], int] = {}
        for replica, state in enumerate(states):
            share = layout.share(stage, replica, num_microbatches)
            column = Column(layout, stage, replica, state)
            column.unstepped.append(0)
            column.unreduced.append(0)
            column.receive_loss(num_microbatches)
            column.begin(share, layout.pool(stage))
            steps = _order(layout, stage, state, share, limits)
            following |= two_bw.limits_for_the_next(steps, limits, num_microbatches)
            column.train(steps)
            if not layout.lag:
                column.finish()
            columns.append(column)
        limits = following
    return project(layout, layout.name, columns, num_microbatches), _after(stream, columns, 1)


@lru_cache(maxsize=64)
def _flush(stream: Stream) -> tuple[Schedule, Stream]:
    layout = stream.layout
    columns = []
    for stage, states in enumerate(stream.states):
        for replica, state in enumerate(states):
            column = Column(layout, stage, replica, state)
            column.train(two_bw.drain(state.pending, state.unstepped, layout.late(stage)))
            column.finish()
            columns.append(column)
    return project(layout, f"{layout.name}+flush", columns, 0), _after(stream, columns, 0)


def _after(stream: Stream, columns: list[Column], shift: int) -> Stream:
    following = iter(columns)
    states = tuple(tuple(next(following).state(shift) for _ in one) for one in stream.states)
    return stream if states == stream.states else Stream(stream.layout, states)


def _order(
    layout: Layout,
    stage: int,
    state: RankState,
    share: range,
    limits: dict[tuple[int, int], int],
) -> list[Step]:
    if layout.name == "2bw":
        late, depth = layout.late(stage), layout.warmup[stage]
        return list(two_bw.order(state.pending, state.unstepped, share, depth, late, limits))
    if layout.name == "gpipe":
        compute = gpipe.order(share)
    else:
        compute = one_f_one_b.order(share, layout.warmup[stage])
    steps = [(action, 0, microbatch) for action, microbatch in compute]
    return [*steps, (Action.STEP, 0, -1)]
