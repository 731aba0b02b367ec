"""Results of ops: every tensor in one gets a name before the model's Python sees it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch

from pdcompile.errors import TraceError
from pdcompile.ir.graph import Op, Ref
from pdcompile.passes.trace.tape.fake_tensors import FakeTensors, alias, tensors_in
from pdcompile.passes.trace.tape.naming import Names
from pdcompile.passes.trace.tape.observer import part_of, storage_key


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
        return self._items(op, op.name, result, written)

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

    def _items(self, op: Op, container: str, result: Any, written: set[int]) -> Any:
        try:
            return with_items(
                result, lambda key, item: self._item(op, container, key, item, written)
            )
        except TypeError as error:
            kind = type(result).__qualname__
            raise TraceError(f"{op.target} returns a {kind}", where=op.source) from error

    def _item(self, op: Op, container: str, key: Any, item: Any, written: set[int]) -> Any:
        if not tensors_in(item):
            return item
        path, target = op.module_path, "operator.getitem"
        part = Op(
            name=self._names.new(f"{container}_{key}"),
            kind="function",
            target=target,
            args=(Ref(container), key),
            module_path=path,
            call_index=self.call_index(path, target),
            module_call=op.module_call,
            source=op.source,
            variable=part_of(op.variable, key),
            region=op.region,
            grad_enabled=op.grad_enabled,
            autocast=op.autocast,
        )
        self.ops.append(part)
        if isinstance(item, torch.Tensor):
            return self._tensor(part.name, item, written)
        self._fakes.add_container(part.name)
        return self._items(part, part.name, item, written)


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
