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
from pdcompile.passes.schedules.lower_comm import (
    Column,
    StageState,
    lower_evaluation,
    lower_refresh,
    project,
)
from pdcompile.plan import Edge, Plan
from pdcompile.schedule import Action, Schedule
from pdcompile.schedule.registry import StageWork, Task
from pdcompile.schedule.spec import PipelineSpec, spec_of

Limits = dict[tuple[int, int], int]  # see StageWork


@dataclass(frozen=True, slots=True)
class Stream:
    """Where a pipeline stands between two calls: a state for each stage of each holder."""

    spec: PipelineSpec
    states: tuple[tuple[StageState, ...], ...]

    @staticmethod
    def begin(spec: PipelineSpec) -> Stream:
        """A pipeline in which nothing is in flight."""
        return Stream(spec, tuple((StageState(),) * len(stages) for _, stages in spec.holders))

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


def refresh(plan: Plan) -> Schedule:
    """The program that brings tied copies up to date after changes outside of updates."""
    return lower_refresh(spec_of(plan))


_evaluation = lru_cache(maxsize=32)(lower_evaluation)


@lru_cache(maxsize=64)
def _step(stream: Stream, num_microbatches: int) -> tuple[Schedule, Stream]:
    spec = stream.spec
    columns: list[Column] = []
    limits: dict[int, Limits] = {}  # by stage
    for (rank, stages), states in zip(spec.holders, stream.states, strict=True):
        column = Column(spec, rank, dict(zip(stages, states, strict=True)))
        column.begin(num_microbatches)
        tasks = _tasks(column, states, limits.get(stages[0], {}), num_microbatches)
        column.train(tasks)
        if not spec.kind.stream:
            column.finish()
        else:
            found = _limits_for_the_next(tasks, limits.get(stages[0], {}), num_microbatches)
            limits.setdefault(stages[0] + 1, {}).update(found)
        columns.append(column)
    return project(spec, spec.name, columns, num_microbatches), _after(stream, columns, 1)


@lru_cache(maxsize=64)
def _flush(stream: Stream) -> tuple[Schedule, Stream]:
    spec = stream.spec
    columns = []
    for (rank, stages), states in zip(spec.holders, stream.states, strict=True):
        column = Column(spec, rank, dict(zip(stages, states, strict=True)))
        if spec.kind.stream:
            column.train(_tasks(column, states, {}, None))
        column.finish()
        columns.append(column)
    return project(spec, f"{spec.name}+flush", columns, 0), _after(stream, columns, 0)


def _after(stream: Stream, columns: list[Column], shift: int) -> Stream:
    states = tuple(tuple(lane.state(shift) for lane in column.lanes.values()) for column in columns)
    return stream if states == stream.states else Stream(stream.spec, states)


def _tasks(
    column: Column, states: Sequence[StageState], limits: Limits, num_microbatches: int | None
) -> list[Task]:
    """What a rank computes in one call; None: nothing more comes."""
    spec, works = column.spec, []
    for stage, state in zip(column.lanes, states, strict=True):
        replica = spec.ranks[stage].index(column.rank)
        share = () if num_microbatches is None else spec.share(stage, replica, num_microbatches)
        works.append(
            StageWork(
                stage,
                share,
                spec.warmup[stage],
                state.pending,
                state.unstepped,
                spec.late(stage),
                limits,
                flush=num_microbatches is None,
            )
        )
    return list(spec.kind.order(works))


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
