"""What the stages of a cut hold, by rehearsing each distinct one of them once.

Stages of equal layers are equal, so that the forecast of a deep model costs little more than
that of one of its stages.  A stage that cannot be rehearsed is added up by rules (`residents`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pdcompile.ir.graph import Attr, Op, OpGraph, Ref, size_at, walk
from pdcompile.passes.costs.costed_op import described
from pdcompile.passes.costs.resident import Resident, residents
from pdcompile.passes.form.lifetimes import Lifetimes, Step
from pdcompile.passes.stages.boundaries import tied

if TYPE_CHECKING:
    from pdcompile.passes.costs.rehearse import Ports, Rehearsal

_LOG = logging.getLogger(__name__)
_KEPT = 512
_known: dict[str, Rehearsal | None] = {}  # by structure; None: cannot be rehearsed


def forecast(
    graph: OpGraph,
    stage_of: Sequence[int],
    num_stages: int,
    b: int,
    *,
    keeps_outputs: bool = True,
) -> tuple[Resident, ...]:
    """Forecasts what each stage holds, given the stage of each op, at microbatch size b.

    `keeps_outputs`: what the last stage makes for the caller outlives its forward.

    `saved_bytes` is what is alive when the forward of a microbatch has returned, its results
    among it; `workspace_bytes` how far forward and backward exceed that, beside gradients of
    parameters that have memory already; `first_peak_bytes` the peak of both together for the
    first microbatch, gradients of parameters among it.
    """
    ports = ports_of(graph, stage_of, num_stages, keeps_outputs=keeps_outputs)
    members: list[list[Op]] = [[] for _ in range(num_stages)]
    for op, stage in zip(graph.ops, stage_of, strict=True):
        members[stage].append(op)
    lifetimes = Lifetimes.of(graph)
    found = [_rehearsed(graph, lifetimes, members[s], ports[s], b) for s in range(num_stages)]
    ruled = residents(graph, stage_of, num_stages, b) if None in found else ()
    return tuple(
        ruled[s]
        if one is None
        else Resident(
            one.resident_bytes,
            max(0, one.peak_bytes - one.resident_bytes),
            one.first_peak_bytes,
            rehearsed=True,
        )
        for s, one in enumerate(found)
    )


def ports_of(
    graph: OpGraph, stage_of: Sequence[int], num_stages: int, *, keeps_outputs: bool = True
) -> list[Ports]:
    """What each stage takes and gives; ops of the loss are on the last one."""
    from pdcompile.passes.costs.rehearse import Ports

    position = {op.name: i for i, op in enumerate(graph.ops)}
    returned = {ref.name for ref in walk(graph.output, Ref)} | {graph.loss}
    last = num_stages - 1
    ports = [Ports() for _ in range(num_stages)]
    for i, op in enumerate(graph.ops):
        value = graph.values[op.name]
        home = stage_of[i]
        readers = {stage_of[position[name]] for name in value.consumers if name in position}
        readers.discard(home)
        targets = readers | ({last} if op.name in returned and home != last else set())
        if targets or op.name == graph.loss or (op.name in returned and keeps_outputs):
            ports[home].results.append(op.name)
        for target in targets:
            ports[target].received.append(op.name)
        # Only stages that compute with a value send a gradient for it.
        for target in sorted(readers) if value.needs_gradient else ():
            ports[target].entered.append(op.name)
            if target != max(readers):
                ports[target].chained.append(op.name)
        if readers and value.needs_gradient:
            ports[home].roots.append(op.name)
    for one in tied(graph, {op.name: stage for op, stage in zip(graph.ops, stage_of, strict=True)}):
        for earlier, later in pairwise(one.stages):
            ports[earlier].summed.append(one.fqn)
            ports[later].passed.append(one.fqn)
    return ports


def _rehearsed(
    graph: OpGraph, lifetimes: Lifetimes, ops: Sequence[Op], ports: Ports, b: int
) -> Rehearsal | None:
    from pdcompile.passes.costs.rehearse import rehearse

    steps = lifetimes.steps(ops, set(ports.results))
    key = _Key(graph, b).of(steps, ports)
    if key not in _known:
        try:
            found = rehearse(graph, steps, ports, b)
        except Exception as error:  # ops are anyone's: whatever they raise, the rules remain
            _LOG.info("a stage is added up by rules, it cannot be rehearsed: %s", error)
            found = None
        if len(_known) >= _KEPT:
            _known.clear()
        _known[key] = found
    return _known[key]


@dataclass
class _Key:
    """A digest of all that decides what a stage holds; names are numbered as they appear."""

    graph: OpGraph
    b: int
    numbers: dict[str, int] = field(default_factory=dict)

    def of(self, steps: Sequence[Step], ports: Ports) -> str:
        ops = [step.op for step in steps]
        names = (*(name for op in ops for name in (*op.inputs, op.name)), *ports.received)
        lines = [f"{self.graph.training} {self.b}"]
        lines += [self._value(name) for name in dict.fromkeys(names)]
        lines += [self._op(op) for op in ops]
        given = (ports.received, ports.entered, ports.chained, ports.results)
        lines += [self._names(part) for part in given]
        lines.append(self._names(sorted(ports.roots, key=self._number)))
        lines.append(self._names([self.graph.loss or ""]))
        lines += [self._names(step.ends) for step in steps]
        lines += [" ".join(map(self._tensor, part)) for part in (ports.summed, ports.passed)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _number(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def _names(self, names: Sequence[str]) -> str:
        return " ".join(str(self._number(name)) for name in names)

    def _tensor(self, fqn: str) -> str:
        return self._text(Attr(fqn))

    def _value(self, name: str) -> str:
        value = self.graph.values[name]
        shape = tuple(size_at(size, self.b) for size in value.shape)
        flags = (value.requires_grad, value.producer is None, value.stride_order)
        return (
            f"{self._number(name)} {value.dtype} {shape} {flags} {self._number(str(value.storage))}"
        )

    def _op(self, op: Op) -> str:
        own = op.module_path if op.kind == "opaque" else ""
        tensors = (*op.parameters, *op.buffers_read, *op.buffers_written)
        parts = (
            self._number(op.name), op.kind, op.target, own, op.grad_enabled, op.autocast,
            op.saved_bytes, self._names(op.mutates), self._text(op.args), self._text(op.kwargs),
            self._text(op.constructor), " ".join(map(self._tensor, tensors)),
        )  # fmt: skip
        return "|".join(str(part) for part in parts)

    def _text(self, argument: Any) -> str:
        def tensor(fqn: str) -> str:
            info = self.graph.tensors.get(fqn)
            about = (info.shape, info.dtype, info.requires_grad, info.kind) if info else fqn
            return f"@{self._number('tensor ' + fqn)}{about}"

        return described(argument, self.b, lambda name: f"%{self._number(name)}", tensor)
