"""Stages divided between the ranks of a replica: axes, layouts, the written program."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import cast

from pdcompile.errors import ConfigError, PdcompileError, PlanError, some
from pdcompile.ir.graph import Capture, OpGraph, Ref, walk
from pdcompile.ir.records import PARTS
from pdcompile.parts.shard import Division, Split
from pdcompile.passes.coarsen.constraints import Constraints
from pdcompile.passes.costs.costed_op import plain_name
from pdcompile.passes.parts.axes import ATTENTION, Axes
from pdcompile.passes.parts.families import FAMILIES
from pdcompile.passes.parts.layouts import Cut, Layouts, lay_out, shard_of
from pdcompile.passes.parts.written import Program, write
from pdcompile.passes.stages.assemble import plan_of_cut
from pdcompile.passes.stages.boundaries import place_eval, stage_of_ops
from pdcompile.plan import Plan, Training
from pdcompile.problem.constraints import Split as Wished
from pdcompile.problem.constraints import smallest_conflict

StageOf = Callable[[], Mapping[str, int]]


def in_parts(
    capture: Capture,
    training: Training,
    stage_of: StageOf | None = None,
    *,
    evaluates: bool = True,
) -> Capture:
    """The program of one part of each stage, in both modes; by width where the split is "auto", or
    else by samples.

    Args:
        stage_of: gives the stage of each op of training, where some stages are whole.
        evaluates: False: evaluation stays whole, as nothing but training is to be planned.

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
    Constraints.resolve(capture.train, [Wished(*one) for one in training.module_splits])
    errors: list[ConfigError] = []
    for split in _families(training):
        try:
            found = _divided(capture, replace(training, split=split), cuts, evaluates=evaluates)
        except ConfigError as error:
            errors.append(error)
            continue
        notes = [f"parts share samples, for by width: {error.message}" for error in errors]
        return replace(found, train=replace(found.train, notes=(*found.train.notes, *notes)))
    first = errors[0]
    if training.module_splits:
        in_parts(capture, replace(training, module_splits=()), stage_of)  # raises by itself
        _refuse_conflict(capture, training, cuts)
    others = partial(_others, capture, training, cuts)
    remedy = re.sub("split='[^']+'", lambda _: others(), first.remedy or "")
    raise ConfigError(first.message, where=first.where, remedy=remedy) from first


def _families(training: Training) -> tuple[Split, ...]:
    return ("width", "samples") if training.split == "auto" else (training.split,)


def _refuse_conflict(capture: Capture, training: Training, cuts: tuple[Cut, Cut]) -> None:
    """Refuses the fewest of `Split` constraints and `split=` that cannot hold together, of a model
    that divides without the constraints."""

    def error(limits: Sequence[Wished | Split]) -> PdcompileError | None:
        """The error under these alone; all else may be divided by any family that is not said."""
        said = [one for one in limits if isinstance(one, str)]
        errors: list[PdcompileError] = []
        for split in said or (_families(training) if training.split == "auto" else FAMILIES):
            own = tuple((one.pattern, one.axis) for one in limits if isinstance(one, Wished))
            try:
                _divided(capture, replace(training, split=split, module_splits=own), cuts)
            except (ConfigError, PlanError) as failed:
                errors.append(failed)
            else:
                return None
        return errors[0]

    def divides(limits: Sequence[Wished | Split]) -> bool:
        return error(limits) is None

    family = [training.split] * (training.split != "auto")
    given: list[Wished | Split] = [*(Wished(*one) for one in training.module_splits), *family]
    core = smallest_conflict(given, divides)
    cause, remedies = error(core), list[str]()
    assert cause is not None
    for one in core:
        rest = [other for other in given if other != one]
        if isinstance(one, str):
            fit = [repr(split) for split in FAMILIES if divides([*rest, split])]
            remedies += [f"split={' or '.join(fit)}"] if fit else []
        elif divides(rest):
            remedies.append(f"leave out {one}")
    if not remedies:  # several conflicts
        kept: list[Wished | Split] = [*family]
        for one in given:
            kept += [one] if one not in kept and divides([*kept, one]) else []
        gone = [str(one) for one in given if isinstance(one, Wished) and one not in kept]
        remedies = [f"leave out {' and '.join(gone)}"]
    named = [f"split={one!r}" if isinstance(one, str) else str(one) for one in core]
    together = f"limits that cannot hold together: {' and '.join(named)}; " * (len(core) > 1)
    raise ConfigError(
        f"{together}{cause.message}", where=cause.where, remedy=", or ".join(remedies)
    )


def _others(capture: Capture, training: Training, cuts: tuple[Cut, Cut]) -> str:
    """The splits that divide a model into as many parts, or else whole stages."""
    found = []
    for split in FAMILIES:
        with suppress(ConfigError, PlanError):
            _divided(capture, replace(training, split=split), cuts)
            found.append(repr(split))
    return f"split={' or '.join(found)}" if found else "parts=1"


def _divided(
    capture: Capture, training: Training, cuts: tuple[Cut, Cut], *, evaluates: bool = True
) -> Capture:
    parts, split = training.most_parts, training.split
    _refuse_unequal(training)
    wishes = [Wished(*one) for one in training.module_splits]
    laid_out = partial(lay_out, family=split, parts=parts, splits=wishes)
    evaluation = write(laid_out(capture.eval, cut=cuts[1])) if evaluates else None
    layouts = laid_out(capture.train, outputs=training.keeps_outputs, cut=cuts[0])
    if evaluation and layouts.shards != evaluation.shards:  # hidden logits may stay split
        layouts = laid_out(capture.train, cut=cuts[0])
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
    if evaluation:
        _check_alike(evaluation, division)
    notes = [*train.graph.notes, *train.notes, *layouts.notes, *_stay_whole(layouts)]
    if stage_of:
        each = ", ".join(map(str, cast(tuple[int, ...], training.parts)))
        notes.append(
            f"stages of {each} parts: their cut was chosen as if the devices of a stage were one, "
            "as fast as its parts together, and is fixed; the certificate is of what else is open"
        )
    graph = replace(train.graph, notes=tuple(notes))
    evaluated = evaluation.graph if evaluation else capture.eval
    return replace(capture, train=graph, eval=evaluated, division=division)


def _refuse_unequal(training: Training) -> None:
    """Refuses microbatches whose samples parts cannot share equally."""
    batch, count, parts = training.batch_size, training.num_microbatches, training.most_parts
    if training.sharing > 1 and batch % (count * parts):
        shared = [f"split={training.split!r}"] * training.split.endswith("samples") + [
            str(Wished(*one)) for one in training.module_splits if one[1].endswith("samples")
        ]
        fit = [m for m in range(1, batch + 1) if batch % (m * parts) == 0]
        raise ConfigError(
            f"parts={parts}, {shared[0]}: microbatches={count} of {batch} samples do "
            f"not each have a multiple of {parts}",
            where="microbatches",
            remedy=f"microbatches={min(fit, key=lambda m: abs(m - count))}" if fit
            else f"a minibatch of a multiple of {count * parts} samples, or split='width'",
        )  # fmt: skip


def _stay_whole(layouts: Layouts) -> Iterator[str]:
    """A note on products that stay whole in spite of the split: each part computes all of them."""
    if layouts.stays:
        total = sum(Axes.of(layouts.graph).products.values())
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
    training = replace(plan.training, parts=1, split="", module_splits=())
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


def evaluated_in_parts(graph: OpGraph, usual: Capture, training: Training) -> OpGraph:
    """A graph of evaluation as the program of one part, of a model whose `usual` capture is divided
    for training so.

    Raises:
        ConfigError: it would divide a tensor otherwise.
    """
    division = usual.division
    if division.parts == 1:
        return graph
    cut, wishes = Cut(), [Wished(*one) for one in training.module_splits]
    if not isinstance(training.parts, int):
        cut = Cut(place_eval(replace(usual, eval=graph), division.stage_of), training.parts)
    found = write(lay_out(graph, division.split, division.parts, cut=cut, splits=wishes))
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
