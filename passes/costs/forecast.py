"""What one microbatch keeps on each stage of a cut, and the transient peak of its backward.

`forecast` knows it to the byte: each distinct stage is rehearsed once, and stages of equal layers
are equal, so that a deep model costs little more than one of its stages.  `rough_forecast` is
quick enough for every candidate of a search: it adds up what autograd keeps of the ops of a stage
when the whole graph runs once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pdcompile.ir.graph import Attr, Op, OpGraph, Ref, size_at, walk
from pdcompile.passes.costs.costed_op import CostedOp, costed_ops, described
from pdcompile.passes.form.lifetimes import Lifetimes, Step
from pdcompile.passes.stages.boundaries import tied

if TYPE_CHECKING:
    from pdcompile.passes.costs.rehearse import Ports, Rehearsal


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes of one microbatch on one stage.

    `workspace_bytes`: how far the live gradients and transients of the backward exceed what it
    has already released of `saved_bytes`.  `first_peak_bytes` is known of a stage that was
    `rehearsed`: forward and backward of the first microbatch, whose gradients of parameters stay.
    """

    saved_bytes: int
    workspace_bytes: int
    first_peak_bytes: int | None = None
    rehearsed: bool = False


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
    rough = rough_forecast(graph, stage_of, num_stages, b) if None in found else ()
    return tuple(
        rough[s]
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


def rough_forecast(
    graph: OpGraph, stage_of: Sequence[int], num_stages: int, b: int
) -> tuple[Resident, ...]:
    """Adds up what each stage holds: a storage counts once, one that is received never.

    A received tensor lies in a receive slot; results are kept as roots of the stage's backward.
    """
    from pdcompile.passes.costs.rehearse import kept_storages, newly

    kept = kept_storages(graph, b)
    ports = ports_of(graph, stage_of, num_stages)
    members: list[list[CostedOp]] = [[] for _ in range(num_stages)]
    for call, stage in zip(costed_ops(graph, b), stage_of, strict=True):
        members[stage].append(call)
    found = []
    for calls, port in zip(members, ports, strict=True):
        seen = {key for name in port.received for key in kept.of_value[name]}
        saved = [newly(kept.by_op[call.op.name], seen) for call in calls]
        results = sum(newly(kept.of_value[name], seen) for name in port.roots)
        found.append(Resident(sum(saved) + results, _backward_peak(calls, saved)))
    return tuple(found)


def _backward_peak(calls: list[CostedOp], kept: list[int]) -> int:
    """Walk the ops backwards: live gradients, plus what an op adds, minus what is released."""
    gradients: dict[str, int] = {}  # value -> bytes of its gradient while that is alive
    released = peak = 0
    for call, kept_bytes in zip(reversed(calls), reversed(kept), strict=True):
        if call.differentiated:
            for output in call.outputs:
                gradients.setdefault(output.name, int(output.bytes))
            gradients.setdefault(call.op.name, 0)
            new = {o.name: int(o.bytes) for o in call.inputs if o.requires_grad and not o.held}
            if call.is_view and len(new) == 1:
                # The gradient of a view is a view, or a zero-filled tensor of the base's size.
                (name,) = new
                taken = sum(gradients.pop(output.name) for output in call.outputs)
                gradients[name] = max(new[name], taken, gradients.get(name, 0))
                gradients.pop(call.op.name, None)
                peak = max(peak, sum(gradients.values()) - released)
                continue
            weights = sum(int(o.bytes) for o in call.inputs if o.requires_grad and o.held)
            live = sum(gradients.values()) - released
            passes_through = call.name in ("add", "sub") and not call.in_place
            added = 0 if passes_through else sum(new.values())
            peak = max(peak, live + added + weights)
            for output in call.outputs:
                gradients.pop(output.name, None)
            gradients.pop(call.op.name, None)
            for name, size in new.items():
                gradients[name] = max(gradients.get(name, 0), size)
        released += kept_bytes
    return max(peak, 0)


def _rehearsed(
    graph: OpGraph, lifetimes: Lifetimes, ops: Sequence[Op], ports: Ports, b: int
) -> Rehearsal | None:
    from pdcompile.passes.costs.rehearse import rehearse

    steps = lifetimes.steps(ops, set(ports.results))
    key = _Key(graph, b).of(steps, ports)
    if key not in _known:
        try:
            found = rehearse(graph, steps, ports, b)
        except Exception as error:  # ops are anyone's: whatever they raise, the sum remains
            _LOG.info("a stage cannot be rehearsed and is added up: %s", error)
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
