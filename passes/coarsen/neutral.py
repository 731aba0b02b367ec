"""Neutral ops: views and constants, moved to a neighbour where no plan gets worse.

The rule for a group v that costs nothing (views: no load, no parameters, nothing saved, no place
in an order of summation), where bytes are compared for activations and for gradients alike:

- to its consumer: one group w reads all that v makes, nobody else reads what v reads, and v
  reads no more values and bytes than it makes.  Take any plan and move v from its stage k to
  w's stage k' ≥ k.  The producers send the same bytes to k' instead of k; one on k sends at
  most what v's results were; k receives less, k' at most what it received from k.
- to its producer: one group p makes all that v reads, nobody else reads it, one group reads
  what v makes, and v makes no more values and bytes than it reads.  The mirror image.

So every stage's load, traffic and memory stay equal or fall, and some optimum keeps v with its
neighbour.  Constants (aranges, masks, slices of a buffer that nobody writes: nothing of the call
enters them) are not free of load, a few microseconds each; where one group reads them they run
on its stage, which `moved_seconds` bounds.

Views of parameters that nothing else reads (the transposed weights of experts) go to their reader
too, with the parameter: apart from it they would be sent to it for every microbatch.  No load or
transfer grows; what the parameter takes moves along, so that under a memory limit this is a rule
like that of spans: no plan is looked at that keeps weights elsewhere and sends them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdcompile.eager.summation import summation_order
from pdcompile.ir.graph import OpGraph, Ref, Value, walk, written_buffers
from pdcompile.passes.coarsen.spans import Groups
from pdcompile.passes.costs.costed_op import CostedOp, GraphIndex

VIEW = "views moved to the op that reads or makes their bytes"
CONSTANT = "constants moved to the op that reads them"
WEIGHT = "views of parameters moved, with these, to the op that reads them"


@dataclass
class Neutral:
    """Values in and out of groups, kept up while groups are joined."""

    graph: OpGraph
    groups: Groups
    b: int
    marks: dict[int, frozenset[int]]  # constraints that each op is subject to
    position: dict[str, int] = field(default_factory=dict)
    made: dict[int, set[str]] = field(default_factory=dict)
    read: dict[int, set[str]] = field(default_factory=dict)
    outputs: set[str] = field(default_factory=set)
    weightless: set[int] = field(default_factory=set)  # groups of views only
    constant: set[int] = field(default_factory=set)
    weights: set[int] = field(default_factory=set)  # groups of views, some of a parameter
    moved: set[int] = field(default_factory=set)  # positions of ops

    def run(self) -> None:
        """Join neutral groups with a neighbour until none is left that may be joined."""
        self._prepare()
        waiting = deque(sorted(self.weightless | self.constant | self.weights))
        while waiting:
            group = self.groups.find(waiting.popleft())
            neighbour = self._neighbour(group)
            if neighbour is None or self._marks(group) != self._marks(neighbour):
                continue
            joined = self._join(group, neighbour)
            waiting.append(joined)
            waiting.extend(self._around(joined))

    @property
    def moved_seconds(self) -> float:
        """Forward and backward of all that was moved: what it can cost a stage at most."""
        costs = [cost for i in sorted(self.moved) if (cost := self.graph.ops[i].cost) is not None]
        return sum(cost.forward_seconds + cost.backward_seconds for cost in costs)

    def _prepare(self) -> None:
        graph, index = self.graph, GraphIndex.of(self.graph, self.b)
        self.position = {op.name: i for i, op in enumerate(graph.ops)}
        self.outputs = {ref.name for ref in walk(graph.output, Ref)}
        members = self.groups.members()
        fixed = {given.name for given in graph.inputs}  # values that are not constant
        parameters = {fqn for fqn, info in graph.tensors.items() if info.kind == "parameter"}
        written = parameters | written_buffers(graph.ops)
        summed = {name for pair in summation_order(graph) for name in pair[:2]}
        holders = Counter(fqn for op in graph.ops for fqn in op.used_tensors)
        views, weights, constants = ([False] * len(graph.ops) for _ in range(3))
        for i, op in enumerate(graph.ops):
            call = CostedOp(op, index)
            held = op.used_tensors
            free = op.cost is not None and not op.cost.forward_seconds + op.cost.backward_seconds
            view = not op.mutates and (call.is_view or free)
            if (op.cost is not None and op.cost.saved_bytes) or op.name in summed:
                view = False
            views[i] = view and not held
            weights[i] = view and parameters.issuperset(held) and all(holders[f] == 1 for f in held)
            constants[i] = not (op.mutates or call.requires_grad or op.draw is not None)
            constants[i] &= fixed.isdisjoint(op.inputs) and written.isdisjoint(held)
            if not constants[i]:
                fixed.add(op.name)
        for group, ops in members.items():
            self.made[group] = {graph.ops[i].name for i in ops if i < len(graph.ops)}
            self.read[group] = {
                name for i in ops if i < len(graph.ops) for name in graph.ops[i].inputs
            }
            if ops[-1] < len(graph.ops):
                if all(views[i] for i in ops):
                    self.weightless.add(group)
                elif all(weights[i] for i in ops):
                    self.weights.add(group)
                if all(constants[i] for i in ops):
                    self.constant.add(group)

    def _neighbour(self, group: int) -> int | None:
        makes = [v for v in self._values(self.made[group]) if self._leaves(v, group)]
        reads = [v for v in self._values(self.read[group]) if self._source(v) not in (None, group)]
        reader = self._only_reader(makes, group)
        if not reads and (group in self.constant or group in self.weights):
            return reader
        if group not in self.weightless or not reads or not self._reads_alone(reads, group):
            return None
        made, read = self._transfer(makes), self._transfer(reads)
        if reader is not None and all(r <= m for r, m in zip(read, made, strict=True)):
            return reader
        sources = {self._source(value) for value in reads}
        if len(sources) != 1 or (makes and reader is None):
            return None
        return sources.pop() if all(m <= r for r, m in zip(read, made, strict=True)) else None

    def _join(self, group: int, neighbour: int) -> int:
        self.moved |= {self.position[name] for name in self.made[group]}
        both, views = {group, neighbour}, self.weightless | self.weights
        weightless, constants = both <= self.weightless, both <= self.constant
        weights = both <= views and not weightless
        kind = VIEW if group in self.weightless else CONSTANT
        self.groups.join((group, neighbour), WEIGHT if group in self.weights else kind)
        joined = self.groups.find(group)
        other = neighbour if joined == group else group
        for table in (self.made, self.read):
            small, large = sorted((table.pop(joined), table.pop(other)), key=len)
            large |= small
            table[joined] = large
        for groups, still in (
            (self.weightless, weightless), (self.constant, constants), (self.weights, weights),
        ):  # fmt: skip
            groups -= both
            if still:
                groups.add(joined)
        return joined

    def _around(self, group: int) -> Iterable[int]:
        for value in self._values(self.read[group]):
            source = self._source(value)
            if source is not None:
                yield source
        for value in self._values(self.made[group]):
            for name in value.consumers[:8]:
                yield self.groups.find(self.position[name])

    def _marks(self, group: int) -> frozenset[int]:
        # Groups that constraints do not tell apart may be joined; members share their marks.
        return self.marks.get(group, frozenset())

    def _values(self, names: Iterable[str]) -> list[Value]:
        return [self.graph.values[name] for name in names]

    def _source(self, value: Value) -> int | None:
        return None if value.producer is None else self.groups.find(self.position[value.producer])

    def _leaves(self, value: Value, group: int) -> bool:
        return any(reader != group for reader in self._readers(value))

    def _readers(self, value: Value) -> Iterable[int]:
        for name in value.consumers:
            yield self.groups.find(self.position[name])
        if value.name in self.outputs:
            yield self.groups.find(len(self.graph.ops))

    def _only_reader(self, makes: list[Value], group: int) -> int | None:
        found: int | None = None
        for value in makes:
            for reader in self._readers(value):
                if reader == group:
                    continue
                if found is not None and reader != found:
                    return None
                found = reader
        return found

    def _reads_alone(self, reads: list[Value], group: int) -> bool:
        for value in reads:
            source = self._source(value)
            if any(reader not in (group, source) for reader in self._readers(value)):
                return False
        return True

    def _transfer(self, values: list[Value]) -> tuple[int, int, int, int]:
        """Messages and bytes of a microbatch, forward and backward."""
        back = [value.bytes(self.b) for value in values if value.needs_gradient]
        return len(values), sum(value.bytes(self.b) for value in values), len(back), sum(back)
