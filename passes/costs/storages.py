"""Who pays for what autograd keeps: every storage once, over the whole graph.

An activation that two ops save, or a view and its base, is one piece of memory.  Numbers of
isolated ops, added up, exceed the truth by up to one half where activations work in place, so
the capture's storage keys decide: a storage belongs to the first op that saves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdcompile.passes.costs.call import Call, Index, Operand
from pdcompile.passes.costs.saved import Saved

Key = tuple[str, int | str]


@dataclass
class Storages:
    """Size of every storage of the graph, and which of them are never counted."""

    index: Index
    sizes: dict[Key, int] = field(default_factory=dict)
    free: set[Key] = field(default_factory=set)  # graph inputs, parameters and their views

    @staticmethod
    def of(calls: Sequence[Call]) -> Storages:
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


def newly_saved(calls: Sequence[Call], kept: Sequence[Saved]) -> list[int]:
    """For each op the bytes that it saves and no earlier op has saved."""
    if not calls:
        return []
    storages = Storages.of(calls)
    seen: set[Key] = set()
    return [storages.new(one.operands, seen) + int(one.extra_bytes) for one in kept]


def _reads_values(call: Call) -> bool:
    return bool(call.op.inputs)
