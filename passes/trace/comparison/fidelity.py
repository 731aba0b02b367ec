"""Compares a captured graph, as a module, with its model: both run on one microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.eager.autocast import regions_of
from pdcompile.eager.randomness import preserved_rng
from pdcompile.errors import VerifyError
from pdcompile.hardware import devices
from pdcompile.ir.captured_module import Origin
from pdcompile.ir.graph import Capture, OpGraph
from pdcompile.passes.preserved_state import preserved_state
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
                if _first_difference(step) is not None:
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


def eager_values(
    step: Step, run: Callable[[], Any] | None = None
) -> tuple[StepValues, ModelFails | None]:
    """Values that the model leaves behind; where it fails under no_grad, that failure and those of
    a run that autograd records, as a graph and stages record what forward differentiates.

    `run`: runs the model; None: `Step.eager`.
    """
    run = run or step.eager
    try:
        return step.values(run), None
    except ModelFails as failed:
        if (found := _recorded(step, run)) is None:
            raise
        return found, failed


def _first_difference(step: Step) -> tuple[str, str, StepValues] | None:
    """Kind and name of what differs first between the model and its graph, and the values of the
    graph; None where nothing does."""
    eager, _ = eager_values(step, step.plain)
    captured = step.values(partial(step.plain, captured=True))
    found = next(differing(eager, captured, exact=_exact(step)), None)
    return None if found is None else (*found[:2], captured)


def _exact(step: Step) -> bool:
    return devices.is_host(device_of(step.model, step.call))


def compare_mode(step: Step) -> None:
    """Compares one mode of the model, which is in it.

    Raises:
        VerifyError: names what differs, the op that makes it or uses it last, and its line.
    """
    graph, unlike = step.graph, _first_difference(step)
    if unlike is None:
        return
    kind, name, captured = unlike
    makers = (op for op in reversed(graph.ops) if name in (op.name, *op.used_tensors))
    op = next(makers, None)
    place, where = (f" (op {op.name})", op.source) if op is not None else ("", None)
    named = {"loss": "the loss", "gradient": f"the gradient of {name!r}"}
    what = named.get(kind, f"{kind} {name!r}") + place
    again = _recorded(step, step.plain)
    if again is not None and not any(differing(again, captured, exact=_exact(step))):
        raise AsksForGradients(what, where)
    raise VerifyError(
        f"graph and model differ in {what} in {'train' if graph.training else 'eval'} mode",
        where=where,
        remedy="please report this model: capture has to refuse what it cannot reproduce",
    )


class AsksForGradients(VerifyError):
    """Forward goes another way in evaluation because autograd does not record there."""

    def __init__(self, what: str, where: str | None) -> None:
        super().__init__(
            "under torch.no_grad(), in which evaluation runs, forward computes something else than "
            "where autograd records, as it does while the model is captured: "
            f"{what} differs",
            where=where,
            remedy="decide in forward by self.training or by an argument, not by requires_grad or "
            "torch.is_grad_enabled()",
        )


def _recorded(step: Step, run: Callable[[], Any]) -> StepValues | None:
    """Evaluation of the model while autograd records; None in training, or where that fails."""
    if step.graph.training:
        return None
    try:
        return step.values(run, gradients=True)
    except VerifyError:  # the error that is told is the first one
        return None
