"""Compares the chained stages with the model: what they compute bit for bit, or op by op.

Eager and stages run on the model's own tensors with the same random streams: outputs, the loss,
the gradient of every parameter and all buffers are compared, in training and in evaluation, on
two inputs, the second after an update.  Between stages values are detached and gradients handed
back as the plan says, so that a wrong edge is noticed too.  The source of every stage is besides
compared with the capture op by op, which takes no memory: of models without memory, or too large
for this machine, that is all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.eager.autocast import on_gpu, regions_of
from pdcompile.eager.meta import without_values
from pdcompile.eager.stage_compiler import Backend
from pdcompile.errors import VerifyError
from pdcompile.hardware import devices
from pdcompile.ir.graph import Capture
from pdcompile.ir.stage_interface import Sources
from pdcompile.passes.trace.comparison.steps import ModelFails, of_casts
from pdcompile.passes.trace.subject import device_of
from pdcompile.passes.verify.comparison import Comparison, difference_error
from pdcompile.passes.verify.full_batch import Reduction, full_batch_notes
from pdcompile.passes.verify.retrace import retraced
from pdcompile.passes.verify.step_runs import is_large, step_inputs, too_large
from pdcompile.passes.verify.verification import Compared, Difference, Verification
from pdcompile.plan import Plan
from pdcompile.warn import warn

__all__ = ["Compared", "Difference", "Verification", "verify"]


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
    loss_reduction: Reduction | None = None,
    backend: Backend | None = None,
) -> Verification:
    """Runs the model and the stages and compares the results, where they fit into half of the free
    memory; and compares the source of each stage with the capture, op by op.

    Args:
        flat, layout: a minibatch; its microbatches are the inputs.
        loss_fn: the loss that was captured with the model.
        mode: "full": two steps, and gradients of the minibatch against those of its
            microbatches; "auto": where one forward takes long one step only.
        loss_reduction: as given to compile; None: as the plan says.
        backend: of torch.compile, by which stages that are not in parts run.

    Modes, parameters, gradients, buffers and random state of the model are as before afterwards.

    Raises:
        VerifyError: something differs in sources that nobody edited, or a stage raises.
        SourceError: a source cannot be loaded.
    """
    if reason := without_values(model) or too_large(model, capture.train):
        return _ops_alone(capture, plan, sources, mode, reason)
    region, device = plan.training.autocast or "", device_of(model, flat)
    region = region if on_gpu(region) and devices.is_host(device) else ""
    home = next((tensor.device for tensor in model.parameters()), devices.HOST)
    comparison = Comparison(capture, plan, sources, model, loss_fn, layout, home, backend)
    try:
        with regions_of(region, device):
            found = _compared(comparison, flat, mode, loss_reduction)
        # An edit may compute the same by other ops.
        count = 0 if sources.edited else _ops_beside(capture, plan, sources)
        return replace(found, casts_of=region, ops=count)
    except VerifyError as error:
        if not region:
            raise
        told = of_casts(error, region)
        if isinstance(error, ModelFails):
            return _ops_alone(capture, plan, sources, mode, told.message)
        raise told from error


def _ops_beside(capture: Capture, plan: Plan, sources: Sources) -> int:
    """The number of ops that were compared in stages whose numbers are the model's; warns where one
    differs all the same."""
    try:
        count, found = retraced(capture, plan, sources)
        said = f"{found[0]}; first at {found[0].first}" if found else ""
    except VerifyError as error:
        count, said = 0, error.message
    if said:
        warn(f"all numbers are equal, and yet {said}: please report this model")
    return count


def _ops_alone(
    capture: Capture, plan: Plan, sources: Sources, mode: Literal["auto", "full"], reason: str
) -> Verification:
    """The comparison of ops; `reason`: why there is none of numbers.

    Raises:
        VerifyError: they differ in sources that nobody edited, or a stage raises.
    """
    count, found = retraced(capture, plan, sources)
    if found and not sources.edited:
        raise difference_error(found, [one.first for one in found], capture.train)
    notes = capture.train.notes if mode == "full" else ()
    return Verification(
        capture.train.batch_size, (), True, sources.edited, tuple(found), reason, count,
        notes=notes, places=tuple(dict.fromkeys(one.first for one in found)),
    )  # fmt: skip


def _compared(
    comparison: Comparison,
    flat: FlatCall,
    mode: Literal["auto", "full"],
    loss_reduction: Reduction | None,
) -> Verification:
    graph, layout = comparison.capture.train, comparison.layout
    full, large = mode == "full", is_large(graph)
    report = comparison.run(step_inputs(flat, layout, graph, 2 if full or not large else 1))
    if report.differences and not report.edited:
        raise difference_error(report.differences, report.places, graph, report.compiled)
    if report.differences or (large and not full):
        return replace(report, notes=graph.notes)
    reduction = loss_reduction or comparison.plan.training.loss_reduction
    known, hints = full_batch_notes(
        comparison.model, graph, flat, layout, comparison.loss_fn, reduction,
        most=2 if large else None,
    )  # fmt: skip
    if not full:
        known = ()  # a plan has its own notes; here only what may be a mistake
        for hint in hints:
            warn(hint)
    return replace(report, notes=(*known, *hints))
