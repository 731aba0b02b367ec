"""Regions that change what ops do: no_grad and autocast, as the model opened them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from pdcompile.errors import SourceError
from pdcompile.ir.graph import Op, TorchLiteral
from pdcompile.ir.targets import from_literal
from pdcompile.passes.codegen.expressions import quote
from pdcompile.passes.codegen.text import Line
from pdcompile.passes.codegen.tree import Item, ops_of


@dataclass(frozen=True, slots=True)
class Region:
    grad_enabled: bool = True
    autocast: str | None = None
    enables_grad: bool = False


def region_of(item: Item) -> Region:
    """The region that all ops below share; the plain one when they differ."""
    if isinstance(item, Op):
        return Region(item.grad_enabled, item.autocast, item.enables_grad)
    found = {region_of(op) for op in ops_of(item)}
    return found.pop() if len(found) == 1 else Region()


def with_line(region: Region) -> Line:
    """The ``with`` statement that opens a region."""
    contexts = [] if region.grad_enabled else ["torch.no_grad()"]
    if region.enables_grad:
        contexts = ["torch.enable_grad()"]
    if region.autocast is not None:
        contexts.append(_autocast(region.autocast))
    return Line(f"with {', '.join(contexts)}:")


def _autocast(text: str) -> str:
    device, _, dtype = text.partition(":")
    if not re.fullmatch(r"[a-z]+", device):
        raise SourceError(f"{text!r} is no autocast region", remedy="cpu:bfloat16")
    if dtype in ("", "off", "disabled", "none"):
        return f"torch.autocast({quote(device)}, enabled=False)"
    from_literal(TorchLiteral("dtype", dtype), torch.device("cpu"))  # raises if there is none
    return f"torch.autocast({quote(device)}, dtype=torch.{dtype})"
