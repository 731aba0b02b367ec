"""torch.distributed.pipelining: the generated stages, and a script that trains them.

What it gets wrong (measured on torch 2.13) is handled in the script or refused: tied weights are
summed over the ranks that hold them; values that skip stages are handed on; shapes are given, so
that no stage runs on made-up values first (batch norm would count them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from pdcompile.errors import ConfigError
from pdcompile.ir.graph import Op, written_buffers
from pdcompile.ir.stage_interface import Port
from pdcompile.passes.costs.costed_op import plain_name
from pdcompile.passes.export.subject import Exported, Subject, refused
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
    """``train.py`` beside the stages.  Raises ConfigError: see `_refused_models`."""
    stages = neighbour_stages(subject.sources.interfaces)
    for error in _refused_models(subject, stages):
        raise error
    text = train_file(subject.capture, subject.plan, stages, subject.source, subject.optimizer)
    return Exported({"train.py": text}, tuple(_notes(subject.plan, stages)))


def refused_plans(plan: Plan) -> Iterator[ConfigError]:
    """Refuses plans that such a script would get wrong, of any model."""
    training = plan.training
    for stage in plan.stages:
        if stage.replicas > 1:
            yield _refused(
                f"stage {stage.index} has {stage.replicas} replicas",
                "plan with replicas=1, and wrap each part in fully_shard or "
                "DistributedDataParallel over ranks of your own (docs/other_tools.md)",
            )
    if training.loss_reduction == "callable":
        yield _refused(
            "loss_reduction is a function, and torch weighs all microbatches alike",
            "plan with loss_reduction='mean' or 'sum'",
        )
    if training.loss_scaling:
        yield _refused(
            "the plan scales losses for float16, and the script has no GradScaler of all stages",
            "plan with autocast='bfloat16' and without grad_scaler (--grad-scaler)",
        )


def _refused_models(subject: Subject, stages: Sequence[NeighbourStage]) -> Iterator[ConfigError]:
    """Refuses what such a script would get wrong of this model."""
    yield from _refused_inputs(stages)
    yield from _refused_loss(stages[-1])
    yield from _refused_ops(subject, stages)


def _refused_inputs(stages: Sequence[NeighbourStage]) -> Iterator[ConfigError]:
    ports: list[Port] = [p for one in stages for p in (*one.from_call, *one.received)]
    ports += stages[-1].interface.train.loss_inputs
    for port in ports:
        if port.path is None:
            continue
        if not port.path.isidentifier():
            yield _refused(
                f"input {port.path!r} is inside of a container, and torch splits whole tensors",
                "give the model (or loss_fn) its tensors one by one",
            )
        elif port.batch_dim != 0:
            yield _refused(
                f"input {port.path!r} has no row for each sample",
                "give it samples as its first dimension, or make it inside of the model",
            )
    if not stages[0].received:
        yield _refused("the first stage reads no input", "plan with fewer stages")


def _refused_loss(last: NeighbourStage) -> Iterator[ConfigError]:
    signature = last.interface.train
    if signature.loss is None:
        yield _refused(
            "the model has no loss to train on", "give the workload a loss_fn, and batches"
        )
    given = {port.value for port in last.sent}
    asked = [port for port in signature.loss_inputs if port.path != "target"]
    for port in asked:
        if port.value not in given:
            yield _refused(
                f"the loss reads {port.name!r}, which the last stage does not have",
                "pin what makes it to the last stage (--pin)",
            )


def _refused_ops(subject: Subject, stages: Sequence[NeighbourStage]) -> Iterator[ConfigError]:
    graph, plan = subject.capture.train, subject.plan
    for op in random_ops(graph):
        if plain_name(op) not in _QUIET:
            yield _refused(
                f"{op.target} at {op.source} draws random numbers, and a pipeline draws others "
                "than plain PyTorch, so that the two could not be compared",
                "leave it out of the model that is exported",
            )
    for stage in plan.stages:
        held = {*stages[stage.index].interface.buffers}
        own: list[Op] = [op for op in graph.ops if op.name in set(stage.ops)]
        if stage.recompute and (written := sorted(written_buffers(own) & held)):
            yield _refused(
                f"stage {stage.index} recomputes and writes buffer {written[0]!r}, which "
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
