"""What one call of an opaque module did, and whether two runs agree on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pdcompile.ir.opaque import tensors_among
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.module_table import ModuleTable
from pdcompile.passes.trace.tape.observer import storage_key

CallKey = tuple[str, int]  # module path, how many earlier calls


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a call returned.  `shares`: the first tensor in the same storage, as
    ("input", i) or ("output", i); the offset is relative to it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    shares: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One call.  `reason`: why the module cannot be one op, "" if it can."""

    result: Any
    made: tuple[Made, ...] = ()
    form: str = ""
    buffers: tuple[str, ...] = ()  # canonical FQNs of those that it wrote
    flops: int = 0
    saved_bytes: int = 0
    reason: str = ""


def check_repeats(
    table: ModuleTable, found: dict[CallKey, Outcome], again: dict[CallKey, Outcome]
) -> None:
    """Raise TraceError where a second run on the same numbers gave other results.

    A counter in a global variable, a generator of its own, a clock: eager would go on counting
    where the stages do, but not in the same calls.
    """
    for key, one in found.items():
        other = again.get(key)
        if one.reason or (other is not None and _equal(one.result, other.result)):
            continue
        name = f"{key[0]!r} ({table.classes[key[0]][0]})"
        raise refusals.Unrepeatable(key[0], name)


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(tensors_among(one), tensors_among(other), strict=False)
    return all(a.device.type != "cpu" or same_values(a, b) for a, b in pairs)


_VARIES = "a result whose shape depends on values"


def both(one: Outcome, other: Outcome) -> Outcome:
    if not one.reason and not alike(one, other):
        return replace(one, result=None, reason=f"returns {_VARIES}")
    return replace(
        one,
        flops=max(one.flops, other.flops),
        saved_bytes=max(one.saved_bytes, other.saved_bytes),
    )


def alike(one: Outcome, other: Outcome) -> bool:
    shapes = [[(made.shape, made.dtype) for made in outcome.made] for outcome in (one, other)]
    return one.form == other.form and shapes[0] == shapes[1]


def made_by(inputs: list[Tensor], outputs: list[Tensor]) -> tuple[Made, ...]:
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
    if a.layout != torch.strided or a.is_meta:
        return True
    return bool(torch.equal(a, b)) or bool(torch.all((a == b) | ((a != a) & (b != b))))
