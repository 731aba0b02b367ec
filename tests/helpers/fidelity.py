"""Comparing a captured graph with its model, which tests ask for whatever verification does.

Every draw of the graph gets the stream that its names say, op by op, so that these are compared
too, and nothing of `CapturedModule` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.batch.call import copied
from pdcompile.eager.autocast import autocast_region, regions_of
from pdcompile.eager.randomness import DrawScope, preserved_rng, reseed, seed_of
from pdcompile.errors import VerifyError
from pdcompile.hardware import devices
from pdcompile.ir.captured_module import Origin
from pdcompile.ir.execution import Lookup, _modes, _region, bound, materialise
from pdcompile.ir.graph import Capture, Op, OpGraph, Ref, leaves
from pdcompile.passes.trace.comparison.step_values import differing
from pdcompile.passes.trace.comparison.steps import Step, eager_values
from pdcompile.passes.trace.python_state import preserved_state
from pdcompile.passes.trace.subject import device_of


def compare(model: nn.Module, capture: Capture, flat: FlatCall, layout: BatchLayout) -> None:
    """Runs eager and graph on the microbatch `flat`, in both modes, with equal random streams.

    Compared bit for bit, on a GPU up to the rounding of sums without a fixed order: outputs, the
    loss, the gradient of every parameter (train) and all buffers.  The model and the generators are
    left as they were.

    Raises:
        VerifyError: names the first of these that differs.
    """
    for graph in (capture.train, capture.eval):
        with step_of(model, graph, flat, layout) as step:
            eager, _ = eager_values(step)
            found = step.values(partial(captured, step))
            exact = devices.is_host(device_of(model, flat))
            for kind, name, _ in differing(eager, found, exact=exact):
                raise VerifyError(f"graph and model differ in {kind} {name!r}", remedy="find out")


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


def captured(step: Step) -> tuple[dict[str, Any], Tensor | None]:
    """Runs the graph of a step on the model's tensors: outputs by value name, and the loss."""
    model, graph = step.model, step.graph
    scope = DrawScope(model, step.seed, step.minibatch, 0)
    # Modules that are one op each draw inside as they do in eager.
    opaque = frozenset(op.module_path for op in graph.ops if op.opaque)
    lookup = StreamLookup(
        model, step.size, device_of(model, step.call), graph.tensor_values,
        scope=scope, opaque=opaque,
    )  # fmt: skip
    given = copied(step.call.leaves)
    env: dict[str, Any] = {entry.name: given[entry.path] for entry in graph.inputs}
    seed_next = seeding(graph, step.seed, step.minibatch)
    with autocast_region(step.autocast):
        for _, members in groupby(graph.ops, key=_region):  # which share casts of weights
            first, *others = members
            with _modes(first):
                for op in (first, *others):
                    env[op.name] = bound(op, env, lookup)()
                    seed_next()
    loss = env[graph.loss] if graph.loss is not None else None
    outputs = {
        place.name if isinstance(place, Ref) else f"output {i}": materialise(place, env, lookup)
        for i, place in enumerate(leaves(graph.output))
    }
    roots = list(outputs.values()) if loss is None else [loss]
    tensors = [root for root in roots if isinstance(root, Tensor) and root.requires_grad]
    if graph.training and tensors:
        if scope.draws:
            scope.backward([(tensor, None) for tensor in tensors])
        else:
            torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])
    return outputs, loss


@dataclass(frozen=True, kw_only=True)
class StreamLookup(Lookup):
    """Finds the model's modules; those that are opaque run inside a scope of draws."""

    scope: DrawScope
    opaque: frozenset[str]

    def module(self, path: str) -> Any:
        module = Lookup.module(self, path)
        return partial(_inside, self.scope, module) if path in self.opaque else module


def _inside(scope: DrawScope, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with scope:
        return module(*args, **kwargs)


def seeding(graph: OpGraph, seed: int, minibatch: int) -> Callable[[], None]:
    """Seeds the first op (of microbatch 0) at once, and each later one when it is called again."""
    reseed(seed_of(seed, minibatch, 0, "", -1))
    waiting: Iterator[Op] = iter(graph.ops)

    def seed_next() -> None:
        op = next(waiting, None)
        if op is not None and op.draw is not None and not op.opaque:
            reseed(seed_of(seed, minibatch, 0, op.module_path, op.draw))

    seed_next()
    return seed_next
