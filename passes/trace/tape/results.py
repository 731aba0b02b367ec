"""Results of ops: every tensor in one gets a name, and what an op writes is found by its memory."""

from __future__ import annotations

import builtins
import copy
import keyword
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from pdcompile.errors import TraceError
from pdcompile.ir.graph import Argument, Op, Ref, walk
from pdcompile.ir.opaque import tensors_among
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.fake_tensors import FakeTensors, alias
from pdcompile.passes.trace.tape.observer import part_of, storage_key

_TAKEN = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins)} | {
    "self", "torch", "nn", "F", "operator", "math", "draw", "loss",
}  # fmt: skip


class Names:
    """Makes unique identifiers."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._used: set[str] = set()

    def new(self, text: str) -> str:
        """An unused identifier that reads like `text`."""
        base = re.sub(r"[^0-9a-zA-Z]+", "_", text).strip("_") or "value"
        if base[0].isdigit():
            base = f"_{base}"
        name = base
        while name in _TAKEN or name in self._used:
            self._next[base] = self._next.get(base, 0) + 1
            name = f"{base}_{self._next[base]}"
        self._used.add(name)
        return name


class Results:
    """The ops of one recording; enters their results into `fakes`."""

    def __init__(self, fakes: FakeTensors, names: Names) -> None:
        self.ops: list[Op] = []
        self._fakes = fakes
        self._names = names
        self._calls: dict[tuple[str, str], Iterator[int]] = defaultdict(count)

    def call_index(self, path: str, target: str) -> int:
        """The number of earlier ops with this module path and target."""
        return next(self._calls[path, target])

    def deliver(self, op: Op, result: Any, written: set[int]) -> Any:
        """Enters the result under the op's name; returns the result for the model's Python."""
        if isinstance(result, torch.Tensor):
            return self._tensor(op.name, result, written)
        self._fakes.add_container(op.name)
        try:
            return with_items(result, lambda key, item: self._item(op, key, item, written))
        except TypeError as error:
            kind = type(result).__qualname__
            raise TraceError(f"{op.target} returns a {kind}", where=op.source) from error

    def _tensor(self, name: str, result: torch.Tensor, written: set[int]) -> torch.Tensor:
        real = self._fakes.real_of(result)
        changed = storage_key(result) in written
        if real is not None and changed:
            # `self.count += 1` must return the same tensor object that the module holds.
            self._fakes.add(name, alias(result))
            return real
        if self._fakes.known(result) and not changed:
            # In eval mode dropout(x) returns x, but has to be this op's value, as in train mode.
            result = alias(result)
        self._fakes.add(name, result)
        return result

    def _item(self, op: Op, key: Any, item: Any, written: set[int]) -> Any:
        if not tensors_among(item):
            return item
        name, target = self._names.new(f"{op.name}_{key}"), "operator.getitem"
        index = self.call_index(op.module_path, target)
        part = beside(op, name, "function", target, (Ref(op.name), key), call_index=index)
        part = replace(part, variable=part_of(op.variable, key))
        self.ops.append(part)
        return self.deliver(part, item, written)


def beside(
    op: Op, name: str, kind: Any, target: str, args: tuple[Any, ...], *, call_index: int = 0
) -> Op:
    """An op at the line and under the modes of another one."""
    return Op(
        name=name, kind=kind, target=target, args=args, module_path=op.module_path,
        call_index=call_index, module_call=op.module_call, source=op.source, region=op.region,
        grad_enabled=op.grad_enabled, autocast=op.autocast,
    )  # fmt: skip


def with_items(result: Any, change: Callable[[Any, Any], Any]) -> Any:
    """A dict, tuple or list of the same class with other items, by (key, item); else the value."""
    if isinstance(result, dict):
        found = copy.copy(result)  # with what the class adds to a dict
        for key, item in result.items():
            found[key] = change(key, item)
        return found
    if not isinstance(result, tuple | list):
        return result
    items = [change(i, item) for i, item in enumerate(result)]
    return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)


def written_tensors(fakes: FakeTensors, written: set[int], source: str) -> tuple[str, ...]:
    """Canonical FQNs of the buffers in written storages.

    Raises:
        TraceError: a parameter is written, or a buffer that shares its memory with another one.
    """
    fqns = fakes.model_tensors_at(written)
    for fqn in fqns:
        info = fakes.table.tensors[fqn]
        if info.kind != "buffer":
            raise refusals.error(refusals.WRITTEN[info.kind], fqn, source)
        other = fakes.table.shares_memory(fqn)
        if other is not None:
            raise refusals.error(refusals.SHARED_BUFFER, f"{fqn} (shared with {other})", source)
    fakes.findings.written.update(fqns)
    return tuple(fqns)


def mutated(fakes: FakeTensors, written: set[int], arguments: Argument) -> tuple[str, ...]:
    """Values in written storages: those among the arguments, else the newest of each storage."""
    names = dict.fromkeys(ref.name for ref in walk(arguments, Ref))
    found = [name for name in names if fakes.storage_of(name) in written]
    covered = {fakes.storage_of(name) for name in found}
    found += fakes.values_at(written - covered)
    return tuple(found)
