"""Tensors that a call leaves in the attributes of modules, and their use by later calls.

A later call may use such a tensor only where it would compute the same again: a memo of a
constant (a table of positions), or, in evaluation, of the model's own tensors, as long as no
training comes between.  Any other use, asking for its shape included, is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pdcompile.errors import TraceError
from pdcompile.ir.graph import Op, TensorInfo, Value, written_buffers
from pdcompile.ir.value_checks import needed_ops
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.calls.equivalence import Computations
from pdcompile.releases.torch_internals import FakeTensor

_DEPTH = 4  # of containers in an attribute


@dataclass(frozen=True, slots=True)
class _KeptTensor:
    """A tensor that a recording left in an attribute, at `place`.

    `computation` is equal for equal results, None where no later call may use the tensor;
    `fixed`: it depends on nothing that training changes.
    """

    tensor: torch.Tensor
    place: str
    computation: int | None
    fixed: bool


class KeptTensors:
    """All tensors that recordings left in one model's attributes, by identity."""

    def __init__(self) -> None:
        self._kept: dict[int, _KeptTensor] = {}
        self.change: TraceError | None = None  # the refusal of what some call changed

    def note(
        self,
        model: nn.Module,
        names: Mapping[int, str],
        ops: Sequence[Op],
        values: Mapping[str, Value],
        tensors: Mapping[str, TensorInfo],
        computations: Computations,
    ) -> None:
        """Notes the tensors that a recording left behind.

        Args:
            names: id of a tensor that the recording made -> name of the value.
        """
        for place, tensor in _attribute_tensors(model):
            if id(tensor) in self._kept or not isinstance(tensor, FakeTensor):
                continue
            name = names.get(id(tensor), "")
            computation, fixed = None, False
            closure = _closure(name, ops, values)
            if closure is not None:
                computation = computations.of(name)
                fixed = all(_fixed(op, ops, tensors) for op in closure)
            self._kept[id(tensor)] = _KeptTensor(tensor, place, computation, fixed)

    def expire(self, model: nn.Module) -> None:
        """Forbids, after a training call, the use of memos that an update changes."""
        for module in model.modules():
            _replace(vars(module), self._expired, _DEPTH)

    def _expired(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(id(tensor))
        if kept is None or kept.computation is None or kept.fixed:
            return tensor
        fresh = tensor.detach()
        self._kept[id(fresh)] = _KeptTensor(fresh, kept.place, None, False)
        return fresh

    def memo(self, tensor: torch.Tensor) -> int | None:
        """The computation of a tensor that is used; None if no call left it.

        Raises:
            TraceError: it belongs to an earlier call.
        """
        kept = self._kept.get(id(tensor))
        if kept is None:
            return None
        if kept.computation is None:
            raise refusals.error(refusals.CHANGED_STATE, kept.place, None)
        return kept.computation

    def alike(self, one: Any, other: Any) -> bool:
        """Whether two tensors in an attribute are of one computation."""
        mine, theirs = self._kept.get(id(one)), self._kept.get(id(other))
        return mine is not None and theirs is not None and mine.computation == theirs.computation


def is_memo(
    names: Mapping[int, str],
    ops: Sequence[Op],
    values: Mapping[str, Value],
    tensors: Mapping[str, TensorInfo],
    tensor: torch.Tensor,
) -> bool:
    """Whether a tensor of a recording depends on nothing that changes between calls."""
    closure = _closure(names.get(id(tensor), ""), ops, values)
    return closure is not None and all(_fixed(op, ops, tensors) for op in closure)


def _closure(name: str, ops: Sequence[Op], values: Mapping[str, Value]) -> list[Op] | None:
    """The ops that a value is computed by; None where inputs, draws or writes are among them."""
    found, others = needed_ops(ops, (name,), lambda n: values[n].storage if n in values else -1)
    for op in found:
        if op.opaque or op.draw is not None or op.mutates or op.buffers_written:
            return None
    return None if others else found


def _fixed(op: Op, ops: Sequence[Op], tensors: Mapping[str, TensorInfo]) -> bool:
    changing = written_buffers(ops)
    return all(tensors[fqn].kind != "parameter" and fqn not in changing for fqn in op.used_tensors)


def _attribute_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_modules"):
                for keys, tensor in tensors_within(value, _DEPTH):
                    place = f"{path}.{name}" if path else name
                    yield place + "".join(f"[{key!r}]" for key in keys), tensor


def tensors_within(
    value: Any, depth: int, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """The tensors, with keys that lead there, in containers, which may contain themselves."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth and isinstance(value, dict | list | tuple | set | deque):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_within(item, depth - 1, (*path, key))


def _replace(value: Any, new: Any, depth: int) -> Any:
    """Tensors in dicts and lists replaced in place, in tuples by other tuples."""
    if isinstance(value, torch.Tensor):
        return new(value)
    if depth and type(value) is tuple:
        items = tuple(_replace(item, new, depth - 1) for item in value)
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    if depth and type(value) in (dict, list):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            fresh = _replace(item, new, depth - 1)
            if fresh is not item:
                value[key] = fresh
    return value
