"""The model's own outputs: from microbatches' values to the pytree that the user knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from pdcompile.batch import BatchLayout, NotKept, concatenate, unflatten_output
from pdcompile.hardware import devices
from pdcompile.ir.graph import Affine, Attr, LeftOut, OpGraph, Ref, TorchLiteral, named_leaves
from pdcompile.ir.stage_interface import Port
from pdcompile.ir.targets import from_literal
from pdcompile.runtime.interpreter import Box
from pdcompile.runtime.session import Session
from pdcompile.runtime.stage.compute import Feed
from pdcompile.runtime.stage.wiring import expected
from pdcompile.schedule import Kind
from pdcompile.schedule.spec import Broadcast


def share(
    feed: Feed, ports: tuple[Port, ...], session: Session, receivers: Collection[int]
) -> None:
    """Bring the outputs of a minibatch from the ranks of the last stage to the receivers."""
    box, broadcasts = Box({}, {}), []
    # Training and evaluation may differ in dtype or layout: channels of their own.
    turn = feed.minibatch if feed.wiring.training else 0
    items = [(2 * n + feed.wiring.training, port) for n, port in enumerate(ports)]
    for item, port in items:
        for i, size in enumerate(feed.sizes):
            root = session.spec.rank(len(session.spec.ranks) - 1, i, turn)
            others = tuple(rank for rank in receivers if rank != root)
            broadcasts.append(Broadcast(Kind.OUTPUT, item, i, root, others))
            if i in feed.outputs:
                box.tensors[item, i] = feed.outputs[i][port.value]
            else:
                box.expected[item, i] = expected(port, size, feed.minibatch)
    session.share(tuple(broadcasts), box, feed.minibatch)
    if items and not set(session.ranks).isdisjoint(receivers):
        feed.outputs = {
            i: {port.value: box.tensors[item, i] for item, port in items}
            for i in range(len(feed.sizes))
        }


def _in_order(feed: Feed) -> list[dict[str, Tensor]]:
    """The outputs by microbatch; nothing where the model returns no tensors of its own."""
    return [feed.outputs.get(i, {}) for i in range(len(feed.sizes))]


def join(
    graph: OpGraph, feed: Feed, layout: BatchLayout, loss: Tensor | None,
    tensors: Mapping[str, Tensor],
) -> Any:  # fmt: skip
    """The minibatch's output as the model makes it; its loss takes the place of the losses.

    `tensors` are the model's own, for an output that is one of them.
    """
    placed = list(named_leaves(graph.output))
    device = next((tensor.device for tensor in tensors.values()), devices.HOST)

    def leaf(place: str, part: Any, values: Mapping[str, Tensor], size: int) -> Any:
        if isinstance(part, Ref):
            return values[part.name]
        if isinstance(part, LeftOut):
            return NotKept(place)
        if isinstance(part, Affine):
            return part.at(size)
        if isinstance(part, TorchLiteral):
            return from_literal(part, device)
        return tensors[part.fqn].detach() if isinstance(part, Attr) else part

    outputs = [
        unflatten_output([leaf(*one, values, size) for one in placed], graph.output_spec)
        for values, size in zip(_in_order(feed), feed.sizes, strict=True)
    ]
    names = [part.name if isinstance(part, Ref) else None for _, part in placed]
    place = names.index(graph.loss) if loss is not None and graph.loss in names else None
    return concatenate(outputs, feed.sizes, loss=loss, loss_leaf=place, batch_dim=layout.usual_dim)
