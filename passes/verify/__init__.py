"""Do the stages, chained, compute what the model computes?  Bit for bit.

Eager and stages run on the model's own tensors with the same random streams: outputs, the loss,
the gradient of every parameter and all buffers are compared, in training and in evaluation, on
two inputs, the second after an update.  Between stages values are cut off from autograd and
gradients handed back as the plan says, so that a wrong edge is noticed too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.graph import Capture
from pdcompile.passes.meta import unverifiable
from pdcompile.passes.verify.report import Difference, Verification
from pdcompile.passes.verify.steps import calls, is_large
from pdcompile.passes.verify.whole import Comparison, unlike
from pdcompile.plan import Plan
from pdcompile.stage import Sources

__all__ = ["Difference", "Verification", "verify"]


def verify(
    capture: Capture,
    plan: Plan,
    sources: Sources,
    model: nn.Module,
    flat: FlatCall,
    layout: BatchLayout,
    loss_fn: Callable[..., Any] | None = None,
    *,
    mode: Literal["auto", "full"] = "auto",
) -> Verification:
    """Run the model and the stages on microbatches of a minibatch and compare everything.

    Args:
        flat, layout: a minibatch; its microbatches are the inputs.
        loss_fn: the loss that was captured with the model.
        mode: "full": two steps, and the captured graph apart from the stages; "auto": the
            stages, and where one forward takes long one step only.

    Modes, parameters, gradients, buffers and random state of the model are as before afterwards.

    Raises:
        VerifyError: something differs in sources that nobody edited, or a stage raises.
        SourceError: a source cannot be loaded.
    """
    if reason := unverifiable(model):
        return Verification(0, 0, 0, 0, True, sources.edited, (), reason)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    comparison = Comparison(capture, plan, sources, model, loss_fn, layout, device)
    full = mode == "full"
    count = 2 if full or not is_large(capture.train) else 1
    steps = comparison.run(calls(flat, layout, capture.train, count), graph=full)
    first = comparison.first
    report = Verification(
        microbatch_size=capture.train.batch_size,
        outputs=sum(len(one.outputs) + (one.loss is not None) for one in first),
        gradients=sum(g is not None for one in first for g in one.gradients.values()),
        buffers=sum(len(one.buffers) for one in first),
        exact=comparison.exact,
        edited=sources.edited,
        differences=tuple(comparison.found),
        steps=steps,
        graph=full,
    )
    if comparison.found and not sources.edited:
        raise unlike(comparison.found)
    return report
