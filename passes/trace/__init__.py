"""Trace: runs the model's own Python once on fake tensors, and records its operators.

The model is neither rewritten nor compiled, so that keyword arguments, dataclasses, hooks and
control flow on shapes need no special support; what cannot be recorded faithfully is refused with
the user's file and line, never approximated.  torch.fx silently loses the backward of custom
functions, no_grad and autocast regions; torch.export records ATen operators and loses the modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from pdcompile.batch import BatchLayout, FlatCall, example_call, resolve_batch
from pdcompile.errors import TraceError
from pdcompile.ir.captured_module import Origin
from pdcompile.ir.graph import Capture, OpGraph
from pdcompile.passes.trace.assumptions import Assumptions
from pdcompile.passes.trace.attempt import Attempts, recorded, settled_on
from pdcompile.passes.trace.batch_sizes import fails_as_microbatch, warn_of_one_size
from pdcompile.passes.trace.constants import demanded
from pdcompile.passes.trace.opaque.opaque_modules import hooked, warn_of
from pdcompile.passes.trace.preconditions import check_model
from pdcompile.passes.trace.refusals import ForwardRaised
from pdcompile.passes.trace.subject import CaptureCall, Subject
from pdcompile.releases.torch_internals import import_compiler
from pdcompile.warn import warn

__all__ = ["capture", "trace"]


def trace(model: nn.Module, example_inputs: Any, *, batch_dims: Any = 0) -> OpGraph:
    """Captures the model's present mode (training or not) on one minibatch, without a loss_fn.

    Args:
        model: any nn.Module that `compile` takes.
        example_inputs: a tensor, a tuple (positional) or a dict (keyword).
        batch_dims: which dimension of each input counts samples, as for `compile`; None: none
            does, and the graph is for these shapes alone.

    The graph holds for other numbers of samples too (`OpGraph.sizes`), unless a warning says
    that it is for one size alone; ``graph.to_module()`` computes it.

    Raises:
        InputError: the example inputs do not fit the model's forward or batch_dims.
        ConfigError: batch_dims is not a valid value.
        TraceError: the model cannot be captured faithfully.
    """
    flat = example_call(model, example_inputs)
    captured = capture(model, flat, resolve_batch(flat, batch_dims), None)
    return captured.train if model.training else captured.eval


def capture(
    model: nn.Module,
    flat: FlatCall,
    layout: BatchLayout,
    loss_fn: Callable[..., Any] | None,
    *,
    microbatch_size: int | None = None,
    autocast: str | None = None,
    evaluates: bool = False,
) -> Capture:
    """Captures training and evaluation, valid for every microbatch size.

    Args:
        flat: one minibatch, of any size; only shapes and dtypes of its tensors matter.
        layout: which dims follow the batch.
        loss_fn: (output, target) -> scalar; None when the model returns its loss.
        microbatch_size: the size that will run; the batch size of `flat` when None.
        autocast: the region in which model and loss_fn run, such as "cpu:bfloat16".
        evaluates: evaluation alone, which is then both graphs.

    The model, its buffers, its hooks and all random generators are left as they were.

    A submodule that cannot be captured becomes one opaque op; a warning names it and the line.

    Raises:
        TraceError: the model cannot be captured faithfully; names file and line.
    """
    check_model(model)
    import_compiler()  # not while a forward is recorded, on fake tensors
    subject = Subject(model, flat, layout, loss_fn, microbatch_size, autocast, evaluates)
    attempts = Attempts(subject)
    start = Assumptions(opaque=hooked(subject), one_size=layout.splits and subject.size == 1)
    try:
        found = settled_on(attempts, start)
    except ForwardRaised as error:
        told = _of_the_microbatch(subject, error)
        if told is error:
            raise
        raise told from error
    notes = sorted(set().union(*(one.findings.rounded for one in attempts.recordings)))
    found = _with_graphs(found, lambda one: replace(one, notes=(*one.notes, *notes)))
    warn_of(subject, attempts.assumed.opaque)
    holds_for: dict[str, str] = {}
    for recording in attempts.recordings:
        holds_for.update(recording.findings.holds_for)
    for about, text in holds_for.items():
        warn(f"{about}: {text}")
    warn_of_one_size(found)
    return attached(found, subject)


def attached(found: Capture, of: CaptureCall) -> Capture:
    """The capture with the model and the example that it is of."""
    origin = Origin(weakref.ref(of.model), loss_fn=of.loss_fn, autocast=of.autocast)
    found = _with_graphs(found, lambda graph: replace(graph, origin=origin))
    origin.train, origin.eval = found.train, found.eval
    origin.integers = demanded(found.train, of.call(of.size))
    return found


def _with_graphs(found: Capture, change: Callable[[OpGraph], OpGraph]) -> Capture:
    return replace(found, train=change(found.train), eval=change(found.eval))


def _of_the_microbatch(subject: Subject, error: ForwardRaised) -> TraceError:
    """The error to report for what forward raised; the size of a microbatch may be its cause."""
    if subject.size == subject.layout.size or not subject.layout.splits:
        return error
    call, training = subject.flat, subject.model.training
    try:
        settled_on(lambda assumed: recorded(subject, call, assumed, training), Assumptions())
    except TraceError as other:
        return other if isinstance(other, ForwardRaised) else error
    return fails_as_microbatch(subject.size, subject.flat, subject.layout, error)
