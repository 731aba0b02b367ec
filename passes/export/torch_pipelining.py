"""torch.distributed.pipelining: the generated stages, and a script that trains them.

What it gets wrong (measured on torch 2.13) is handled in the script or refused: tied weights are
summed over the ranks that hold them; values that skip stages are handed on; shapes are given, so
that no stage runs on made-up values first (batch norm would count them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from pdcompile.ir.graph import written_buffers
from pdcompile.ir.stage_interface import Port
from pdcompile.passes.costs.costed_op import plain_name
from pdcompile.passes.export import Exported, Subject, refused
from pdcompile.passes.export.train_file import (
    NeighbourStage,
    neighbour_stages,
    random_ops,
    train_file,
)
from pdcompile.plan import Plan
from pdcompile.schedule.registry import alternating

_refused = partial(refused, "torch-pipelining")
#: random ops that the script can keep from drawing, by plain name
_QUIET = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alphadropout", "featurealphadropout"),
    *("scaleddotproductattention", "multiheadattention", "multiheadattentionforward"),
    *("lstm", "gru", "rnn", "rnntanh", "rnnrelu"),
}


def torch_pipelining(subject: Subject) -> Exported:
    """``train.py`` beside the stages.  Raises ConfigError where it would get the model wrong."""
    stages = neighbour_stages(subject.sources.interfaces)
    _check_inputs(stages)
    _check_loss(stages[-1])
    _check_ops(subject, stages)
    text = train_file(subject.capture, subject.plan, stages, subject.source, subject.optimizer)
    return Exported({"train.py": text}, tuple(_notes(subject.plan, stages)))


def check_script(plan: Plan) -> None:
    """Raises ConfigError for plans that such a script would get wrong, of any model."""
    for stage in plan.stages:
        if stage.replicas > 1:
            raise _refused(
                f"stage {stage.index} has {stage.replicas} replicas",
                "plan with replicas=1, and wrap each part in fully_shard or "
                "DistributedDataParallel over ranks of your own (docs/other_tools.md)",
            )
    if plan.training.loss_reduction == "callable":
        raise _refused(
            "loss_reduction is a function, and torch weighs all microbatches alike",
            "plan with loss_reduction='mean' or 'sum'",
        )
    if plan.training.loss_scaling:
        raise _refused(
            "the plan scales losses for float16, and the script has no GradScaler of all stages",
            "plan with autocast='bfloat16' and without grad_scaler (--grad-scaler)",
        )


def _check_inputs(stages: Sequence[NeighbourStage]) -> None:
    ports: list[Port] = [p for one in stages for p in (*one.from_call, *one.received)]
    ports += stages[-1].interface.train.loss_inputs
    for port in ports:
        if port.path is not None and not port.path.isidentifier():
            raise _refused(
                f"input {port.path!r} is inside of a container, and torch splits whole tensors",
                "give the model (or loss_fn) its tensors one by one",
            )
        if port.path is not None and port.batch_dim != 0:
            raise _refused(
                f"input {port.path!r} has no row for each sample",
                "give it samples as its first dimension, or make it inside of the model",
            )
    if not stages[0].received:
        raise _refused("the first stage reads no input", "plan with fewer stages")


def _check_loss(last: NeighbourStage) -> None:
    signature, given = last.interface.train, {port.value for port in last.sent}
    if signature.loss is None:
        raise _refused(
            "the model has no loss to train on", "give the workload a loss_fn, and batches"
        )
    for port in signature.loss_inputs:
        if port.path != "target" and port.value not in given:
            raise _refused(
                f"the loss reads {port.name!r}, which the last stage does not have",
                "pin what makes it to the last stage (--pin)",
            )


def _check_ops(subject: Subject, stages: Sequence[NeighbourStage]) -> None:
    ops = {op.name: op for op in subject.capture.train.ops}
    for op in random_ops(subject.capture.train):
        if plain_name(op) not in _QUIET:
            raise _refused(
                f"{op.target} at {op.source} draws random numbers, and a pipeline draws others "
                "than plain PyTorch, so that the two could not be compared",
                "leave it out of the model that is exported",
            )
    for stage, planned in zip(stages, subject.plan.stages, strict=True):
        written = written_buffers(ops[name] for name in planned.ops if name in ops)
        if planned.recompute and (held := sorted(written.intersection(stage.interface.buffers))):
            raise _refused(
                f"stage {planned.index} recomputes and writes buffer {held[0]!r}, which "
                "torch.utils.checkpoint would write twice",
                "plan with recompute=False",
            )


def _notes(plan: Plan, stages: Sequence[NeighbourStage]) -> Iterator[str]:
    count = plan.num_ranks
    yield f"torchrun --nproc-per-node={count} train.py, in that folder, trains and compares"
    for one in plan.tied:
        yield (
            f"tied weight {one.fqn} is on stages {', '.join(map(str, one.stages))}: train.py sums "
            "its gradients over them, which torch leaves to you"
        )
    for stage in stages:
        if stage.handed_on:
            names = ", ".join(repr(port.name) for port in stage.handed_on)
            values = "values" if len(stage.handed_on) > 1 else "value"
            yield f"stage {stage.interface.index} hands {values} {names} on to a later stage"
    usual = tuple(reversed(range(len(plan.stages))))
    alone = plan.num_ranks == len(plan.stages) and plan.training.schedule in alternating()
    if alone and plan.training.warmup not in ((), usual):
        yield "torch has a warm-up of its own: the plan's is deeper, to hide transfers"
