"""Stream: the programs of successive calls, one after another.

A schedule with a flush leaves nothing behind: every call has the same program.  A stream leaves
microbatches in flight, so that a call's program depends on what the calls before it left.
Only that remainder is the state, relative to the call; once the warm-up is filled it repeats, and
so does the program, as the same object.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pdcompile.errors import ScheduleError
from pdcompile.passes.schedules import forward
from pdcompile.passes.schedules.device_order import HalfBegun, in_device_order
from pdcompile.passes.schedules.lower_comm import Column, StageState, Upto
from pdcompile.plan import Edge, Plan
from pdcompile.schedule import Action, Instruction, Schedule
from pdcompile.schedule.instruction import TO_INPUTS
from pdcompile.schedule.registry import StageWork, Task, flush_schedules
from pdcompile.schedule.spec import Broadcast, PipelineSpec, with_edges
from pdcompile.schedule.turns import ahead

Limits = dict[tuple[int, int], int]  # see StageWork


@dataclass(frozen=True, slots=True)
class Stream:
    """Position of a pipeline between two calls: a state for each stage of each holder.

    `phase`: minibatches so far, as far as they decide whose turn it is; `half_begun`: of programs
    in device order, else None.
    """

    spec: PipelineSpec
    states: tuple[tuple[StageState, ...], ...]
    phase: int = 0
    half_begun: HalfBegun | None = None

    @staticmethod
    def begin(spec: PipelineSpec, minibatches: int = 0, *, ordered: bool = False) -> Stream:
        """A pipeline in which nothing is in flight, after so many minibatches; `ordered`: its
        programs are in device order."""
        states = tuple((StageState(),) * len(stages) for _, stages in spec.holders)
        half_begun: HalfBegun | None = () if ordered else None
        return Stream(spec, states, minibatches % spec.period, half_begun)

    def step(self, num_microbatches: int) -> tuple[Schedule, Stream]:
        """The program of one minibatch, and the stream after it.

        Raises ScheduleError when the plan has fewer microbatches.
        """
        _check_count(self.spec, num_microbatches)
        return _step(self, num_microbatches, "update")

    def flush(self) -> tuple[Schedule, Stream]:
        """The program that drains what is in flight, and the stream after it."""
        return _flush(self)


def make_stream(plan: Plan, *, ordered: bool = False) -> Stream:
    """The stream of a plan at its beginning.  Raises ScheduleError for an unusable plan."""
    return Stream.begin(plan.spec, ordered=ordered)


def gradients(plan: Plan, num_microbatches: int) -> Schedule:
    """Forward and backward of one minibatch without its update, complete in itself.

    Raises ScheduleError for a stream, whose gradients belong to older weights.
    """
    spec = plan.spec
    if spec.kind.stream or not spec.kind.trains:
        raise ScheduleError(
            f"schedule {spec.name!r} has no gradients without updates",
            remedy=f"a flush schedule ({flush_schedules()})",
        )
    _check_count(spec, num_microbatches)
    return _step(Stream.begin(spec), num_microbatches, "gradients")[0]


def evaluation(
    plan: Plan, edges: tuple[Edge, ...], num_microbatches: int, with_loss: bool = False
) -> Schedule:
    """Forward-only program over the given edges, replicas round-robin, complete in itself.

    With `with_loss` the last stage tells the loss of minibatch 0 to every rank.
    """
    return _evaluation(with_edges(plan.spec, edges), num_microbatches, with_loss)


def tasks_of(spec: PipelineSpec) -> list[list[Task]]:
    """Tasks of every rank in one call, after which nothing is in flight."""
    begin, found = Stream.begin(spec), [list[Task]() for _ in range(spec.num_ranks)]
    for column, states in zip(_columns(begin), begin.states, strict=True):
        found[column.rank] = _tasks(column, states, {}, spec.num_microbatches)
    return found


def _check_count(spec: PipelineSpec, num_microbatches: int) -> None:
    if not 1 <= num_microbatches <= spec.num_microbatches:
        raise ScheduleError(
            f"got {num_microbatches} microbatches; this plan supports 1 to {spec.num_microbatches}",
            remedy="split the minibatch into the planned number of microbatches",
        )


@lru_cache(maxsize=64)
def _step(stream: Stream, num_microbatches: int, upto: Upto) -> tuple[Schedule, Stream]:
    spec = stream.spec
    if not spec.kind.trains:
        return replace(_evaluation(spec, num_microbatches, False), name=spec.name), stream
    limits: dict[int, Limits] = {}  # by stage
    columns = _columns(stream, upto)
    for column, states in zip(columns, stream.states, strict=True):
        first = min(column.lanes)
        column.begin(num_microbatches)
        if spec.kind.updates_each:
            limits[first] = _due(spec, first, stream.phase, states)
        tasks = _tasks(column, states, limits.get(first, {}), num_microbatches)
        column.write(tasks)
        if not spec.kind.stream:
            column.finish()
        elif not spec.kind.updates_each:
            found = _limits_for_the_next(tasks, limits.get(first, {}), num_microbatches)
            limits.setdefault(first + 1, {}).update(found)
    name = spec.name if upto == "update" else f"{spec.name}+{upto}"
    program = project(spec, name, columns, spec.losses(num_microbatches, stream.phase))
    return _after(stream, columns, program, 1)


@lru_cache(maxsize=64)
def _flush(stream: Stream) -> tuple[Schedule, Stream]:
    spec, columns = stream.spec, _columns(stream)
    for column, states in zip(columns, stream.states, strict=True):
        if spec.kind.stream:
            column.write(_tasks(column, states, {}, None))
        column.finish()
    return _after(stream, columns, project(spec, f"{spec.name}+flush", columns), 0)


@lru_cache(maxsize=32)
def _evaluation(spec: PipelineSpec, num_microbatches: int, with_loss: bool) -> Schedule:
    """Forwards in the order of inference, whatever the schedule."""
    columns = _columns(Stream.begin(spec), "forward")
    for column in columns:
        column.begin(num_microbatches, with_loss=with_loss)
        shares = {stage: column.share(stage, num_microbatches) for stage in column.lanes}
        column.write(forward.order([StageWork(*share) for share in shares.items()]))
        column.finish()
    losses = spec.losses(num_microbatches) if with_loss else ()
    return project(spec, f"{spec.name}+eval", columns, losses)


def _columns(stream: Stream, upto: Upto = "update") -> list[Column]:
    """One for each rank that holds stages, with what earlier calls left."""
    return [
        Column(stream.spec, rank, dict(zip(stages, states, strict=True)), upto, stream.phase)
        for (rank, stages), states in zip(stream.spec.holders, stream.states, strict=True)
    ]


def _after(
    stream: Stream, columns: list[Column], program: Schedule, shift: int
) -> tuple[Schedule, Stream]:
    """A program as the stream has them, and the stream after it."""
    half_begun = stream.half_begun
    if half_begun is not None:
        program, half_begun = in_device_order(stream.spec, program, half_begun, shift)
    states = tuple(tuple(lane.state(shift) for lane in column.lanes.values()) for column in columns)
    after = Stream(stream.spec, states, (stream.phase + shift) % stream.spec.period, half_begun)
    return program, stream if after == stream else after


def _tasks(
    column: Column, states: Sequence[StageState], limits: Limits, num_microbatches: int | None
) -> list[Task]:
    """Tasks of a rank in one call; None: nothing more comes."""
    spec, works = column.spec, []
    for stage, state in zip(column.lanes, states, strict=True):
        mine = () if num_microbatches is None else column.share(stage, num_microbatches)
        works.append(
            StageWork(
                stage,
                mine,
                spec.warmup[stage],
                state.pending,
                state.unstepped,
                column.phase - spec.before(stage, column.phase, spec.lag(stage)),
                spec.late(stage),
                _halfway(spec, stage, num_microbatches),
                spec.gradient_buffers(stage),
                len(spec.ranks),
                limits,
                flush=num_microbatches is None,
                delay=spec.delay(stage),
                ahead=ahead(spec.turns(stage), mine, spec.warmup[stage]),
            )
        )
    return list(spec.kind.order(works))


def _halfway(spec: PipelineSpec, stage: int, num_microbatches: int | None) -> int | None:
    """The microbatch before which all replicas of a stage make their late update in this call."""
    found = spec.halfway(stage)
    return None if found is None or (num_microbatches or 0) <= found else found


def _due(spec: PipelineSpec, stage: int, phase: int, states: Sequence[StageState]) -> Limits:
    """Minibatches of one microbatch each whose backward comes before all forwards of the call.

    The first forward of a group needs the updates that its weights are made by, hence the
    backwards of all replicas; and what one stage needs is needed of all stages after it.
    """
    due = max(spec.before(s, phase, spec.warmup[s]) for s in range(stage + 1)) - phase
    return {one: -1 for state in states for one in state.pending if one[0] < due}


def project(
    spec: PipelineSpec, name: str, columns: Iterable[Column], losses: Sequence[Broadcast] = ()
) -> Schedule:
    """Put the columns at their ranks, which first post the receives of the losses."""
    placed = {column.rank: column for column in columns}
    found = []
    for rank in range(spec.num_ranks):
        column = placed.get(rank)
        stage = max(column.lanes) if column else -1
        heard = [
            Instruction(Action.HEAR_LOSS, stage, peer=one.root)
            for one in losses
            if rank in one.receivers
        ]
        found.append((*heard, *(column.out if column else ())))
    return Schedule(name, tuple(found))


def _limits_for_the_next(tasks: Sequence[Task], limits: Limits, num_microbatches: int) -> Limits:
    """Limits (see `StageWork`) that one replica's call sets for the backwards of the next stage."""
    found: Limits = {}
    next_forward = num_microbatches
    for _, action, minibatch, microbatch in reversed(tasks):
        if action is Action.FORWARD:
            next_forward = microbatch
        elif action in TO_INPUTS:
            one = (minibatch, microbatch)
            found[one] = min(next_forward - 1, limits.get(one, num_microbatches))
    return found
