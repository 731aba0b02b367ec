"""A schedule without a model: to be proved, drawn, and written to a file."""

from __future__ import annotations

from pdcompile.errors import ScheduleError
from pdcompile.passes.schedules import warmup
from pdcompile.passes.schedules.stream import tasks_of
from pdcompile.plan import NOT_CERTIFIED, Edge, Plan, StagePlan, Training
from pdcompile.schedule import Action
from pdcompile.schedule.registry import PARTS, flush_schedules, kind_of
from pdcompile.schedule.written import Cell, Written, parse

FORWARD, BACKWARD = 1.0, float(PARTS)  # seconds: so that each part of a split backward takes 1


def chain(schedule: str, num_stages: int, num_microbatches: int, num_ranks: int) -> Plan:
    """The plan of stages that take equally long and each feed the next one, for nothing.

    Raises:
        ScheduleError: there is no such schedule, or it is written for other counts.
    """
    kind = kind_of(schedule)
    shared = num_ranks < num_stages or kind.written is not None or kind.dispatched
    width = kind.width(num_stages, num_ranks)
    placement = kind.placement(num_stages, num_ranks // width) if shared else ()
    ranks = kind.ranks(placement, width)
    replicas = (width,) * num_stages
    depths = warmup(schedule, num_stages, num_microbatches, replicas, placement=placement)
    stages = tuple(
        StagePlan(
            s, (), (), replicas=width, forward_seconds=FORWARD, backward_seconds=BACKWARD,
            ranks=ranks[s] if ranks else (),
        )
        for s in range(num_stages)
    )  # fmt: skip
    edges = tuple(Edge(f"x{s}", s, (s + 1,), 0, True) for s in range(num_stages - 1))
    training = Training(schedule, num_microbatches, num_microbatches, depths)
    return Plan("", stages, edges, (), training, "", NOT_CERTIFIED)


_ANY = "`pdcompile simulate` draws any plan"


def written_of(plan: Plan) -> Written:
    """The tasks of a plan's schedule, as a file has them.

    Raises:
        ScheduleError: it is not one minibatch that ends with its update, or has replicas.
    """
    kind = plan.training.kind
    if kind.written is not None:
        return kind.written
    if kind.stream or not kind.trains:
        does = "leaves microbatches in flight" if kind.stream else "updates nothing"
        raise ScheduleError(
            f"schedule {kind.name!r} {does}, and a file is one minibatch that ends with its update",
            remedy=f"a schedule that drains: {flush_schedules()}; {_ANY}",
        )
    replicated = next((stage for stage in plan.stages if stage.replicas > 1), None)
    if replicated is not None:
        count = replicated.replicas
        does, other = f"has {count} replicas", "a plan without replicas"
        if kind.dispatched:
            does, other = f"runs on {count} ranks", "as many stages as ranks, or 2, 3, … times that"
        raise ScheduleError(
            f"stage {replicated.index} {does}, and a file has one rank for a stage",
            remedy=f"{other}; {_ANY}",
        )
    rows = [
        tuple(
            Cell(stage, action, microbatch)
            for stage, action, _, microbatch in tasks
            if action is not Action.STEP
        )
        for tasks in tasks_of(plan.spec)
    ]
    return parse(str(Written(kind.name.replace("+", "-"), tuple(rows))), "the plan's schedule")
