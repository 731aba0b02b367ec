"""Trace: run the model's own Python once on fake tensors, and write down what it computes.

Nothing of the model is rewritten or compiled, so that keyword arguments, dataclasses, hooks and
control flow on shapes cost nothing; what cannot be written down faithfully is refused with the
user's file and line, never approximated.  Neither torch.fx (silently loses the backward of
custom functions, no_grad and autocast regions) nor torch.export (ATen level; loses the modules)
gives ops that read like the model and behave like it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pdcompile.batch import (
    BatchLayout,
    FlatCall,
    check_example,
    example_call,
    resize,
    resolve_batch,
)
from pdcompile.errors import TraceError, VerifyError
from pdcompile.ir.graph import Capture, OpGraph
from pdcompile.ir.graph_module import Origin
from pdcompile.passes.trace.as_eager import GENERAL_PATH
from pdcompile.passes.trace.assemble import as_evaluation, assemble
from pdcompile.passes.trace.attributes import watched_attributes
from pdcompile.passes.trace.call_order import Kind, check_order
from pdcompile.passes.trace.examples import demanded
from pdcompile.passes.trace.fidelity import compare
from pdcompile.passes.trace.modules import ModuleTable
from pdcompile.passes.trace.preconditions import check_model
from pdcompile.passes.trace.reads import Reads, Undecided
from pdcompile.passes.trace.refuse import ForwardRaised
from pdcompile.passes.trace.sentinel import OutsideDraw
from pdcompile.passes.trace.session import Recording, record
from pdcompile.passes.trace.size_range import (
    alone,
    fails_as_microbatch,
    fails_at,
    few_sizes,
    size_range,
    warn_of_one_size,
)
from pdcompile.passes.trace.sizes import Fit, OtherBySize, probe_sizes
from pdcompile.passes.trace.training_flag import watched_flag
from pdcompile.passes.trace.whole import Whole
from pdcompile.warn import warn

__all__ = ["capture", "trace"]

MANY_OPS = 2_000  # above, a recording takes seconds, and three have to do


def trace(model: nn.Module, example_inputs: Any, *, batch_dims: Any = "auto") -> OpGraph:
    """Capture the model's present mode (training or not) on one minibatch, without a loss_fn.

    Args:
        model: any nn.Module that `compile` takes.
        example_inputs: a tensor, a tuple (positional) or a dict (keyword).
        batch_dims: which dimension of each input counts samples, as for `compile`; None: none
            does, and the graph is of these shapes alone.  "auto": dimension 0; where the inputs
            differ in it, none, with a warning.

    The graph is right for other numbers of samples too (`OpGraph.sizes`), unless a warning says
    that it is of one size alone; ``graph.to_module()`` computes it.

    Raises:
        InputError: the example inputs do not fit the model's forward, or not batch_dims.
        ConfigError: batch_dims has no meaning.
        TraceError: the model cannot be captured faithfully.
    """
    check_example(example_inputs)
    flat = example_call(model, example_inputs)
    captured = capture(model, flat, _layout(flat, batch_dims), None)
    return captured.train if model.training else captured.eval


def _layout(flat: FlatCall, batch_dims: Any) -> BatchLayout:
    if batch_dims != "auto":
        return resolve_batch(flat, batch_dims)
    sizes = {
        path: leaf.shape[0]
        for path, leaf in flat.leaves.items()
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] != 1
    }
    if len(set(sizes.values())) <= 1:
        return resolve_batch(flat, 0)
    found = ", ".join(f"{path} {size}" for path, size in sizes.items())
    warn(
        f"the inputs differ in dimension 0 ({found}), so the graph is for inputs of these shapes "
        "alone; batch_dims= says which dimension of each counts samples"
    )
    return resolve_batch(flat, None)


def capture(
    model: nn.Module,
    flat: FlatCall,
    layout: BatchLayout,
    loss_fn: Callable[..., Any] | None,
    *,
    microbatch_size: int | None = None,
    autocast: str | None = None,
) -> Capture:
    """Capture training and evaluation, valid for every microbatch size.

    Args:
        flat: one minibatch, of any size; only shapes and dtypes of its tensors matter.
        layout: which dims follow the batch.
        loss_fn: (output, target) -> scalar; None when the model returns its loss.
        microbatch_size: the size that will run; the batch size of `flat` when None.
        autocast: the region in which model and loss_fn run, such as "cpu:bfloat16".

    The model, its buffers, its hooks and all random generators are left as they were.

    A submodule whose inside cannot be captured becomes one op, kept whole, with a warning that
    names it and the line.

    Raises:
        TraceError: the model cannot be captured faithfully; names file and line.
    """
    check_model(model)
    size = layout.size if microbatch_size is None else microbatch_size
    table = ModuleTable(model)
    table.autocast = autocast
    table.reads = Reads(flat, layout)
    origin = Origin(weakref.ref(model), loss_fn=loss_fn, autocast=autocast)

    def once() -> tuple[Capture, Whole]:
        return _capture(model, table, flat, layout, loss_fn, size, origin)

    try:
        found, whole = once()
    except ForwardRaised as error:
        told = _of_the_microbatch(model, table, flat, layout, loss_fn, size, error)
        if told is error:
            raise
        raise told from error
    if table.eager_paths.asked_of_inputs:
        found, whole = _where_paths_differ(model, table, flat, layout, once, found, whole)
    whole.warn()
    table.reads.warn()
    warn_of_one_size(found)
    origin.train, origin.eval = found.train, found.eval
    origin.integers = demanded(found.train, resize(flat, layout, size) if layout.splits else flat)
    return found


def _where_paths_differ(
    model: nn.Module,
    table: ModuleTable,
    flat: FlatCall,
    layout: BatchLayout,
    once: Callable[[], tuple[Capture, Whole]],
    found: Capture,
    whole: Whole,
) -> tuple[Capture, Whole]:
    """The capture on the path that eager takes, or where that cannot be, a note on the general."""
    if not _differs(model, found, flat, layout):
        return _noted(found), whole
    reads, table.reads = table.reads, Reads(flat, layout)
    table.eager_paths.always = True
    short = None
    with suppress(TraceError):
        short = once()
    smaller = short is not None and set(short[1].paths) <= set(whole.paths)
    if short is not None and smaller and not _differs(model, short[0], flat, layout):
        return short
    table.reads = reads
    return _noted(found), whole


def _of_the_microbatch(
    model: nn.Module,
    table: ModuleTable,
    flat: FlatCall,
    layout: BatchLayout,
    loss_fn: Callable[..., Any] | None,
    size: int,
    error: ForwardRaised,
) -> TraceError:
    """What forward raised on a microbatch of `size`, and whether it is the size that it means."""
    if size == layout.size or not layout.splits:
        return error
    try:
        _record(model, table, flat, layout, loss_fn, model.training, ())
    except TraceError as other:
        return other if isinstance(other, ForwardRaised) else error
    return fails_as_microbatch(size, layout.size, error)


def _noted(found: Capture) -> Capture:
    train, evaluation = (
        replace(graph, notes=(*graph.notes, GENERAL_PATH)) for graph in (found.train, found.eval)
    )
    return replace(found, train=train, eval=evaluation)


def _differs(model: nn.Module, found: Capture, flat: FlatCall, layout: BatchLayout) -> bool:
    """Whether one sample tells graph and eager apart."""
    call, single = flat, layout
    if layout.splits:
        size = 1 if found.train.sizes.holds(1) else found.train.batch_size
        call, single = resize(flat, layout, size), replace(layout, size=size)
    try:
        compare(model, found, call, single)
    except VerifyError:
        return not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return False


def _capture(
    model: nn.Module,
    table: ModuleTable,
    flat: FlatCall,
    layout: BatchLayout,
    loss_fn: Callable[..., Any] | None,
    size: int,
    origin: Origin,
) -> tuple[Capture, Whole]:
    """Both modes, and what had to be kept whole for that."""
    whole = Whole(model, table)
    one_size = layout.splits and size == 1

    def graph_of(training: bool) -> OpGraph:
        return _capture_mode(
            model,
            table,
            flat,
            layout,
            loss_fn,
            size,
            training=training,
            whole=whole,
            one_size=one_size,
        )

    def from_here(kind: Kind) -> Recording:
        call = resize(flat, layout, kind[1]) if layout.splits else flat
        paths = tuple(whole.paths)
        return record(
            model, table, call, layout, loss_fn, training=kind[0], whole=paths, settle=False
        )

    while True:
        try:
            with watched_attributes(model, loss_fn) as reads:
                with watched_flag(model, reads) as asked:
                    train = graph_of(True)
                    same = not (asked() or whole.paths or table.transformed)
                found = Capture(train, as_evaluation(train) if same else graph_of(False))
            check_order(model, _kinds(found, flat, layout, size), from_here, table.leftovers)
            break
        except TraceError as error:
            if isinstance(error, OtherBySize) and layout.splits and not one_size:
                one_size = not whole.spares(error)
                if one_size:
                    continue
            whole.enlarge(error)
    train, evaluation = (replace(graph, origin=origin) for graph in (found.train, found.eval))
    numbers = tuple(sorted(table.taken_as_constant))
    return Capture(train, evaluation, reads.places, numbers), whole


def _kinds(found: Capture, flat: FlatCall, layout: BatchLayout, size: int) -> list[Kind]:
    """The calls that may follow one another: both modes, the usual size and another one."""
    sizes = [size]
    many = len(found.train.ops) > MANY_OPS
    if layout.splits and found.train.sizes.largest != found.train.sizes.smallest and not many:
        tensors = {path: t for path, t in flat.leaves.items() if isinstance(t, torch.Tensor)}
        dims = [layout.dims.get(path) for path in tensors]
        sizes = [size, *(s for s in probe_sizes(size, list(tensors.values()), dims) if s != size)]
    modes = [graph.training for graph in (found.train, found.eval)]
    return [(training, s) for training in modes for s in sizes[:2]]


def _capture_mode(
    model: nn.Module,
    table: ModuleTable,
    flat: FlatCall,
    layout: BatchLayout,
    loss_fn: Callable[..., Any] | None,
    microbatch_size: int,
    *,
    training: bool,
    whole: Whole,
    one_size: bool,
) -> OpGraph:
    """A graph for many batch sizes; with `one_size` for this one if need be."""
    tensors = {path: t for path, t in flat.leaves.items() if isinstance(t, torch.Tensor)}
    dims = [layout.dims.get(path) for path in tensors]
    sizes: tuple[int, ...] = (microbatch_size,) * 2  # twice: a call must not change the next
    if any(dim is not None for dim in dims):
        sizes = probe_sizes(microbatch_size, list(tensors.values()), dims)

    def recorded(size: int) -> Recording:
        call = resize(flat, layout, size)
        try:
            return _record(model, table, call, layout, loss_fn, training, tuple(whole.paths))
        except ForwardRaised as error:
            if size == microbatch_size:
                raise
            raise fails_at(size, error) from error

    def fitted(sizes: tuple[int, ...], recordings: list[Recording]) -> OpGraph:
        graph = assemble(model, recordings, sizes, training=training)
        if layout.splits:
            graph = replace(graph, sizes=size_range(recorded, recordings, sizes))
        return graph

    first = recorded(sizes[0])
    attempts = [sizes]
    if layout.splits and len(first.ops) > MANY_OPS:
        # Where these do not fit, the usual ones may, or may say better what is wrong.
        attempts = [few_sizes(microbatch_size), *([] if one_size else [sizes])]
    for tried in attempts:
        try:
            second = recorded(tried[1])
            Fit(tried[:2]).ops([first.ops, second.ops])  # before more is recorded
            return fitted(tried, [first, second, *map(recorded, tried[2:])])
        except TraceError as error:
            failure = error
    if one_size:
        with suppress(TraceError):
            again = [first, recorded(microbatch_size)]
            graph = assemble(model, again, (microbatch_size,) * 2, training=training)
            return replace(graph, sizes=alone(microbatch_size, failure))
    raise failure


def _record(
    model: nn.Module,
    table: ModuleTable,
    call: FlatCall,
    layout: BatchLayout,
    loss_fn: Callable[..., Any] | None,
    training: bool,
    whole: tuple[str, ...],
) -> Recording:
    def run(per_op: bool = False) -> Recording:
        return record(
            model, table, call, layout, loss_fn, training=training, per_op=per_op, whole=whole
        )

    while True:
        try:
            return run()
        except OutsideDraw:
            # Something drew or seeded; all generators are back, so it will do so again.
            return run(per_op=True)
        except Undecided as undecided:
            assert table.reads is not None
            table.reads.decide(undecided, run)
