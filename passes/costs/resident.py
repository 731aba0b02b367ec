"""What one microbatch keeps on a stage, and the transient peak of its backward.

By rules alone, fast enough for a search; `forecast` knows what a chosen plan holds to the byte.
The planner adds up items, which overcounts at cuts: a tensor that is received lies in a receive
slot, and is not saved a second time.  Once the stages are known their bytes are counted exactly:
the union, by storage, of what the stage's ops save, without what it receives, with the results
that it has to keep as roots of its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdcompile.ir.graph import OpGraph, Ref, walk
from pdcompile.passes.costs.call import Call, Index
from pdcompile.passes.costs.saved import has_rule, saved
from pdcompile.passes.costs.storages import Key, Storages, key_of


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


def residents(
    graph: OpGraph, stage_of: Sequence[int], num_stages: int, b: int
) -> tuple[Resident, ...]:
    """For every stage, given the stage of each op of the graph."""
    index = Index.of(graph, b)
    calls = [Call(op, index) for op in graph.ops]
    if not calls:
        return (Resident(0, 0),) * num_stages
    storages = Storages.of(calls)
    position = {op.name: i for i, op in enumerate(graph.ops)}
    received: list[set[Key]] = [set() for _ in range(num_stages)]
    roots: list[list[str]] = [[] for _ in range(num_stages)]
    returned = {ref.name for ref in walk(graph.output, Ref)}
    for i, op in enumerate(graph.ops):
        value = graph.values[op.name]
        targets = {stage_of[position[name]] for name in value.consumers}
        if op.name in returned:
            targets.add(num_stages - 1)
        targets.discard(stage_of[i])
        for operand in index.leaves(op.name):
            for target in targets:
                received[target].add(key_of(operand))
        if targets and value.needs_gradient:
            roots[stage_of[i]].append(op.name)
    members: list[list[Call]] = [[] for _ in range(num_stages)]
    for i, call in enumerate(calls):
        members[stage_of[i]].append(call)
    return tuple(_resident(members[s], storages, received[s], roots[s]) for s in range(num_stages))


def _resident(
    calls: list[Call], storages: Storages, received: set[Key], roots: list[str]
) -> Resident:
    seen = set(received)
    kept = []
    for call in calls:
        cost = call.op.cost
        if has_rule(call) or cost is None:
            rule = saved(call)
            kept.append(storages.new(rule.operands, seen) + int(rule.extra_bytes))
        else:
            kept.append(cost.saved_bytes)
    leaves = [leaf for root in roots for leaf in storages.index.leaves(root)]
    results = storages.new(leaves, seen)
    return Resident(sum(kept) + results, _backward_peak(calls, kept))


def _backward_peak(calls: list[Call], kept: list[int]) -> int:
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
