"""Results of ops: every tensor in one gets a name, and what an op writes is found by its memory.

The model's output becomes data, with the loss in it.
"""

from __future__ import annotations

import builtins
import copy
import keyword
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch

from pdcompile.batch.step_result import own_loss
from pdcompile.batch.structure import Instance, Part, Tree, flatten_output, unknown_in
from pdcompile.errors import TraceError
from pdcompile.ir.graph import Argument, DictOf, ListOf, Op, Ref
from pdcompile.ir.opaque import tensors_among
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.fake_tensors import FakeTensors
from pdcompile.passes.trace.tape.observer import part_of, storage_key

_TAKEN = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins)} | {
    "self", "torch", "nn", "F", "operator", "math", "draw", "loss",
}  # fmt: skip


class Results:
    """The ops of one recording; enters their results into `fakes`, under names of their own."""

    def __init__(self, fakes: FakeTensors) -> None:
        self.ops: list[Op] = []
        self._fakes = fakes
        self._calls: dict[tuple[str, str], Iterator[int]] = defaultdict(count)
        self._next: dict[str, int] = {}
        self._used: set[str] = set()

    def new_name(self, text: str) -> str:
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

    def call_index(self, path: str, target: str) -> int:
        """The number of earlier ops with this module path and target."""
        return next(self._calls[path, target])

    def deliver(self, op: Op, result: Any, written: set[int]) -> Any:
        """Enters the result under the op's name; returns the result for the model's Python."""
        if isinstance(result, torch.Tensor):
            return self._tensor(op.name, result, written)
        self._fakes.add(op.name, None)
        try:
            return with_items(result, lambda key, item: self._item(op, key, item, written))
        except TypeError as error:
            kind = type(result).__qualname__
            raise TraceError(f"{op.target} returns a {kind}", where=op.source) from error

    def _tensor(self, name: str, result: torch.Tensor, written: set[int]) -> torch.Tensor:
        changed = storage_key(result) in written
        # `self.count += 1` must return the same tensor object that the module holds.
        real = self._fakes.real_of.get(id(result)) if changed else None
        # In eval mode dropout(x) returns x, but has to be this op's value, as in train mode.
        if real is not None or (self._fakes.known(result) and not changed):
            result = torch.ops.aten.alias.default(result)
        self._fakes.add(name, result)
        return result if real is None else real

    def _item(self, op: Op, key: Any, item: Any, written: set[int]) -> Any:
        if not tensors_among(item):
            return item
        name, target = self.new_name(f"{op.name}_{key}"), "operator.getitem"
        index = self.call_index(op.module_path, target)
        part = Op(
            name=name, kind="function", target=target, args=(Ref(op.name), key),
            module_path=op.module_path, call_index=index, module_call=op.module_call,
            source=op.source, variable=part_of(op.variable, key), region=op.region,
            grad_enabled=op.grad_enabled, autocast=op.autocast,
        )  # fmt: skip
        self.ops.append(part)
        return self.deliver(part, item, written)


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


def structure(output: Any, leaf: Callable[[Any], Argument]) -> tuple[Argument, Tree]:
    """(Argument with the leaves in order, structure to rebuild it) of a model's output.

    A container other than a tuple or list becomes a dict: of its attributes or keys where they
    are known, else ``"0"``, ``"1"``, …

    Raises:
        TraceError: an object in it may hide tensors.
    """
    try:
        leaves, tree = flatten_output(output)
    except (RecursionError, ValueError) as error:
        raise TraceError(
            f"the model's output cannot be taken apart: {error}",
            where="the model's output",
            remedy="return tensors in plain containers",
        ) from error
    hidden = unknown_in(tree)
    if hidden is not None:
        kind = f"{type(hidden).__module__}.{type(hidden).__qualname__}"
        raise TraceError(
            f"the model returns an object of class {kind}, in which tensors may be hidden",
            where="the model's output",
            remedy="return tensors, numbers and objects that hold them as attributes",
        )
    return _build(tree, iter([leaf(item) for item in leaves])), tree


def _build(tree: Tree, leaves: Iterator[Argument]) -> Argument:
    parts = iter(tree.parts)

    def build(spec: Any) -> Argument:
        if spec.is_leaf():
            part = next(parts)
            return next(leaves) if part is None else _build_part(part, leaves)
        items = tuple(build(child) for child in spec.children())
        if spec.type is list:
            return ListOf(items)
        if spec.type is tuple:
            return items
        keys: Any = spec.context
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            keys = getattr(keys, "_fields", ())
        keys = keys if len(keys) == len(items) else range(len(items))
        return DictOf(tuple(zip((str(key) for key in keys), items, strict=True)))

    return build(tree.spec)


def _build_part(part: Part, leaves: Iterator[Argument]) -> Argument:
    if not isinstance(part, Instance):
        return ()  # it has no leaves
    content: Any = _build(part.content, leaves)
    held, attributes, slots = content.items
    items = enumerate(held.items if isinstance(held, ListOf) else dict(held.items).values())
    return DictOf(tuple((str(k), x) for k, x in (*items, *attributes.items, *slots.items)))


def find_loss(
    output: Any, loss: Any, name: Callable[[torch.Tensor], Argument], *, given: bool
) -> str | None:
    """The value to differentiate: the result of loss_fn, else the loss in the output.

    Raises:
        TraceError: loss_fn did not return a scalar tensor.
    """
    if given:
        if not isinstance(loss, torch.Tensor) or loss.dim():
            what, remedy = _no_scalar(loss)
            raise TraceError(
                f"loss_fn returned {what} instead of a scalar tensor",
                where="loss_fn",
                remedy=remedy,
            )
    else:
        loss = own_loss(output)
        if loss is None or loss.dim():
            return None
    found = name(loss)
    if not isinstance(found, Ref):
        raise TraceError(
            "the loss is a tensor of the model itself",
            where="loss_fn",
            remedy="compute it from the output and the target",
        )
    return found.name


def _no_scalar(loss: Any) -> tuple[str, str]:
    """(description of what loss_fn returned, remedy)."""
    if isinstance(loss, torch.Tensor):
        return f"a tensor of shape {tuple(loss.shape)}", "reduce it: loss.mean() or loss.sum()"
    if isinstance(loss, int | float):
        return "a Python number", refusals.LOSS_AS_TENSOR
    if loss is None:
        return "None", "let it return the loss"
    return f"a {type(loss).__name__}", "return the loss alone; let the model return other results"
