"""Tensors that a call leaves cached in the attributes of modules, and their use by later calls.

A later call may use such a tensor only where it would compute the same again: a memo of a
constant (a table of positions), or, in evaluation, of the model's own tensors, as long as no
training comes between.  Any other use, asking for its shape included, is refused.  Two calls are
compared by hashes of what they compute, without names: their results have to be equal, although
only one of them runs the ops that make such a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pdcompile.eager.snapshot import tensors_at
from pdcompile.errors import TraceError
from pdcompile.ir.graph import (
    Argument,
    Attr,
    Op,
    Ref,
    TensorInfo,
    Value,
    rewritten,
    written_buffers,
)
from pdcompile.ir.value_checks import needed_ops
from pdcompile.passes.trace import refusals
from pdcompile.releases.torch_internals import FakeTensor

_DEPTH = 4  # of containers in an attribute


@dataclass(frozen=True, slots=True)
class _CachedTensor:
    """A tensor that a recording left in an attribute, at `place`.

    `computation` is equal for equal results, None where no later call may use the tensor;
    `fixed`: it depends on nothing that training changes; `trained`: training calls before it.
    """

    tensor: torch.Tensor
    place: str
    computation: int | None
    fixed: bool
    trained: int


class Computations:
    """Hashes of the computations of all values; an in-place write changes those in its storage.

    Args:
        known: computations of values that an earlier call made and kept.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        values: Mapping[str, Value],
        known: Mapping[str, int],
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        self._ops = ops
        self._values = values
        self._tensors = tensors
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

    def again(self, name: str) -> tuple[int | None, bool]:
        """(the computation of a value, None where inputs, draws or writes are part of it; whether
        it depends on nothing that training changes)."""
        found, others = needed_ops(self._ops, (name,), self._storage)
        for op in found:
            if op.opaque or op.draw is not None or op.mutates or op.buffers_written:
                return None, False
        if others:
            return None, False
        used = {fqn for op in found for fqn in op.used_tensors}
        trained = any(self._tensors[fqn].kind == "parameter" for fqn in used)
        return self._of[name], not trained and used.isdisjoint(written_buffers(self._ops))

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


class CachedTensors:
    """All tensors that recordings left in one model's attributes, by identity."""

    def __init__(self) -> None:
        self._kept: dict[int, _CachedTensor] = {}
        self.trained = 0  # training calls so far, after which memos that they change have expired
        self.change: TraceError | None = None  # the refusal of what some call changed

    def note(self, model: nn.Module, names: Mapping[int, str], made: Computations) -> None:
        """Notes the tensors that a recording left behind.

        Args:
            names: id of a tensor that the recording made -> name of the value.
        """
        for place, tensor in attribute_tensors(model, _DEPTH):
            if id(tensor) not in self._kept and isinstance(tensor, FakeTensor):
                computation, fixed = made.again(names.get(id(tensor), ""))
                kept = _CachedTensor(tensor, place, computation, fixed, self.trained)
                self._kept[id(tensor)] = kept

    def computation_of(self, tensor: torch.Tensor) -> int | None:
        """The computation of a tensor that is used; None if no call left it.

        Raises:
            TraceError: it belongs to an earlier call.
        """
        kept = self._kept.get(id(tensor))
        if kept is None:
            return None
        outdated = not kept.fixed and kept.trained < self.trained
        if kept.computation is None or outdated:
            raise refusals.error(refusals.CHANGED_STATE, kept.place, None)
        return kept.computation

    def alike(self, one: Any, other: Any) -> bool:
        """True if two tensors in an attribute are of one computation."""
        mine, theirs = self._kept.get(id(one)), self._kept.get(id(other))
        return mine is not None and theirs is not None and mine.computation == theirs.computation


def attribute_tensors(model: nn.Module, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in attributes of modules, so many containers deep, with the places where they are."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_modules"):
                for keys, tensor in tensors_at(value, depth=depth):
                    place = f"{path}.{name}" if path else name
                    yield place + "".join(f"[{key!r}]" for key in keys), tensor
