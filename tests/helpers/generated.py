"""Captured models and their generated sources, for the tests of code generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pdcompile.batch import BatchLayout, FlatCall, example_call, resolve_batch
from pdcompile.ir.graph import Capture
from pdcompile.ir.stage_interface import Sources
from pdcompile.passes.codegen import generate
from pdcompile.passes.verify import Verification, verify
from tests.helpers.captures import capture_once
from tests.helpers.cuts import cut


def captured(
    model: nn.Module, inputs: Any, target: Any = None, loss_fn: Any = None, batch_size: int = 2
) -> tuple[FlatCall, BatchLayout, Capture]:
    """A capture at microbatch size `batch_size`, and what it was captured with."""
    flat = example_call(model, inputs, target)
    layout = resolve_batch(flat)
    return flat, layout, capture_once(model, flat, layout, loss_fn, microbatch_size=batch_size)


def check(
    model: nn.Module,
    inputs: Any,
    positions: Sequence[int],
    target: Any = None,
    loss_fn: Any = None,
) -> tuple[Sources, Verification]:
    """Capture, cut, generate, and compare with eager (raises VerifyError when unequal)."""
    flat, layout, found = captured(model, inputs, target, loss_fn)
    plan = cut(found, positions)
    sources = generate(found, plan)
    return sources, verify(found, plan, sources, model, flat, layout, loss_fn)


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()
