"""Profile: fills in the cost of every op, estimated from shapes, measured, or from a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pdcompile.errors import ConfigError
from pdcompile.graph import OpGraph
from pdcompile.passes.costs import estimate

if TYPE_CHECKING:
    from torch import nn

# progress(done, total, what): called before each distinct op is measured, and once at the end.
Progress = Callable[[int, int, str], None]


def profile(
    graph: OpGraph,
    model: nn.Module | None,
    *,
    microbatch_size: int,
    costs: Any = "measured",
    progress: Progress | None = None,
) -> OpGraph:
    """The same graph with `op.cost` filled in, in seconds and bytes of one microbatch.

    Args:
        model: needed to measure modules that are kept whole; never run as a whole, never changed.
        costs: ``"estimated"``: from shapes alone, nothing is executed.

    Raises:
        ConfigError: `costs` is something else.
    """
    if costs == "estimated":
        estimated = estimate(graph, microbatch_size=microbatch_size)
        return replace(
            graph,
            ops=tuple(replace(op, cost=c) for op, c in zip(graph.ops, estimated, strict=True)),
        )
    raise ConfigError(f"costs={costs!r} is not known", remedy="costs='estimated'")
