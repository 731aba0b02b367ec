"""Compares what the chained stages compute with what the model computes, bit for bit.

Eager and stages run on the model's own tensors with the same random streams: outputs, the loss,
the gradient of every parameter and all buffers are compared, in training and in evaluation, on
two inputs, the second after an update.  Between stages values are detached and gradients handed
back as the plan says, so that a wrong edge is noticed too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.eager.autocast import on_gpu, regions_of
from pdcompile.eager.meta import unverifiable
from pdcompile.errors import VerifyError
from pdcompile.hardware import devices
from pdcompile.ir.graph import Capture
from pdcompile.ir.stage_interface import Sources
from pdcompile.passes.trace.comparison.steps import ModelFails
from pdcompile.passes.trace.subject import device_of
from pdcompile.passes.verify.comparison import Comparison, difference_error
from pdcompile.passes.verify.distinct_blocks import verify_blocks
from pdcompile.passes.verify.full_batch import Reduction, full_batch_notes
from pdcompile.passes.verify.step_runs import fits, is_large, memory_budget, step_inputs
from pdcompile.passes.verify.verification import Compared, Difference, Verification
from pdcompile.plan import Plan
from pdcompile.warn import warn

__all__ = ["Compared", "Difference", "Verification", "not_compared", "verify"]


def verify(
    capture: Capture,
    plan: Plan,
    sources: Sources,
    model: nn.Module,
    flat: FlatCall,
    layout: BatchLayout,
    loss_fn: Callable[..., Any] | None = None,
    *,
    mode: Literal["auto", "full", "blocks", "off"] = "auto",
    loss_reduction: Reduction | None = None,
) -> Verification:
    """Runs the model and the stages on microbatches of a minibatch and compares the results.

    Args:
        flat, layout: a minibatch; its microbatches are the inputs.
        loss_fn: the loss that was captured with the model.
        mode: "full": two steps, the captured graph apart from the stages, and gradients of the
            minibatch against those of its microbatches; "auto": the stages, and where one forward
            takes long one step only; "blocks": each distinct block apart.  What does not fit into
            half of the free memory is compared block by block, and with "full" also a model on
            the meta device, of which "auto" compares nothing.
        loss_reduction: as given to compile; None: as the plan says.

    Modes, parameters, gradients, buffers and random state of the model are as before afterwards.

    Raises:
        VerifyError: something differs in sources that nobody edited, or a stage raises.
        SourceError: a source cannot be loaded.
    """
    region, device = plan.training.autocast or "", device_of(model, flat)
    region = region if on_gpu(region) and devices.is_host(device) else ""
    home = next((tensor.device for tensor in model.parameters()), devices.HOST)
    comparison = Comparison(capture, plan, sources, model, loss_fn, layout, home)
    try:
        with regions_of(region, device):
            return replace(_compared(comparison, flat, mode, loss_reduction), casts_of=region)
    except ModelFails as error:
        if not region:
            raise
        reason = f"on the CPU, with the casts of {region}, {error.message}"
        return not_compared(reason, sources.edited)
    except VerifyError as error:
        if not (region and capture.of_device):
            raise
        message, remedy, where = capture.of_device
        raise VerifyError(message.format(error.message), where=where, remedy=remedy) from error


def _compared(
    comparison: Comparison,
    flat: FlatCall,
    mode: Literal["auto", "full", "blocks", "off"],
    loss_reduction: Reduction | None,
) -> Verification:
    capture, sources, model = comparison.capture, comparison.sources, comparison.model
    plan, layout, loss_fn = comparison.plan, comparison.layout, comparison.loss_fn
    meta = unverifiable(model)
    if meta and mode == "auto":
        return not_compared(meta, sources.edited)
    if meta or mode == "blocks" or not fits(model, capture.train):
        budget = memory_budget()
        report = verify_blocks(capture, plan, sources, model, flat, layout, loss_fn, budget=budget)
        if report.differences and not sources.edited:
            raise difference_error(report.differences, capture.train)
        return replace(report, notes=capture.train.notes if mode != "auto" else ())
    full, large = mode == "full", is_large(capture.train)
    count = 2 if full or not large else 1
    steps = comparison.run(step_inputs(flat, layout, capture.train, count), graph=full)
    report = comparison.report(steps, graph=full)
    if comparison.found and not sources.edited:
        raise difference_error(comparison.found, capture.train)
    if comparison.found or (large and not full):
        return replace(report, notes=capture.train.notes)
    reduction = loss_reduction or plan.training.loss_reduction
    known, hints = full_batch_notes(
        model, capture.train, flat, layout, loss_fn, reduction, most=None if not large else 2
    )
    if not full:
        known = ()  # a plan has its own notes; here only what may be a mistake
        for hint in hints:
            warn(hint)
    return replace(report, notes=(*known, *hints))


def not_compared(reason: str, edited: tuple[str, ...] = ()) -> Verification:
    """The report on a model that cannot be compared, for the reason that `unverifiable` names."""
    return Verification(0, 0, 0, 0, True, edited, (), reason)
