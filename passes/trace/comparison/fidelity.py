"""Does the graph compute what the model computes?  Both run on one microbatch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from pdcompile.batch import BatchLayout, FlatCall, output_leaves
from pdcompile.eager.autocast import autocast_region
from pdcompile.eager.randomness import DrawScope, preserved_rng
from pdcompile.errors import VerifyError
from pdcompile.ir.execution import Lookup, execute, materialise
from pdcompile.ir.graph import Capture, Op, OpGraph, leaves
from pdcompile.passes.trace.comparison.draw_streams import (
    StreamLookup,
    announcing,
    branches_draw,
    opaque_paths,
)
from pdcompile.passes.trace.comparison.eager_values import observe
from pdcompile.passes.trace.subject import device_of
from pdcompile.passes.trace.tape.observer import source_of_traceback
from pdcompile.passes.untouched import same_buffers, untouched, write_buffers

Call: TypeAlias = Callable[[DrawScope | None], tuple[list[Any], torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that one run of one mode leaves behind."""

    outputs: list[Any]
    loss: torch.Tensor | None
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    generator: torch.Tensor


def compare(model: nn.Module, capture: Capture, flat: FlatCall, layout: BatchLayout) -> None:
    """Run eager and graph on the microbatch `flat`, in both modes, from equal random state.

    Compared bit for bit: outputs, the loss, the gradient of every parameter (train), all
    buffers, and how far the random generator went (where branches draw, each draw has a stream of
    its own instead).  The model and the generators are left as
    they were.

    Raises:
        VerifyError: names the first op that differs, and the user's line.
    """
    fqns = [*model.named_parameters(), *model.named_buffers()]
    unreal = [fqn for fqn, tensor in fqns if tensor.device.type == "meta"]
    if unreal:
        raise VerifyError(
            f"{unreal[0]!r} is on the meta device, so that the model cannot be run",
            remedy="compare a smaller model of the same classes, with real parameters",
        )
    for graph in (capture.train, capture.eval):
        with preserved_rng(device_of(model, flat)), untouched(model, graph.training):
            _compare_mode(model, graph, flat, layout)


def _compare_mode(model: nn.Module, graph: OpGraph, flat: FlatCall, layout: BatchLayout) -> None:
    start = torch.default_generator.get_state()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    streams = branches_draw(graph)

    def run(call: Call, gradients: bool = graph.training) -> Outcome:
        scope = DrawScope(model, 0, 0, 0) if streams else None
        torch.default_generator.set_state(start)
        write_buffers(model, buffers)
        model.zero_grad(set_to_none=True)
        with same_buffers(model):
            with torch.set_grad_enabled(gradients):
                with _ambient(graph):
                    outputs, loss = call(scope)
                if graph.training:
                    _backward(outputs, loss, scope)
            if streams:  # each draw begins its own: how far a stream went says nothing
                torch.default_generator.set_state(start)
            return _outcome(model, outputs, loss)

    alone = partial(_eager, model, graph, flat)
    recorded = None if graph.training else lambda: run(alone, gradients=True)
    try:
        eager = run(alone)
    except Exception as error:
        found = _attempt(recorded)  # what forward differentiates, a graph always records
        if found is None:
            raise VerifyError(
                f"the model itself fails on this microbatch of {layout.size}: {error}",
                where=source_of_traceback(error),
                remedy="run the model once on these inputs without pdcompile",
            ) from error
        eager = found
    captured = run(lambda scope: _graph(model, graph, flat, layout, scope))
    problem = _difference(eager, captured)
    if problem is None:
        return
    otherwise = _attempt(recorded)
    torch.default_generator.set_state(start)
    write_buffers(model, buffers)
    what, fqn = problem
    mode = "train" if graph.training else "eval"
    op = None
    if not streams:
        op = _first_difference(model, graph, flat, layout, buffers, start)
    op = op or _reader(graph, fqn)
    place = f"operator {op.name} ({op.target})" if op is not None else "no operator"
    where = op.source if op is not None else None
    if otherwise is not None and _difference(otherwise, captured) is None:
        raise AsksForGradients(what, place, where)
    raise VerifyError(
        f"graph and model differ in {what} in {mode} mode; first in {place}",
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


def _attempt(run: Callable[[], Outcome] | None) -> Outcome | None:
    """What it gives; None where there is nothing to run, or where that fails."""
    if run is None:
        return None
    try:
        return run()
    except Exception:  # the user's code: the error that is told is the first one
        return None


def _ambient(graph: OpGraph) -> AbstractContextManager[Any]:
    """The region around model and loss_fn: ops of one weight share its cast."""
    return autocast_region(graph.origin.autocast if graph.origin is not None else None)


def _eager(
    model: nn.Module, graph: OpGraph, flat: FlatCall, scope: DrawScope | None
) -> tuple[list[Any], Any]:
    args, kwargs, target = flat.unflatten(_fresh(flat))
    with scope or nullcontext():
        output = model(*args, **kwargs)
    found = output_leaves(output)
    loss_fn = graph.origin.loss_fn if graph.origin is not None else None
    if loss_fn is not None:
        with scope or nullcontext(), scope.loss() if scope else nullcontext():
            return found, loss_fn(output, target)
    for place, leaf in zip(leaves(graph.output), found, strict=True):
        if getattr(place, "name", None) == graph.loss and graph.loss is not None:
            return found, leaf
    return found, None


def _graph(
    model: nn.Module,
    graph: OpGraph,
    flat: FlatCall,
    layout: BatchLayout,
    scope: DrawScope | None,
) -> tuple[list[Any], Any]:
    lookup = _lookup(model, graph, flat, layout, scope)
    watch = announcing(graph) if scope is not None else None
    env = execute(graph, _inputs(graph, flat), lookup, watch=watch)
    outputs = [materialise(leaf, env, lookup) for leaf in leaves(graph.output)]
    return outputs, env[graph.loss] if graph.loss is not None else None


def _fresh(flat: FlatCall) -> dict[str, Any]:
    """The call's leaves, tensors copied: a model may write into its inputs."""
    return {
        path: leaf.detach().clone().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for path, leaf in flat.leaves.items()
    }


def _inputs(graph: OpGraph, flat: FlatCall) -> dict[str, torch.Tensor]:
    fresh = _fresh(flat)
    return {entry.name: fresh[entry.path] for entry in graph.inputs}


def _lookup(
    model: nn.Module,
    graph: OpGraph,
    flat: FlatCall,
    layout: BatchLayout,
    scope: DrawScope | None = None,
) -> Lookup:
    found = (model, layout.size, device_of(model, flat), graph.tensor_values)
    return StreamLookup(*found, scope, opaque_paths(graph)) if scope else Lookup(*found)


def _backward(outputs: list[Any], loss: torch.Tensor | None, scope: DrawScope | None) -> None:
    roots = [loss] if loss is not None else outputs
    tensors = [t for t in roots if isinstance(t, torch.Tensor) and t.requires_grad]
    if tensors:
        back = scope.backward_of if scope and scope.draws else torch.autograd.backward
        back(tensors, [torch.ones_like(t) for t in tensors])


def _outcome(model: nn.Module, outputs: list[Any], loss: torch.Tensor | None) -> Outcome:
    def copied(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    return Outcome(
        outputs=[copied(leaf) for leaf in outputs],
        loss=copied(loss),
        gradients={name: copied(p.grad) for name, p in model.named_parameters()},
        buffers={name: copied(buffer) for name, buffer in model.named_buffers()},
        generator=torch.default_generator.get_state(),
    )


def _difference(eager: Outcome, captured: Outcome) -> tuple[str, str | None] | None:
    """What differs, in words, and the FQN where it is a tensor of the model."""
    pairs = zip(eager.outputs, captured.outputs, strict=True)
    for i, (a, b) in enumerate(pairs):
        if not same(a, b):
            return f"output {i}", None
    if not same(eager.loss, captured.loss):
        return "the loss", None
    for kind in ("buffers", "gradients"):
        mine, theirs = getattr(eager, kind), getattr(captured, kind)
        for name in mine:
            if not same(mine[name], theirs[name]):
                return f"{kind[:-1]} of {name!r}" if kind == "gradients" else f"{name!r}", name
    if not torch.equal(eager.generator, captured.generator):
        return "the number of random draws", None
    return None


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit; NaN equals NaN."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return type(a) is type(b) and bool(a == b or (a != a and b != b))
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    a, b = (t if t.layout == torch.strided else t.to_dense() for t in (a, b))  # sparse gradients
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    return bool(torch.all((a == b) | ((a != a) & (b != b))))


def _first_difference(
    model: nn.Module,
    graph: OpGraph,
    flat: FlatCall,
    layout: BatchLayout,
    buffers: dict[str, torch.Tensor],
    start: torch.Tensor,
) -> Op | None:
    loss_fn = graph.origin.loss_fn if graph.origin is not None else None
    with torch.set_grad_enabled(graph.training), _ambient(graph):
        call = FlatCall(_fresh(flat), flat.spec)
        expected = observe(model, call, layout, loss_fn)
        torch.default_generator.set_state(start)
        write_buffers(model, buffers)
        found: dict[str, torch.Tensor] = {}

        def watch(name: str, value: Any) -> None:
            if isinstance(value, torch.Tensor):
                found[name] = value.detach().clone()

        inputs = _inputs(graph, flat)
        execute(graph, inputs, _lookup(model, graph, flat, layout), watch=watch)
    for op in graph.ops:
        if op.name in found and op.name in expected and not same(expected[op.name], found[op.name]):
            return op
    return None


def _reader(graph: OpGraph, fqn: str | None) -> Op | None:
    """The last op that reads or writes a tensor of the model."""
    for op in reversed(graph.ops):
        if fqn in (*op.attributes, *op.parameters, *op.buffers_read, *op.buffers_written):
            return op
    return None
