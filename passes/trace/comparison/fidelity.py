"""Compares a captured graph with its model: both run on one microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.eager.autocast import regions_of
from pdcompile.eager.randomness import preserved_rng
from pdcompile.errors import VerifyError
from pdcompile.hardware import devices
from pdcompile.ir.captured_module import Origin
from pdcompile.ir.graph import Capture, OpGraph
from pdcompile.passes.preserved_state import preserved_state
from pdcompile.passes.trace.comparison.content_watch import first_difference
from pdcompile.passes.trace.comparison.step_values import StepValues, differing
from pdcompile.passes.trace.comparison.steps import ModelFails, Step
from pdcompile.passes.trace.subject import device_of


def differs(model: nn.Module, capture: Capture, flat: FlatCall, layout: BatchLayout) -> bool:
    """True if a graph and eager differ in a microbatch, in one of both modes, with equal random
    streams: in outputs, the loss, the gradient of a parameter or a buffer.

    Compared bit for bit, on a GPU up to the rounding of sums without a fixed order.  The model and
    the generators are left as they were.
    """
    try:
        for graph in (capture.train, capture.eval):
            with step_of(model, graph, flat, layout) as step:
                if _unlike(step) is not None:
                    return True
    except VerifyError:
        return True
    return False


@contextmanager
def step_of(
    model: nn.Module, graph: OpGraph, flat: FlatCall, layout: BatchLayout
) -> Iterator[Step]:
    """A step of the graph's mode, which the model is in meanwhile; it is left as it was."""
    origin = graph.origin or Origin()
    device = device_of(model, flat)
    regions = regions_of(origin.autocast, device)
    with preserved_rng(device), preserved_state(model, graph.training), regions:
        yield Step(
            model, graph, flat, layout.size, origin.loss_fn, origin.autocast,
            outputs_backward=True,
        )  # fmt: skip


class _Unlike(NamedTuple):
    """The first difference, and the values; `recorded`: the model was run with gradients."""

    kind: str
    name: str
    captured: StepValues
    recorded: bool


def _unlike(step: Step) -> _Unlike | None:
    """Runs the model and its graph; what differs."""
    eager, failed = eager_values(step)
    captured = step.values(step.captured)
    for kind, name, _ in differing(eager, captured, exact=_exact(step)):
        return _Unlike(kind, name, captured, failed is not None)
    return None


def eager_values(step: Step) -> tuple[StepValues, ModelFails | None]:
    """Values that the model leaves behind; where it fails under no_grad, that failure and those of
    a run that autograd records, as a graph and stages record what forward differentiates."""
    try:
        return step.values(step.eager), None
    except ModelFails as failed:
        if (found := _recorded(step)) is None:
            raise
        return found, failed


def _exact(step: Step) -> bool:
    return devices.is_host(device_of(step.model, step.call))


def compare_mode(step: Step) -> None:
    """Compares one mode of the model, which is in it.

    Raises:
        VerifyError: names the first op that differs, and the user's line.
    """
    graph, unlike = step.graph, _unlike(step)
    if unlike is None:
        return
    kind, name, captured, recorded = unlike
    # Values that are equal up to rounding cannot be told by their content.
    op = first_difference(step, recorded or None) if _exact(step) else None
    op = op or next((op for op in reversed(graph.ops) if name in op.used_tensors), None)
    place = f"operator {op.name} ({op.target})" if op is not None else "no operator"
    where = op.source if op is not None else None
    named = {"loss": "the loss", "gradient": f"the gradient of {name!r}"}
    what = named.get(kind, f"{kind} {name!r}")
    again = _recorded(step)
    if again is not None and not any(differing(again, captured, exact=_exact(step))):
        raise AsksForGradients(what, place, where)
    raise VerifyError(
        f"graph and model differ in {what} in {'train' if graph.training else 'eval'} mode; first "
        f"in {place}",
        where=where,
        remedy="please report this model: capture has to refuse what it cannot reproduce",
    )


class AsksForGradients(VerifyError):
    """Forward goes another way in evaluation because autograd does not record there."""

    def __init__(self, what: str, place: str, where: str | None) -> None:
        super().__init__(
            "under torch.no_grad(), in which evaluation runs, forward computes something else than "
            "where autograd records, as it does while the model is captured: "
            f"{what} differs, first in {place}",
            where=where,
            remedy="decide in forward by self.training or by an argument, not by requires_grad or "
            "torch.is_grad_enabled()",
        )


def _recorded(step: Step) -> StepValues | None:
    """Evaluation of the model while autograd records; None in training, or where that fails."""
    if step.graph.training:
        return None
    try:
        return step.values(step.eager, gradients=True)
    except VerifyError:  # the error that is told is the first one
        return None
