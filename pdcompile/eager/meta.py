"""Models on the meta device, which have shapes and no memory: the limits of checks and costs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pdcompile.errors import CostError
from pdcompile.ir.graph import OpGraph

if TYPE_CHECKING:
    from torch import nn

LEAST_MEASURED = 0.5  # of the seconds of a model without memory, for costs="measured"


def without_values(model: nn.Module) -> str:
    """The reason why a model cannot be run, and no number of it compared; "" where it can be."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    bare = [name for name, tensor in tensors if tensor.is_meta]
    if not bare:
        return ""
    count = "all" if len(bare) == len(tensors) else f"{len(bare)} of"
    return (
        f"{count} {len(tensors)} parameters and buffers ({bare[0]}, …) are on the meta device and "
        "have no values"
    )


def refuse_mostly_estimated(graph: OpGraph, model: nn.Module) -> None:
    """Refuses measured costs that are estimates for the most part.

    Raises CostError when ops that were too large to run alone on this machine make up more than
    half of the seconds of a model on the meta device.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    costs = {op.name: op.cost for op in graph.ops if op.cost is not None}
    seconds = {n: c.forward_seconds + c.backward_seconds for n, c in costs.items()}
    guessed = [name for name, cost in costs.items() if cost.origin == "estimated"]
    total, unknown = math.fsum(seconds.values()), math.fsum(seconds[name] for name in guessed)
    if total == 0 or unknown <= (1 - LEAST_MEASURED) * total:
        return
    worst = max(guessed, key=seconds.__getitem__)
    source = next(op.source for op in graph.ops if op.name == worst)
    raise CostError(
        f"{len(guessed)} of {len(costs)} ops, {unknown / total:.0%} of the time, are too large to "
        f"be measured on this machine; the longest is {worst!r} with about "
        f"{seconds[worst]:.3g} s",
        where=source,
        remedy='plan with costs="estimated" (--costs estimated)',
    )
