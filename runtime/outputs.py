"""The model's own outputs: from microbatches' values to the pytree that the user knows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from pdcompile.batch import OmittedOutput, concatenate, unflatten_output
from pdcompile.batch.omitted_output import dropped
from pdcompile.batch.step_result import LazyLoss, StepResult
from pdcompile.hardware import devices
from pdcompile.ir.execution import Lookup, materialise
from pdcompile.ir.graph import Affine, Attr, LeftOut, OpGraph, Ref, named_leaves
from pdcompile.ir.stage_interface import Port
from pdcompile.runtime.session import Session
from pdcompile.runtime.stage.compute import Feed, expected
from pdcompile.runtime.transport.contract import Expected
from pdcompile.schedule import Kind
from pdcompile.schedule.spec import Broadcast


def output_ranks(session: Session, *, training: bool) -> Collection[int]:
    """The ranks that get the outputs of a call.

    A minibatch's outputs can be large, and training does not need them: the plan says whether its
    steps keep them.  Evaluation gives them always.
    """
    if training and not session.plan.training.keeps_outputs:
        return ()
    if session.world is None:
        return session.ranks
    everywhere = session.options.outputs in ("all", "evaluation")
    return session.stages_of_rank if everywhere else session.spec.ranks[-1][:1]


def result_of(session: Session, graph: OpGraph, feeds: list[Feed], loss: Any) -> StepResult:
    """Result of a call that has run: its outputs are None where this process gets none, and raise
    where they were dropped."""
    compiled, feed = session.compiled, feeds[-1]
    training = feed.wiring.training
    receivers = output_ranks(session, training=training)
    # The caller's alone: they last as long as the result, not as the minibatch's feed.
    made = replace(feed, outputs={i: one for f in feeds for i, one in f.outputs.items()})
    for one in feeds:
        one.outputs = {}
    roots = session.spec.roots(len(feed.sizes), feed.minibatch if training else 0)
    if session.world is not None and any({*receivers} - {root} for root in roots):
        with session.guard():
            ports = compiled.interfaces[-1]
            signature = ports.train if training else ports.eval
            share(made, signature.outputs, session, receivers)
    lazy = None if loss is None else LazyLoss(lambda: session.wait_loss(loss), loss.ready)
    if set(session.ranks).isdisjoint(receivers):
        return StepResult(lazy, partial(_none, session, training=training))

    def outputs() -> Any:
        """The minibatch's output as the model makes it; its loss takes the place of the losses."""
        total = None if lazy is None else lazy.wait()
        placed, tensors = list(named_leaves(graph.output)), session.state.tensors
        device = next((tensor.device for tensor in tensors.values()), devices.HOST)
        own = {part.fqn: tensors[part.fqn].detach() for _, part in placed if isinstance(part, Attr)}
        parts = []
        for i, size in enumerate(made.sizes):
            # Nothing is there where the model returns no tensors of its own.
            values, lookup = made.outputs.get(i, {}), Lookup(nn.Module(), size, device, own)
            if training and compiled.overlaps and len(made.sizes) == 1:  # backward is yet to come
                values = {name: value.clone() for name, value in values.items()}
            leaves = [
                OmittedOutput(place)
                if isinstance(part, LeftOut)
                else materialise(part, values, lookup)
                for place, part in placed
            ]
            parts.append(unflatten_output(leaves, graph.output_spec))
        refs = {i: part.name for i, (_, part) in enumerate(placed) if isinstance(part, Ref)}
        sample_dims = {
            i: [dim for dim, n in enumerate(graph.values[name].shape) if n == Affine(1)]
            for i, name in refs.items()
            if not graph.sizes.is_one  # else nothing tells them from other sizes
        }
        place = next((i for i, name in refs.items() if name == graph.loss), None)
        return concatenate(
            parts, made.sizes, loss=total, loss_leaf=place,
            batch_dim=compiled.layout.usual_dim, sample_dims=sample_dims,
        )  # fmt: skip

    return StepResult(lazy, outputs)


def _none(session: Session, *, training: bool) -> None:
    """None; raises OmittedOutputError where this process would have outputs but for the plan."""
    chosen, last = session.plan.training, session.spec.ranks[-1][0]
    if training and chosen.outputs_by_size and not chosen.keeps_outputs and last in session.ranks:
        raise dropped(session.plan.notes)


def share(
    feed: Feed, ports: tuple[Port, ...], session: Session, receivers: Collection[int]
) -> None:
    """Bring the outputs of a minibatch from the ranks of the last stage to the receivers."""
    rows = dict[Broadcast, Tensor | Expected]()
    # Training and evaluation may differ in dtype or layout: channels of their own.
    training = feed.wiring.training
    turn, first = (feed.minibatch, 0) if training else (0, session.first_output)
    items = [(2 * n + training, port) for n, port in enumerate(ports, first)]
    for item, port in items:
        for i, size in enumerate(feed.sizes):
            root = session.spec.rank(len(session.spec.ranks) - 1, i, turn)
            others = tuple(rank for rank in receivers if rank != root)
            here = feed.outputs[i][port.value] if i in feed.outputs else None
            arrives = expected(port, size, feed.minibatch)
            rows[Broadcast(Kind.OUTPUT, item, i, root, others)] = arrives if here is None else here
    found = session.share(rows.items(), feed.minibatch)
    if items and not set(session.ranks).isdisjoint(receivers):
        feed.outputs = {
            i: {port.value: found[item, i] for item, port in items} for i in range(len(feed.sizes))
        }
