"""Records ops that the capture adds to the model: checks, and Python numbers for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pdcompile.ir.graph import CHECK, Ref

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.tape import Tape


def check(tape: Tape, tensor: torch.Tensor, message: str, *, holds: bool = True) -> None:
    """Records an op that raises where the value of a tensor is not `holds`."""
    require(tape, tensor if holds else tape.call(torch.logical_not, (tensor,)), message)


def require(tape: Tape, condition: torch.Tensor | Ref, message: str) -> None:
    """Records an op that raises where a value is false."""
    tape.begin()
    tape.record("function", CHECK, "check", (condition, message), {}, None, None)


def number(tape: Tape, kind: str, target: str, args: tuple[Any, ...], base: str = "") -> Ref:
    """Records an op whose result is a Python number or bool, or a tuple of them."""
    tape.begin()
    tape.record(kind, target, base or target.rpartition(".")[2], args, {}, None, None)
    return Ref(tape.ops[-1].name)


def decision(tape: Tape, tensor: torch.Tensor) -> tuple[str, str, int]:
    """Records a read as a Python bool: (the op, the running module, the number of its call)."""
    if tensor.dtype is not torch.bool:
        tensor = tape.call(torch.ne, (tensor, 0))
    return number(tape, "method", "item", (tensor,), "decided").name, *tape.stack[-1]
