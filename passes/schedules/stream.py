"""Stream: the programs of successive calls, one after another.

A schedule with a flush leaves nothing behind: every call has the same program.  A stream leaves
microbatches in flight, so that a call's program depends on what the calls before it left.
Only that remainder is the state, relative to the call; after two calls it repeats, and so does
the program, as the same object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pdcompile.errors import ScheduleError
from pdcompile.passes.schedules.lower_comm import Column, RankState, lower_evaluation, project
from pdcompile.plan import Edge, Plan
from pdcompile.schedule import Action, Schedule
from pdcompile.schedule.registry import StageWork, Task
from pdcompile.schedule.spec import PipelineSpec, spec_of

Limits = dict[tuple[int, int], int]  # see StageWork


@dataclass(frozen=True, slots=True)
class Stream:
    """Where a pipeline stands between two calls.  `states[s][q]`: replica q of stage s."""

    spec: PipelineSpec
    states: tuple[tuple[RankState, ...], ...]

    @staticmethod
    def begin(spec: PipelineSpec) -> Stream:
        """A pipeline in which nothing is in flight."""
        return Stream(spec, tuple(tuple(RankState() for _ in ranks) for ranks in spec.ranks))

    def step(self, num_microbatches: int) -> tuple[Schedule, Stream]:
        """The program of one minibatch, and the stream after it.

        Raises ScheduleError when the plan has fewer microbatches.
        """
        if not 1 <= num_microbatches <= self.spec.num_microbatches:
            raise ScheduleError(
                f"{num_microbatches} microbatches, planned are 1 to {self.spec.num_microbatches}",
                remedy="split the minibatch into the planned number of microbatches",
            )
        return _step(self, num_microbatches)

    def flush(self) -> tuple[Schedule, Stream]:
        """The program that drains what is in flight, and the stream after it."""
        return _flush(self)


def make_stream(plan: Plan) -> Stream:
    """The stream of a plan at its beginning.  Raises ScheduleError for an unusable plan."""
    return Stream.begin(spec_of(plan))


def evaluation(
    plan: Plan, edges: tuple[Edge, ...], num_microbatches: int, *, with_loss: bool = False
) -> Schedule:
    """Forward-only program over the given edges, replicas round-robin, complete in itself.

    With `with_loss` the last stage sends the loss of minibatch 0 to every rank.
    """
    return _evaluation(spec_of(plan), edges, num_microbatches, with_loss)


_evaluation = lru_cache(maxsize=32)(lower_evaluation)


@lru_cache(maxsize=64)
def _step(stream: Stream, num_microbatches: int) -> tuple[Schedule, Stream]:
    spec = stream.spec
    columns: list[Column] = []
    limits: Limits = {}
    for stage, states in enumerate(stream.states):
        following: Limits = {}
        for replica, state in enumerate(states):
            share = spec.share(stage, replica, num_microbatches)
            column = Column(spec, stage, replica, state)
            column.unstepped.append(0)
            column.unreduced.append(0)
            column.receive_loss(num_microbatches)
            column.begin(share, spec.pool(stage))
            tasks = _tasks(spec, stage, state, share, limits)
            if spec.kind.stream:
                following |= _limits_for_the_next(tasks, limits, num_microbatches)
            column.train(tasks)
            if not spec.kind.stream:
                column.finish()
            columns.append(column)
        limits = following
    return project(spec, spec.name, columns, num_microbatches), _after(stream, columns, 1)


@lru_cache(maxsize=64)
def _flush(stream: Stream) -> tuple[Schedule, Stream]:
    spec = stream.spec
    columns = []
    for stage, states in enumerate(stream.states):
        for replica, state in enumerate(states):
            column = Column(spec, stage, replica, state)
            if spec.kind.stream:
                column.train(_tasks(spec, stage, state, (), {}, flush=True))
            column.finish()
            columns.append(column)
    return project(spec, f"{spec.name}+flush", columns, 0), _after(stream, columns, 0)


def _after(stream: Stream, columns: list[Column], shift: int) -> Stream:
    following = iter(columns)
    states = tuple(tuple(next(following).state(shift) for _ in one) for one in stream.states)
    return stream if states == stream.states else Stream(stream.spec, states)


def _tasks(
    spec: PipelineSpec,
    stage: int,
    state: RankState,
    share: Sequence[int],
    limits: Limits,
    *,
    flush: bool = False,
) -> list[Task]:
    work = StageWork(
        stage,
        share,
        spec.warmup[stage],
        state.pending,
        state.unstepped,
        spec.late(stage),
        limits,
        flush,
    )
    return list(spec.kind.order((work,)))


def _limits_for_the_next(tasks: Sequence[Task], limits: Limits, num_microbatches: int) -> Limits:
    """What one replica's call means for the stage after it: the `limits` of its backwards."""
    found: Limits = {}
    next_forward = num_microbatches
    for _, action, minibatch, microbatch in reversed(tasks):
        if action is Action.FORWARD:
            next_forward = microbatch
        elif action is Action.BACKWARD:
            one = (minibatch, microbatch)
            found[one] = min(next_forward - 1, limits.get(one, num_microbatches))
    return found
