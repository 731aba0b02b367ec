"""Items: groups of ops with their summed costs, their traffic and the parameters they share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from pdcompile.eager.summation import summation_order
from pdcompile.errors import InfeasibleError
from pdcompile.ir.graph import Op, OpCost, OpGraph, Ref, TensorInfo, walk
from pdcompile.passes.coarsen.spans import Groups, arcs_between
from pdcompile.passes.partition.lattice import by_priority, neighbours
from pdcompile.problem import OUTPUT_WISH, Item, SharedParameter, Traffic, Wish


@dataclass
class Assembly:
    """Groups in topological order; `item_of` maps op positions (and the output's) to items."""

    graph: OpGraph
    b: int
    groups: list[list[int]]  # ascending positions, the output's member is len(graph.ops)
    item_of: list[int]

    @staticmethod
    def of(graph: OpGraph, groups: Groups, b: int) -> Assembly:
        """Kahn's algorithm; of ready groups that one whose last op comes first in the graph.

        The last op, not the first: a group whose ops are spread keeps its place at the end of its
        span, and a chain of single ops keeps the order of the graph.
        """
        size, members = len(graph.ops) + 1, groups.members()
        last = [members.get(root, [0])[-1] for root in range(size)]
        ready = by_priority(*neighbours(size, arcs_between(graph, groups)), last)
        assert len(ready) == size, "groups form a cycle"
        ordered = [members[root] for root in ready if root in members]
        item_of = [0] * size
        for item, own in enumerate(ordered):
            for i in own:
                item_of[i] = item
        return Assembly(graph, b, ordered, item_of)

    @property
    def output_item(self) -> int:
        return self.item_of[len(self.graph.ops)]

    def output_wish(self, given: Iterable[Wish], last: int) -> Wish:
        """The pin of the output's item to the last stage; refused if it is wanted elsewhere."""
        pins = dict(pin for wish in given for pin in wish.pins)
        if pins.get(self.output_item, last) != last:
            names = [op.name for op in self._ops(self.output_item)]
            raise InfeasibleError(
                f"{names} make the loss or the model's output and run on the last stage, {last}, "
                f"but are pinned to stage {pins[self.output_item]}",
                remedy="remove that pin",
            )
        return Wish(OUTPUT_WISH, pins=((self.output_item, last),))

    def items(self) -> tuple[Item, ...]:
        names = self._names()
        held, found = defaultdict[int, list[TensorInfo]](list), []
        for info, items in self._holders:
            if len(items) == 1:
                held[min(items)].append(info)
        for item in range(len(self.groups)):
            ops = self._ops(item)
            costs = [op.cost or OpCost() for op in ops]
            own = held[item]
            found.append(
                Item(
                    name=names[item],
                    ops=tuple(op.name for op in ops),
                    forward_seconds=sum(cost.forward_seconds for cost in costs),
                    backward_seconds=sum(cost.backward_seconds for cost in costs),
                    parameter_bytes=sum(info.bytes for info in own),
                    trainable_bytes=sum(info.bytes for info in own if _trainable(info)),
                    saved_bytes=sum(cost.saved_bytes for cost in costs),
                    workspace_bytes=max((cost.workspace_bytes for cost in costs), default=0),
                    trained_sizes=tuple(info.bytes for info in own if _trainable(info)),
                )
            )
        return tuple(found)

    def traffic(self) -> tuple[Traffic, ...]:
        """Values with consumers in other items; the output's item consumes the output."""
        graph = self.graph
        position = self._position
        returned = {ref.name for ref in walk(graph.output, Ref)}
        found = []
        for op in graph.ops:
            value = graph.values[op.name]
            producer = self.item_of[position[op.name]]
            consumers = {self.item_of[position[name]] for name in value.consumers}
            if op.name in returned:
                consumers.add(self.output_item)
            consumers.discard(producer)
            if consumers:
                size = value.bytes(self.b)
                back = size if value.needs_gradient else 0
                found.append(Traffic(op.name, producer, tuple(sorted(consumers)), size, back))
        return tuple(found)

    def order(self) -> tuple[tuple[int, int], ...]:
        """Items whose stages may not fall, so that gradients are summed as eager sums them."""
        pairs = {
            (self.item_of[self._position[first]], self.item_of[self._position[second]])
            for first, second, _ in summation_order(self.graph)
        }
        return tuple(sorted(pair for pair in pairs if pair[0] != pair[1]))

    def shared(self) -> tuple[SharedParameter, ...]:
        """Tensors that several items hold; buffers and constants among them, never trained."""
        return tuple(
            SharedParameter(info.fqn, info.bytes, _trainable(info), tuple(sorted(items)))
            for info, items in self._holders
            if len(items) > 1
        )

    @cached_property
    def _position(self) -> dict[str, int]:
        return {op.name: i for i, op in enumerate(self.graph.ops)}

    @cached_property
    def _holders(self) -> list[tuple[TensorInfo, set[int]]]:
        items: dict[str, set[int]] = {}
        for i, op in enumerate(self.graph.ops):
            for fqn in op.used_tensors:
                items.setdefault(fqn, set()).add(self.item_of[i])
        return [(info, items[fqn]) for fqn, info in self.graph.tensors.items() if fqn in items]

    def _ops(self, item: int) -> list[Op]:
        return [self.graph.ops[i] for i in self.groups[item] if i < len(self.graph.ops)]

    def _names(self) -> list[str]:
        """The module path of the costliest op, with the op where the path is not enough."""
        every = map(self._ops, range(len(self.groups)))
        chosen = [max(ops, key=op_seconds, default=None) for ops in every]
        paths = Counter(op.module_path for op in chosen if op is not None)
        names: list[str] = []
        taken: set[str] = set()
        for op in chosen:
            if op is None:
                name = "output"
            elif op.module_path and paths[op.module_path] == 1:
                name = op.module_path
            else:
                name = f"{op.module_path}:{op.name}" if op.module_path else op.name
            while name in taken:
                name += "'"
            taken.add(name)
            names.append(name)
        return names


def _trainable(info: TensorInfo) -> bool:
    return info.kind == "parameter" and info.requires_grad


def op_seconds(op: Op) -> float:
    """Forward and backward of one op, by its cost."""
    return op.cost.forward_seconds + op.cost.backward_seconds if op.cost else 0.0
