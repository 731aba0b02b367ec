"""Computations of a recording as hashes without names: equal hashes mean equal computations.

Two calls of a model are compared so where one uses a tensor that the other kept: their results
have to be equal, although only one of them runs the ops that make that tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdcompile.ir.graph import Argument, Attr, Op, Ref, Value, rewritten


class Computations:
    """Hashes of the computations of all values; an in-place write changes those in its storage.

    Args:
        known: computations of values that an earlier call made and kept.
    """

    def __init__(
        self, ops: Sequence[Op], values: Mapping[str, Value], known: Mapping[str, int]
    ) -> None:
        self._values = values
        self._of: dict[str, int] = dict(known)
        self._attributes: dict[str, int] = {}
        self._members: dict[int, list[str]] = {}  # storage -> values in it so far
        self.effects: list[int] = []  # draws and writes, in their order
        for name, value in values.items():
            if name not in self._of and value.producer is None:
                self._of[name] = hash(("input", name))
            if name in self._of and value.is_tensor:
                self._members.setdefault(value.storage, []).append(name)
        for op in ops:
            self._enter(op)

    def of(self, name: str) -> int:
        return self._of[name]

    def argument(self, value: Argument) -> Any:
        """The argument with computations in the place of names."""
        return rewritten(value, self._leaf)

    def _leaf(self, value: Any) -> Any:
        match value:
            case Ref(name):
                return ("value", self._of.get(name, name))
            case Attr(fqn):
                return ("attribute", fqn, self._attributes.get(fqn, 0))
        return (type(value).__name__, repr(value))

    def _enter(self, op: Op) -> None:
        read = (*op.parameters, *op.buffers_read)
        found = hash((
            op.kind, op.target, self.argument(op.args), self.argument(op.kwargs),
            op.module_path if op.kind in ("module", "opaque") or op.draw is not None else "",
            tuple((fqn, self._attributes.get(fqn, 0)) for fqn in read),
            op.draw, op.region, op.grad_enabled, op.autocast,
        ))  # fmt: skip
        self._of[op.name] = found
        if op.draw is not None or op.mutates or op.buffers_written:
            self.effects.append(found)
        for fqn in op.buffers_written:
            self._attributes[fqn] = found
        storages = {self._storage(name) for name in op.mutates} - {-1}
        for storage in storages:
            for name in self._members.get(storage, ()):
                if name != op.name:
                    self._of[name] = hash((found, self._of[name]))
        storage = self._storage(op.name)
        if storage >= 0:
            self._members.setdefault(storage, []).append(op.name)

    def _storage(self, name: str) -> int:
        value = self._values.get(name)
        return value.storage if value is not None and value.is_tensor else -1
