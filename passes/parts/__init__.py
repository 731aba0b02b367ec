"""Stages divided between the ranks of a replica: axes, layouts, the written program."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import cast

from pdcompile.errors import ConfigError, PlanError, some
from pdcompile.ir.graph import Capture, OpGraph, Ref, walk
from pdcompile.ir.records import PARTS
from pdcompile.parts.shard import Division
from pdcompile.passes.costs.costed_op import plain_name
from pdcompile.passes.parts.axes import ATTENTION
from pdcompile.passes.parts.choice import product_flops
from pdcompile.passes.parts.families import FAMILIES
from pdcompile.passes.parts.layouts import Cut, Layouts, lay_out, shard_of
from pdcompile.passes.parts.written import Program, write
from pdcompile.passes.stages.assemble import plan_of_cut
from pdcompile.passes.stages.boundaries import place_eval, stage_of_ops
from pdcompile.plan import Plan, Training

StageOf = Callable[[], Mapping[str, int]]


def in_parts(capture: Capture, training: Training, stage_of: StageOf | None = None) -> Capture:
    """The program of one part of each stage, in both modes; by width where the split is "auto", or
    else by samples.

    Args:
        stage_of: gives the stage of each op of training, where some stages are whole.

    Raises:
        ConfigError: nothing divides in this way, or not into so many parts; with splits that do.
        PlanError: an op cannot be made smaller.
    """
    cuts = Cut(), Cut()
    if not isinstance(training.parts, int):
        assert stage_of is not None
        placed = stage_of()
        each = placed, place_eval(capture, placed)
        cuts = Cut(each[0], training.parts), Cut(each[1], training.parts)
    errors: list[ConfigError] = []
    for split in ("width", "samples") if training.split == "auto" else (training.split,):
        try:
            found = _divided(capture, replace(training, split=split), cuts)
        except ConfigError as error:
            errors.append(error)
            continue
        notes = [f"parts share samples, for by width: {error.message}" for error in errors]
        return replace(found, train=replace(found.train, notes=(*found.train.notes, *notes)))
    first = errors[0]
    others = partial(_others, capture, training, cuts)
    remedy = re.sub("split='[^']+'", lambda _: others(), first.remedy or "")
    raise ConfigError(first.message, where=first.where, remedy=remedy) from first


def _others(capture: Capture, training: Training, cuts: tuple[Cut, Cut]) -> str:
    """The splits that divide a model into as many parts, or else whole stages."""
    found = []
    for split in FAMILIES:
        with suppress(ConfigError, PlanError):
            _divided(capture, replace(training, split=split), cuts)
            found.append(repr(split))
    return f"split={' or '.join(found)}" if found else "parts=1"


def _divided(capture: Capture, training: Training, cuts: tuple[Cut, Cut]) -> Capture:
    parts, split = training.most_parts, training.split
    if split.endswith("samples"):
        _refuse_unequal(training)
    evaluation = write(lay_out(capture.eval, split, parts, cut=cuts[1]))
    layouts = lay_out(capture.train, split, parts, outputs=training.keeps_outputs, cut=cuts[0])
    if layouts.shards != evaluation.shards:  # logits that training does not show may stay split
        layouts = lay_out(capture.train, split, parts, cut=cuts[0])
    train = write(layouts)
    whole = {op.name for op in train.graph.ops if op.target == f"{PARTS}.gather"}
    outputs = {
        ref.name: shard_of(ref.name, layouts.of(ref.name), parts)
        for ref in walk(capture.train.output, Ref)
        if layouts.of(ref.name).kind == "S" and ref.name not in layouts.shown | whole
    }
    stage_of = {op.name: cuts[0].stage_of.get(train.belongs.get(op.name, op.name), 0)
                for op in train.graph.ops} if cuts[0].stage_of else {}  # fmt: skip
    division = Division(parts, split, dict(train.shards), train.summed, outputs, stage_of)
    _check_alike(evaluation, division)
    notes = [*train.graph.notes, *train.notes, *layouts.notes, *_stay_whole(layouts)]
    if stage_of:
        each = ", ".join(map(str, cast(tuple[int, ...], training.parts)))
        notes.append(
            f"stages of {each} parts: their cut was chosen as if the devices of a stage were one, "
            "as fast as its parts together, and is fixed; the certificate is of what else is open"
        )
    graph = replace(train.graph, notes=tuple(notes))
    return replace(capture, train=graph, eval=evaluation.graph, division=division)


def _refuse_unequal(training: Training) -> None:
    """Refuses microbatches whose samples parts cannot share equally."""
    batch, count, parts = training.batch_size, training.num_microbatches, training.most_parts
    if batch % (count * parts):
        fit = [m for m in range(1, batch + 1) if batch % (m * parts) == 0]
        raise ConfigError(
            f"parts={parts}, split={training.split!r}: microbatches={count} of {batch} samples do "
            f"not each have a multiple of {parts}",
            where="microbatches",
            remedy=f"microbatches={min(fit, key=lambda m: abs(m - count))}" if fit
            else f"a minibatch of a multiple of {count * parts} samples, or split='width'",
        )  # fmt: skip


def _stay_whole(layouts: Layouts) -> Iterator[str]:
    """A note on products that stay whole in spite of the split: each part computes all of them."""
    if layouts.stays:
        total = sum(product_flops(layouts.graph).values())
        share = sum(one.flops for one in layouts.stays) / max(total, 1)
        shown = some([f"{one.op} ({one.source}): {one.reason}" for one in layouts.stays], 3)
        yield f"{100 * share:.2g} % of the operations stay whole, on each part: {shown}"
    across = [f"{op.name} ({op.source})" for op in layouts.graph.ops
              if layouts.axes.get(op.name) == "hidden" and plain_name(op) == ATTENTION]  # fmt: skip
    if across:
        yield (
            f"{layouts.parts} parts cannot share the heads of {some(across, 3)}: each computes all "
            "scores, and of every head's values its share of their width"
        )


def run_whole(plan: Plan, capture: Capture) -> Plan:
    """The plan for stages that run whole, in one process, from one for parts of them.

    Args:
        capture: of the model as it is.
    """
    stage_of = stage_of_ops(capture.train, plan)
    training = replace(plan.training, parts=1, split="")
    cluster = replace(plan.machines, parts=None)
    made = plan_of_cut(capture.train, stage_of, plan.ranks, training, cluster, rehearsed=False)
    stages = tuple(
        replace(stage, ops=whole.ops, parameters=whole.parameters)
        for stage, whole in zip(plan.stages, made.stages, strict=True)
    )
    note = (
        f"in one process stages run whole; as {plan.parts_in_words} by {plan.training.split} "
        "they were compared with the model, and run on ranks of their own"
    )
    return replace(
        plan, stages=stages, edges=made.edges, tied=made.tied, training=training,
        cluster=cluster.to_toml(), fingerprint=made.fingerprint, notes=(*plan.notes, note),
    )  # fmt: skip


def evaluated_in_parts(graph: OpGraph, usual: Capture, parts: int | tuple[int, ...]) -> OpGraph:
    """A graph of evaluation as the program of one part, of a model whose `usual` capture is divided
    for training into so many parts, or so many of each stage.

    Raises:
        ConfigError: it would divide a tensor otherwise.
    """
    division = usual.division
    if division.parts == 1:
        return graph
    cut = Cut()
    if not isinstance(parts, int):
        cut = Cut(place_eval(replace(usual, eval=graph), division.stage_of), parts)
    found = write(lay_out(graph, division.split, division.parts, cut=cut))
    _check_alike(found, division)
    return found.graph


def _check_alike(evaluation: Program, division: Division) -> None:
    """Raise ConfigError where evaluation would divide a tensor otherwise than training does."""
    there = evaluation.graph.tensors
    names = [*evaluation.shards, *(fqn for fqn in division.shards if fqn in there)]
    unlike = [f for f in dict.fromkeys(names) if evaluation.shards.get(f) != division.shards.get(f)]
    if unlike:
        raise ConfigError(
            f"parts={division.parts}: evaluation would divide {some(unlike)} otherwise than "
            "training does",
            where=unlike[0],
            remedy="another split, or parts=1",
        )
