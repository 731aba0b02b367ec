"""Programs between calls: what ranks bring together while nothing is in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pdcompile.passes.schedules.lower_comm import Column, StageState
from pdcompile.passes.schedules.stream import project
from pdcompile.plan import Plan
from pdcompile.schedule import Action, Instruction, Schedule
from pdcompile.schedule.instruction import POST_RECV, SEND, WAIT_RECV, WAIT_SEND
from pdcompile.schedule.spec import Broadcast


def refresh(plan: Plan) -> Schedule:
    """Owners send their tied parameters to the other holders, outside any update."""

    def write(column: Column) -> None:
        for lane in column.lanes.values():
            for hop in lane.hops.weights:
                lane.expect_weights(hop.edge, -1)
        for lane in column.lanes.values():
            for hop in lane.hops.after_step:
                lane.send(hop, -1, -1)

    return _program(plan, "refresh", write)


def norms(plan: Plan) -> Schedule:
    """All ranks with stages exchange the norms of the gradients that there are now."""

    def write(column: Column) -> None:
        column.out += [Instruction(Action.POST_NORMS, -1), Instruction(Action.WAIT_NORMS, -1)]

    return _program(plan, "norms", write)


def buffers(plan: Plan) -> Schedule:
    """The replicas of every stage that has several bring together the buffers that training writes,
    and compare what must be equal."""

    def write(column: Column) -> None:
        for lane in column.lanes.values():
            if lane.replicated:
                lane.put(Action.POST_BUFFERS)
                lane.put(Action.WAIT_BUFFERS)

    return _program(plan, "buffers", write)


def _program(plan: Plan, name: str, write: Callable[[Column], None]) -> Schedule:
    spec, columns = plan.spec, []
    for rank, stages in spec.holders:
        column = Column(spec, rank, dict.fromkeys(stages, StageState()))
        write(column)
        column.finish()
        columns.append(column)
    return project(spec, f"{spec.name}+{name}", columns)


def share(plan: Plan, broadcasts: Iterable[Broadcast]) -> Schedule:
    """Tensors go from ranks that have them to those that need them, one after the other."""
    spec = plan.spec
    columns: list[list[Instruction]] = [[] for _ in range(spec.num_ranks)]
    for kind, item, microbatch, root, receivers in broadcasts:
        for table in (SEND, WAIT_SEND):
            for peer in receivers:
                columns[root].append(Instruction(table[kind], -1, 0, microbatch, item, peer))
        for peer in receivers:
            for table in (POST_RECV, WAIT_RECV):
                columns[peer].append(Instruction(table[kind], -1, 0, microbatch, item, root))
    return Schedule(f"{spec.name}+broadcast", tuple(map(tuple, columns)))
