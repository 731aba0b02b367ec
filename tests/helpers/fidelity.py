"""Comparing a captured graph with its model, which tests ask for whatever verification does."""

from __future__ import annotations

from torch import nn

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.ir.graph import Capture
from pdcompile.passes.trace.comparison.fidelity import compare_mode, step_of


def compare(model: nn.Module, capture: Capture, flat: FlatCall, layout: BatchLayout) -> None:
    """Runs eager and graph on the microbatch `flat`, in both modes, with equal random streams.

    Compared bit for bit, on a GPU up to the rounding of sums without a fixed order: outputs, the
    loss, the gradient of every parameter (train) and all buffers.  The model and the generators are
    left as they were.

    Raises:
        VerifyError: names the first op that differs, and the user's line.
    """
    for graph in (capture.train, capture.eval):
        with step_of(model, graph, flat, layout) as step:
            compare_mode(step)
