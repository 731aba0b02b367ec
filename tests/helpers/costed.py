"""Costs of a graph at one microbatch size."""

from __future__ import annotations

from typing import Any

from torch import nn

from pdcompile.ir.graph import OpGraph
from pdcompile.passes.profile import Sizes


def profile(
    graph: OpGraph, model: nn.Module | None, *, microbatch_size: int, **how: Any
) -> OpGraph:
    """The graph with costs; `how`: arguments of `Sizes`."""
    return Sizes(graph, model, (microbatch_size,), **how).at(microbatch_size)
