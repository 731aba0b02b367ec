"""What one microbatch keeps on a stage, and the transient peak of its backward.

By rules alone, fast enough for a search; `forecast` knows what a chosen plan holds to the byte.
The planner adds up items, which overcounts at cuts: a tensor that is received lies in a receive
slot, and is not saved a second time.  Once the stages are known their bytes are counted exactly:
the union, by storage, of what the stage's ops save, without what it receives, with the results
that it has to keep as roots of its backward.

Every storage counts once, over the whole graph: an activation that two ops save, or a view and
its base, is one piece of memory.  Numbers of isolated ops, added up, exceed the truth by up to
one half where activations work in place, so the capture's storage keys decide: a storage belongs
to the first op that saves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdcompile.ir.graph import OpGraph, Ref, walk
from pdcompile.passes.costs.costed_op import CostedOp, GraphIndex, Operand, costed_ops
from pdcompile.passes.costs.saved import Saved, has_rule, saved


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
    """Adds up what each stage holds by rules, given the stage of each op of the graph."""
    calls = costed_ops(graph, b)
    if not calls:
        return (Resident(0, 0),) * num_stages
    storages = Storages.of(calls)
    index = storages.index
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
    members: list[list[CostedOp]] = [[] for _ in range(num_stages)]
    for i, call in enumerate(calls):
        members[stage_of[i]].append(call)
    return tuple(_resident(members[s], storages, received[s], roots[s]) for s in range(num_stages))


def _resident(
    calls: list[CostedOp], storages: Storages, received: set[Key], roots: list[str]
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


Key = tuple[str, int | str]


@dataclass
class Storages:
    """Size of every storage of the graph, and which of them are never counted."""

    index: GraphIndex
    sizes: dict[Key, int] = field(default_factory=dict)
    free: set[Key] = field(default_factory=set)  # graph inputs, parameters and their views

    @staticmethod
    def of(calls: Sequence[CostedOp]) -> Storages:
        index = calls[0].index
        found = Storages(index)
        for given in index.graph.inputs:
            operand = index.value(index.graph.values[given.name])
            found.free.add(key_of(operand))
        for call in calls:
            # The base of a storage is the first value that has it: views come later.
            for output in call.outputs:
                key = key_of(output)
                if key not in found.sizes:
                    found.sizes[key] = int(output.bytes)
                    if call.is_view and not _reads_values(call):
                        found.free.add(key)
        return found

    def new(self, kept: Iterable[Operand], seen: set[Key]) -> int:
        """Bytes of the storages among `kept` that are not in `seen`, which grows by them."""
        total = 0
        for operand in kept:
            key = key_of(operand)
            if operand.held or key in self.free or key in seen:
                continue
            seen.add(key)
            total += self.sizes.get(key, int(operand.bytes))
        return total


def key_of(operand: Operand) -> Key:
    """The storage of an operand; a value with an unknown storage (−1) is one of its own."""
    return ("value", operand.name) if operand.storage < 0 else ("storage", operand.storage)


def newly_saved(calls: Sequence[CostedOp], kept: Sequence[Saved]) -> list[int]:
    """The bytes that each op saves and no earlier op has saved."""
    if not calls:
        return []
    storages = Storages.of(calls)
    seen: set[Key] = set()
    return [storages.new(one.operands, seen) + int(one.extra_bytes) for one in kept]


def _reads_values(call: CostedOp) -> bool:
    return bool(call.op.inputs)
