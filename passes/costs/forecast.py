"""Forecasts what one microbatch keeps on each stage of a cut, and the peak of its backward.

`forecast` is exact to the byte: each distinct stage is rehearsed once, and stages of equal layers
are equal, so that a deep model costs little more than one of its stages.  For what cannot be
rehearsed, it adds up what autograd keeps of the ops when the whole graph runs once.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from statistics import median_low
from typing import Any

from pdcompile.ir.graph import Attr, OpGraph, walk
from pdcompile.passes.costs.costed_op import CostedOp, costed_ops, structural_key
from pdcompile.passes.costs.stage_ports import Ports, Resident, ports_of
from pdcompile.passes.costs.workspaces import HOST, Kernels
from pdcompile.passes.form.lifetimes import Lifetimes, Step, operands
from pdcompile.schedule.instruction import TO_INPUTS, Action

_LOG = logging.getLogger(__name__)
_CACHED_STAGES = 512
REHEARSING = 2e-3  # seconds an op, before any was rehearsed

Progress = Callable[[int, int, str], None]  # parts done, all parts, and the next one


@dataclass
class Rehearsals:
    """Time that rehearsing has taken in this process, to tell what it will take."""

    seconds: float = 0.0
    rates: deque[float] = field(default_factory=lambda: deque([REHEARSING], maxlen=9))

    @property
    def each(self) -> float:
        """Seconds an op, as of most: the first one of a process imports much of torch."""
        return median_low(self.rates)


rehearsals = Rehearsals()
_cache: dict[str, Resident | None] = {}  # by structure; None: cannot be rehearsed


@dataclass(frozen=True)
class Rehearsal:
    """A stage of a cut, to be run on fake tensors."""

    calls: Sequence[CostedOp]
    steps: Sequence[Step]
    ports: Ports
    backwards: Sequence[Action]  # kinds of backward that it runs
    kernels: Kernels = HOST

    @cached_property
    def key(self) -> str:
        """A digest of all that decides what the stage holds; names are numbered as they appear."""
        numbers: dict[str, int] = {}
        lines = [f"{''.join(self.backwards)} {self.kernels}"]

        def note(names: Iterable[object]) -> None:
            lines.append(" ".join(str(numbers.setdefault(str(n), len(numbers))) for n in names))

        for call, step in zip(self.calls, self.steps, strict=True):
            op, graph = call.op, call.index.graph
            lines.append(f"{structural_key(call)} {op.saved_bytes} {graph.loss == op.name}")
            read = operands(op)
            note((*read, op.name, *(ref.fqn for ref in walk((op.args, op.kwargs), Attr))))
            note((*op.parameters, *op.buffers_read, *op.buffers_written))
            note(graph.values[name].storage for name in (*read, op.name))
            lines.append(" ".join(str(graph.values[name].producer is None) for name in read))
            note(op.mutates)
            note(step.ends)
        wiring = self.ports.wiring
        for port, edge in (*wiring.inputs, *wiring.outputs):
            note((port.value,))
            lines.append(f"{edge is None} {edge in wiring.differentiable} {edge in wiring.chained}")
        note(self.ports.copies)
        lines.append(str(self.ports.keeps_outputs))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def rehearsals_of(
    graph: OpGraph, stage_of: Sequence[int], num_stages: int, b: int, *, keeps_outputs: bool = True,
    backwards: Sequence[Action] = (Action.BACKWARD,), kernels: Kernels = HOST,
) -> list[Rehearsal]:  # fmt: skip
    """The stages, given the stage of each op, at microbatch size b.

    `keeps_outputs`: what the last stage makes for the caller outlives its forward; `backwards`:
    the kinds that the schedule has; `kernels`: those of the devices.
    """
    ports = ports_of(graph, stage_of, num_stages, keeps_outputs=keeps_outputs)
    steps = Lifetimes.of(graph).steps
    members: list[list[CostedOp]] = [[] for _ in ports]
    for call, stage in zip(costed_ops(graph, b), stage_of, strict=True):
        members[stage].append(call)
    return [
        Rehearsal(calls, steps([call.op for call in calls], own.given), own, backwards, kernels)
        for calls, own in zip(members, ports, strict=True)
    ]


def forecast(
    graph: OpGraph, stage_of: Sequence[int], num_stages: int, b: int, **how: Any
) -> tuple[Resident, ...]:
    """Forecasts what each stage holds; arguments are those of `rehearsals_of`."""
    return residents(graph, b, rehearsals_of(graph, stage_of, num_stages, b, **how))


def residents(
    graph: OpGraph, b: int, stages: Sequence[Rehearsal], progress: Progress | None = None
) -> tuple[Resident, ...]:
    """Bytes that each of these stages of a cut holds; `progress` is told how many are done."""
    found: list[Resident | None] = []
    for s, stage in enumerate(stages):
        if progress is not None:
            progress(s, len(stages), f"stage {s}")
        found.append(_rehearsed(stage))
    if None not in found:
        return tuple(filter(None, found))
    from pdcompile.passes.costs.rehearsal.kept_storages import new_bytes

    new = new_bytes(graph, b, stages[0].kernels)
    each = zip(stages, found, strict=True)
    return tuple(one or _added_up(stage, new) for stage, one in each)


def _added_up(stage: Rehearsal, new: Mapping[str, int]) -> Resident:
    """Bytes that a stage holds by those that are `new` with each of its ops, and its results.

    Never less than it holds: what is received lies in a receive slot as well.  Workspace is that of
    the op that needs the most, as in the planner's formula.
    """
    results = {port.value for port, _ in stage.ports.wiring.outputs}
    saved = workspace = 0
    for call in stage.calls:
        saved += new[call.op.name]
        if call.op.name in results:
            saved += sum(one.bytes for one in call.outputs)
        workspace = max(workspace, call.workspace_bytes)
    return Resident(saved, workspace)


def _rehearsed(stage: Rehearsal) -> Resident | None:
    """Bytes that a stage holds; None where it cannot be run."""
    from pdcompile.passes.costs.rehearsal.rehearse import rehearse

    if not stage.calls:
        return None
    key, index = stage.key, stage.calls[0].index
    if key not in _cache:
        began = time.monotonic()
        try:
            run = partial(rehearse, index, stage.steps, stage.ports, kernels=stage.kernels)
            splits = [one is Action.BACKWARD_INPUT for one in stage.backwards if one in TO_INPUTS]
            each = (stage.kernels.beside(run(splits=one), stage.calls) for one in splits)
            found = reduce(Resident.with_parts, each)
        except Exception as error:  # of a user's op: the sum remains
            _LOG.info("a stage cannot be rehearsed and is added up: %s", error)
            found = None
        if len(_cache) >= _CACHED_STAGES:
            _cache.clear()
        _cache[key] = found
        took = time.monotonic() - began
        rehearsals.seconds += took
        rehearsals.rates.append(took / len(stage.calls))
    return _cache[key]
