"""Ops that the capture needs and the model does not make: checks, and numbers of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pdcompile.ir.graph import CHECK, Ref

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.tape import Tape


def check(tape: Tape, tensor: torch.Tensor, message: str, *, holds: bool = True) -> None:
    """An op that raises where the value of a tensor is not `holds`."""
    require(tape, tensor if holds else tape.call(torch.logical_not, (tensor,)), message)


def require(tape: Tape, condition: torch.Tensor | Ref, message: str) -> None:
    """An op that raises where a value is false."""
    tape.begin()
    tape.record("function", CHECK, "check", (condition, message), {}, None, None)


def number(tape: Tape, kind: str, target: str, args: tuple[Any, ...], base: str = "") -> Ref:
    """An op whose result is a Python number or bool, or a tuple of them."""
    tape.begin()
    tape.record(kind, target, base or target.rpartition(".")[2], args, {}, None, None)
    return Ref(tape.ops[-1].name)


def decision(tape: Tape, tensor: torch.Tensor) -> tuple[str, str, int]:
    """(an op that reads a value as a Python bool, the running module, which call of it)."""
    if tensor.dtype is not torch.bool:
        tensor = tape.call(torch.ne, (tensor, 0))
    return number(tape, "method", "item", (tensor,), "decided").name, *tape.stack[-1]
