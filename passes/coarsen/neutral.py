"""Neutral ops: views and constants, moved to the op that reads them where no plan gets worse.

The rule for views (no load, no parameters, nothing saved, no place in an order of summation): one
group w reads all that v makes, nobody else reads what v reads, and v reads no more values and bytes
than it makes, for activations and gradients alike.  Take any plan and move v from its stage k to
w's stage k' ≥ k.  The producers send the same bytes to k' instead of k; one on k sends at most what
v's results were; k receives less, k' at most what it received from k.  So every stage's load,
traffic and memory stay equal or fall, and some optimum keeps v with its reader.

Constants (aranges, masks, slices of a buffer that nobody writes: nothing of the call enters them)
are not free of load, a few microseconds each; where one group reads them they run on its stage.
Views of parameters that nothing else reads (the transposed weights of experts), and what gathers
them where parts hold slices, go to their reader too, with the parameter: apart from it they would
be sent to it for every microbatch.  These are rules like those of spans: no plan is looked at that
keeps constants or weights elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from pdcompile.eager.summation import summation_order
from pdcompile.ir.graph import OpGraph, Ref, Value, walk, written_buffers
from pdcompile.ir.records import CONVERSIONS
from pdcompile.passes.coarsen.spans import Groups
from pdcompile.passes.costs.costed_op import CostedOp, GraphIndex

VIEW = "views moved to the op that reads their bytes"
CONSTANT = "constants moved to the op that reads them"
WEIGHT = "views and shares of parameters moved, with these, to the op that reads them"


def join_neutral(
    graph: OpGraph, groups: Groups, b: int, marks: Mapping[int, frozenset[int]]
) -> float:
    """Join neutral ops with the group that reads them; seconds of all of these, forward and
    backward, which is what moving them can cost a stage at most.

    `marks`: the constraints that each group is subject to; groups of unlike ones stay apart.
    """
    position = {op.name: i for i, op in enumerate(graph.ops)}
    outputs = {ref.name for ref in walk(graph.output, Ref)}
    reasons, moved = dict(_neutral(graph, b)), 0.0

    def readers(value: Value) -> set[int]:
        found = {groups.find(position[name]) for name in value.consumers}
        return found | ({groups.find(len(graph.ops))} if value.name in outputs else set())

    def makers(values: Iterable[Value]) -> set[int]:
        return {groups.find(position[one.producer]) for one in values if one.producer is not None}

    for own in reversed([*groups.members().values()]):
        kinds, group = {reasons.get(i) for i in own}, groups.find(own[0])
        if None in kinds:
            continue
        ops = [graph.ops[i] for i in own]
        made = [graph.values[op.name] for op in ops]
        made = [value for value in made if readers(value) - {group}]
        found = set[int]().union(*map(readers, made)) - {group}
        read = [graph.values[name] for name in {name for op in ops for name in op.inputs}]
        read = [value for value in read if value.producer is None or makers([value]) != {group}]
        if len(found) != 1:
            continue
        if VIEW in kinds:
            near = makers(read) | {group}
            more = zip(_transfer(read, b), _transfer(made, b), strict=True)
            if any(readers(value) - near for value in read) or any(r > m for r, m in more):
                continue
        (reader,) = found
        if marks.get(group) == marks.get(reader):
            groups.join((own[0], reader), min(filter(None, kinds)))
            costs = [op.cost for op in ops if op.cost is not None]
            moved += sum(cost.forward_seconds + cost.backward_seconds for cost in costs)
    return moved


def _neutral(graph: OpGraph, b: int) -> Iterator[tuple[int, str]]:
    """Positions of neutral ops, and why they are."""
    index, fixed = GraphIndex.of(graph, b), {given.name for given in graph.inputs}  # not constant
    parameters = {fqn for fqn, info in graph.tensors.items() if info.kind == "parameter"}
    written = parameters | written_buffers(graph.ops)
    summed = {name for pair in summation_order(graph) for name in pair[:2]}
    holders = Counter(fqn for op in graph.ops for fqn in op.used_tensors)
    for i, op in enumerate(graph.ops):
        call, held, cost = CostedOp(op, index), op.used_tensors, op.cost
        free = cost is not None and not cost.forward_seconds + cost.backward_seconds
        view = not op.mutates and (call.is_view or free) and op.name not in summed
        view = view and not (cost is not None and cost.saved_bytes)
        constant = not (op.mutates or call.requires_grad or op.draw is not None)
        constant = constant and fixed.isdisjoint(op.inputs) and written.isdisjoint(held)
        if not constant:
            fixed.add(op.name)
        if constant:
            yield i, CONSTANT
        elif view and not held:
            yield i, VIEW
        elif op.inputs or not parameters.issuperset(held):
            continue
        elif op.target in CONVERSIONS or (view and all(holders[fqn] == 1 for fqn in held)):
            yield i, WEIGHT


def _transfer(values: list[Value], b: int) -> tuple[int, int, int, int]:
    """Messages and bytes of a microbatch, forward and backward."""
    back = [value.bytes(b) for value in values if value.needs_gradient]
    return len(values), sum(value.bytes(b) for value in values), len(back), sum(back)
