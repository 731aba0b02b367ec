"""ObservedCall: the effects of one call of an opaque module, and whether two runs agree on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pdcompile.hardware import devices
from pdcompile.ir.opaque import tensors_among
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.comparison.step_values import same
from pdcompile.passes.trace.tape.module_table import ModuleTable
from pdcompile.passes.trace.tape.observer import storage_key

CallKey = tuple[str, int]  # module path, how many earlier calls


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a call returned.

    `shares` is the first tensor in the same storage, ("input", i) or ("output", i), to which the
    offset is relative.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    shares: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """The effects of one call of an opaque module."""

    result: Any
    made: tuple[Made, ...] = ()
    form: str = ""
    buffers: tuple[str, ...] = ()  # canonical FQNs of those that it wrote
    hooks: tuple[str, ...] = ()  # forward hooks in it
    flops: int = 0
    saved_bytes: int = 0
    reason: str = ""  # why the module cannot be one op, "" if it can

    def fields_of_op(self) -> dict[str, Any]:
        """What the op that stands for the call knows of it, by field of `Op`."""
        return {
            "returns": self.form, "hooks": self.hooks, "flops": self.flops,
            "saved_bytes": self.saved_bytes,
        }  # fmt: skip


def check_repeats(
    table: ModuleTable, found: dict[CallKey, ObservedCall], again: dict[CallKey, ObservedCall]
) -> None:
    """Raises TraceError where a second run on the same numbers gave other results.

    The module then depends on a counter in a global variable, a generator of its own or a clock,
    whose values in the stages would not be those in eager.
    """
    for key, one in found.items():
        other = again.get(key)
        if one.reason or (other is not None and _equal(one.result, other.result)):
            continue
        name = f"{key[0]!r} ({table.classes[key[0]][0]})"
        raise refusals.Unrepeatable(key[0], name)


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(tensors_among(one), tensors_among(other), strict=False)
    return all(not devices.on_host(a) or same_values(a, b) for a, b in pairs)


def both(one: ObservedCall, other: ObservedCall) -> ObservedCall:
    """One call, seen in runs on different values."""
    if not one.reason and not alike(one, other):
        reason = "returns a result whose shape depends on values"
        return replace(one, result=None, reason=reason)
    return replace(
        one,
        flops=max(one.flops, other.flops),
        saved_bytes=max(one.saved_bytes, other.saved_bytes),
    )


def alike(one: ObservedCall, other: ObservedCall) -> bool:
    """Whether two calls returned tensors of the same shapes, in the same form."""
    shapes = [[(made.shape, made.dtype) for made in call.made] for call in (one, other)]
    return one.form == other.form and shapes[0] == shapes[1]


def made_by(inputs: list[Tensor], outputs: list[Tensor]) -> tuple[Made, ...]:
    """The returned tensors, with what they share with the inputs and with each other."""
    first: dict[int, tuple[str, int, int]] = {}
    for i, tensor in enumerate(inputs):
        first.setdefault(storage_key(tensor), ("input", i, int(tensor.storage_offset())))
    found = []
    for i, tensor in enumerate(outputs):
        shares = first.setdefault(storage_key(tensor), ("output", i, int(tensor.storage_offset())))
        own = shares[:2] == ("output", i)
        found.append(
            Made(
                shape=tuple(tensor.shape),
                stride=tensor.stride(),
                offset=int(tensor.storage_offset()) - (0 if own else shares[2]),
                dtype=tensor.dtype,
                requires_grad=tensor.requires_grad,
                shares=None if own else shares[:2],
            )
        )
    return tuple(found)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the last bit; true where they cannot be compared."""
    return a.layout != torch.strided or a.is_meta or same(a, b)
