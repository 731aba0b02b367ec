"""Notes on losses that are means over some of the targets, of which microbatches may have unlike
numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdcompile.errors import some
from pdcompile.ir.graph import Op, OpGraph
from pdcompile.plan import Training

_MEANS = ("cross_entropy", "nll_loss")


def uneven_means(graph: OpGraph, training: Training) -> Iterator[str]:
    """A note where a minibatch's loss may differ from the mean of its microbatches' losses, also if
    those of the example (`full_batch_notes`) do not."""
    chosen = sorted({text for op in graph.ops for text in _choices(op)})
    if chosen and training.loss_reduction == "mean" and training.num_microbatches > 1:
        yield (
            f"{some(chosen)}: the loss is a mean over the targets that count, and microbatches "
            "count by their samples: where these have unlike numbers of such targets, loss and "
            "gradients are not those of the whole minibatch; loss_reduction (--loss-reduction) "
            "takes a function that counts them"
        )


def _choices(op: Op) -> Iterator[str]:
    """Arguments that make an op a mean over some of its targets."""
    word, given = op.target.rpartition(".")[2], dict[str, Any](op.kwargs)
    if op.kind == "function" and word in _MEANS and given.get("reduction", "mean") == "mean":
        if given.get("ignore_index") is not None:
            yield f"{word} with ignore_index={given['ignore_index']}"
        if given.get("weight") is not None:
            yield f"{word} with weight="
