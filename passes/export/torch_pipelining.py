"""torch.distributed.pipelining: the generated stages, and a script that trains them and compares
them with plain PyTorch.

What it gets wrong (measured on torch 2.13) is handled in the script or refused: tied weights are
summed over the ranks that hold them; shapes are given, so that no stage runs on made-up values
first (batch norm would count them).

Each stage talks to its two neighbours alone.  A value that a later stage reads is handed on by
every stage between (a skip connection), and its gradient comes back the same way, where autograd
adds it to that of the stage itself.  What stages read of the call is given to each of them by name.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pprint import pformat
from typing import Any, TypeAlias

from torch import nn

from pdcompile.eager.autocast import NO_CASTS, on_gpu
from pdcompile.errors import ConfigError
from pdcompile.ir.graph import Capture, Op, OpGraph, written_buffers
from pdcompile.ir.stage_interface import Port, Sources, StageInterface
from pdcompile.passes.codegen.header import model_name
from pdcompile.passes.codegen.pipeline_file import name_on, sizes, used_after
from pdcompile.passes.codegen.source_text import WIDTH, clean, filled
from pdcompile.passes.costs.costed_op import plain_name
from pdcompile.passes.form.expressions import quote
from pdcompile.plan import Plan
from pdcompile.schedule.registry import name_of, names
from pdcompile.user_functions import is_file

#: what torch would get wrong, and what to do instead
Refusal: TypeAlias = tuple[str, str]
SCRIPT = "train.py"
TEMPLATE = Path(__file__).with_name("train.py.txt")
STEPS = 3
QUIETLY = "; both run without dropout for that"
#: random ops that the script can keep from drawing, by plain name
_QUIET = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alphadropout", "featurealphadropout"),
    *("scaleddotproductattention", "multiheadattention", "multiheadattentionforward"),
    *("lstm", "gru", "rnn", "rnntanh", "rnnrelu"),
}


@dataclass(frozen=True, slots=True)
class NeighbourStage:
    """One stage in training: what it gets and gives.

    Args:
        received: from the stage before it, in order; of the first one its inputs from the call.
        from_call: further inputs from the call, by name.
        handed_on: of `received`, what later stages need and this one does not make.
        sent: to the next stage, in order; of the last one all its outputs.
    """

    interface: StageInterface
    received: tuple[Port, ...]
    from_call: tuple[Port, ...]
    handed_on: tuple[Port, ...]
    sent: tuple[Port, ...]


def neighbour_stages(interfaces: Sequence[StageInterface]) -> tuple[NeighbourStage, ...]:
    """The stages of a plan as a chain."""
    found: list[NeighbourStage] = []
    before: tuple[Port, ...] = ()
    for k, interface in enumerate(interfaces):
        inputs = interface.train.inputs
        called = tuple(port for port in inputs if port.path is not None)
        own = {port.value for port in interface.train.outputs}
        last = k == len(interfaces) - 1
        later = used_after(interfaces, k)
        handed_on = tuple(p for p in before if p.value in later and p.value not in own)
        made = tuple(p for p in interface.train.outputs if p.value in later)
        sent = (*(interface.train.outputs if last else made), *handed_on)
        received, from_call = (called, ()) if k == 0 else (before, called)
        found.append(NeighbourStage(interface, received, from_call, handed_on, sent))
        before = sent
    return tuple(found)


def with_script(
    capture: Capture, plan: Plan, sources: Sources, model: nn.Module, target: str, folder: Path
) -> tuple[Sources, tuple[str, ...]]:
    """The sources of a folder with ``train.py`` among them, and notes for its reader.

    Args:
        target: ``file.py:function`` or ``package.module:function`` of the model and its data.

    Raises:
        ConfigError: torch cannot express the plan or the model; says what.
    """
    refuse(unlike_torchs(plan))
    if any(parameter.is_meta for parameter in model.parameters()):
        message = "the model is on the meta device, and the script compares it with plain PyTorch"
        remedy = "give a model that has values; a smaller one of the same class will do"
        refuse([(message, remedy)])
    stages = neighbour_stages(sources.interfaces)
    refuse(unlike_torch(capture.train, plan, stages))
    text = _script(capture, plan, stages, imported(target, folder))
    return replace(sources, files={**sources.files, SCRIPT: text}), tuple(_notes(plan, stages))


def refuse(found: Iterable[Refusal]) -> None:
    """Raise ConfigError for the first thing that torch would get wrong."""
    for message, remedy in found:
        raise ConfigError(message, where="--torch", remedy=remedy)


def imported(target: str, folder: Path) -> str:
    """The target as a script in a folder imports it."""
    place, colon, function = target.rpartition(":")
    if not is_file(place):
        return target
    relative = os.path.relpath(Path(place).resolve(), folder.resolve())
    return f"{Path(relative).as_posix()}{colon}{function}"


def unlike_torchs(plan: Plan) -> Iterator[Refusal]:
    """Refusals of plans that such a script would get wrong, of any model."""
    if plan.training.parts != 1:
        message = f"stages of {plan.parts_in_words}, which the script would not divide"
        yield message, "plan with parts=1 (--parts 1)"
    if not plan.training.kind.in_torch:
        known = " or ".join(names(lambda kind: kind.in_torch != ""))
        message = f"torch has no schedule {name_of(plan.training.schedule)!r}"
        yield message, f"plan with schedule {known}"
    size, m = plan.training.batch_size, plan.training.num_microbatches
    if size % m:
        message = f"{size} samples in {m} microbatches are not of one size"
        yield message, "plan with a number of microbatches that divides the minibatch"
    for stage in plan.stages:
        if stage.replicas > 1:
            remedy = "plan with replicas=1, and wrap each part in fully_shard or "
            remedy += "DistributedDataParallel over ranks of your own (docs/other_tools.md)"
            yield f"stage {stage.index} has {stage.replicas} replicas", remedy
    if plan.training.loss_reduction == "callable":
        message = "loss_reduction is a function, and torch weighs all microbatches alike"
        yield message, "plan with loss_reduction='mean' or 'sum'"
    if plan.training.loss_scaling:
        message = "the plan scales losses for float16, and the script has no GradScaler of all "
        remedy = "plan with autocast='bfloat16' and without grad_scaler (--grad-scaler)"
        yield f"{message}stages", remedy


def unlike_torch(graph: OpGraph, plan: Plan, stages: Sequence[NeighbourStage]) -> Iterator[Refusal]:
    """Refusals of this model, for what the script would get wrong; `graph` is that of training."""
    last = stages[-1].interface.train
    ports: list[Port] = [p for one in stages for p in (*one.from_call, *one.received)]
    for port in (*ports, *last.loss_inputs):
        if port.path is not None and not port.path.isidentifier():
            message = f"input {port.path!r} is inside of a container, and torch splits whole "
            yield f"{message}tensors", "give the model (or loss_fn) its tensors one by one"
        if port.path is not None and port.batch_dim != 0:
            remedy = "give it samples as its first dimension, or make it inside of the model"
            yield f"input {port.path!r} has no row for each sample", remedy
    if not stages[0].received:
        yield "the first stage reads no input", "plan with fewer stages"
    if last.loss is None:
        yield "the model has no loss to train on", "give the workload a loss_fn, and batches"
    given = {port.value for port in stages[-1].sent}
    for port in last.loss_inputs:
        if port.path != "target" and port.value not in given:
            message = f"the loss reads {port.name!r}, which the last stage does not have"
            yield message, "pin what makes it to the last stage (--pin)"
    for op in _random_ops(graph):
        if plain_name(op) not in _QUIET:
            message = f"{op.target} at {op.source} draws random numbers, and a pipeline draws "
            message += "others than plain PyTorch, so that the two could not be compared"
            yield message, "leave it out of the model that is exported"
    ops = {op.name: op for op in graph.ops}
    for stage, planned in zip(stages, plan.stages, strict=True):
        written = written_buffers(ops[name] for name in planned.ops if name in ops)
        if planned.recompute and (held := sorted(written.intersection(stage.interface.buffers))):
            message = f"stage {planned.index} recomputes and writes buffer {held[0]!r}, which "
            yield f"{message}torch.utils.checkpoint would write twice", "plan with recompute=False"


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


def _script(capture: Capture, plan: Plan, stages: Sequence[NeighbourStage], target: str) -> str:
    """The text of ``train.py``, which imports the `target` so."""
    n, (place, _, function) = len(stages), target.rpartition(":")
    quiet, training = bool(_random_ops(capture.train)), plan.training
    recomputes = any(stage.recompute for stage in plan.stages)
    kept = {
        "file": is_file(place),
        "module": not is_file(place),
        "quiet": quiet,
        "recomputes": recomputes,
        "quietly_again": quiet and recomputes,
        "opaque": any(stage.interface.opaque for stage in stages),
        "tied": bool(plan.tied),
        "clips": bool(training.max_grad_norm),
        "divides": training.loss_reduction == "mean",
        "own_loss": not stages[-1].interface.train.loss_inputs,
        "casts": on_gpu(training.autocast),
    }
    words = {
        "model": model_name(capture),
        "about": _about(target, quiet=quiet),
        "imports": "\n".join(sorted(f"from stage_{k} import Stage{k}" for k in range(n))),
        "fill": "fill, " if kept["opaque"] else "",
        "quoted_place": quote(place),
        "place": place,
        "function": function,
        "classes": ", ".join(f"Stage{k}" for k in range(n)) + "," * (n == 1),
        "tables": "\n".join(_tables(plan, stages)),
        "loss": _loss(stages[-1]),
        "again": ", context_fn=quietly" if quiet else "",
        "quietly": "NoDropout()" if quiet else "contextlib.nullcontext()",
    }
    return filled(TEMPLATE, kept, words | _of_plan(plan))


def _of_plan(plan: Plan) -> dict[str, Any]:
    """Words of the template that a plan alone tells."""
    training, n = plan.training, len(plan.stages)
    mean = training.loss_reduction == "mean"
    # Tied weights are summed in another order than eager has; optimizers such as Adam make much of
    # that where the true gradient is zero.
    shares = ("1e-2", "0.03", "1.0") if training.autocast else ("1e-5", "1e-3", "0.1")
    copies = "{(k, name) for holders in TIED for k, name in holders[1:]}"
    return {
        "stages": n,
        "schedule": f"Schedule{training.kind.in_torch}",
        # Torch's zero bubble detaches in place what is sent, which may be saved, or a view.
        "own": ".clone(memory_format=torch.contiguous_format)"
        if training.kind.splits_backward
        else ".contiguous()",
        "ranks": plan.num_ranks,
        "steps": STEPS,
        "batch": training.batch_size,
        "microbatches": training.num_microbatches,
        "tied_copies": copies if plan.tied else "set()",
        "limit": repr(training.max_grad_norm),
        "stages_of_rank": "stages" if n > plan.num_ranks else "stages[0]",
        "scale": "" if mean else ", scale_grads=False",
        "mean": "mean" if mean else "sum",
        "region": _region(training.autocast or ""),
        "no_casts": NO_CASTS,
        **dict(zip(("loss_share", "gradient_share", "weight_share"), shares, strict=True)),
    }


def _about(target: str, *, quiet: bool) -> str:
    kind = "file" if is_file(target.rpartition(":")[0]) else "module"
    return textwrap.fill(
        f"Model, data and loss are those of {clean(target, 80)}.  After {STEPS} steps it compares "
        "losses, weights, and buffers after one, with those of plain PyTorch, and exits 1 unless "
        f"equal within tolerances that it prints{QUIETLY if quiet else ''}.  Needs torch, the "
        f"files beside it, and that {kind} with what it imports.  Written by pdcompile, as a place "
        "to begin.",
        WIDTH,
        break_long_words=False,
    )


def _random_ops(graph: OpGraph) -> list[Op]:
    """Ops that may draw random numbers."""
    return [op for op in graph.ops if op.draw is not None]


def _region(autocast: str) -> str:
    """The autocast region of the whole model as source."""
    kind, _, dtype = autocast.rpartition(":")
    shown = f"torch.autocast({quote(kind)}, dtype=torch.{dtype})"
    return shown if autocast else "contextlib.nullcontext()"


def _tables(plan: Plan, stages: Sequence[NeighbourStage]) -> Iterator[str]:
    """Lines of the tables that say what goes where."""
    yield "FLOW = (  # values that each stage gets, reads, makes and gives, as the graph names them"
    for stage, planned in zip(stages, plan.stages, strict=True):
        reads = stage.interface.train.inputs
        flow = {
            "receives": [port.value for port in stage.received],
            "from_call": {port.value: port.path for port in stage.from_call},
            "reads": [port.value for port in reads],
            "writes": [port.value for port in reads if port.mutated],
            "makes": [port.value for port in stage.interface.train.outputs],
            "sends": [port.value for port in stage.sent],
            "recomputes": planned.recompute,
        }
        yield "    {"
        for name, values in flow.items():
            shown = textwrap.indent(pformat(values, width=WIDTH - 30, compact=True), " " * 22)
            yield f'        "{name}": {shown.strip()},'
        yield "    },"
    yield ")"
    yield f"RANKS = {tuple(own[0] for own in plan.ranks)}  # of each stage"
    inputs, later = stages[0].received, (p for one in stages for p in one.from_call)
    yield f"INPUTS = {[port.path for port in inputs]}  # of the first stage, in its order"
    yield f"LATER = {list(dict.fromkeys(port.path for port in later))}  # of later ones, by name"
    yield "CROSSING = (  # into each stage, out of the last one: shape, dtype, gradient?"
    for ports in (*(stage.received for stage in stages), stages[-1].sent):
        yield "    ["
        for port in ports:
            row = f"({sizes(port.shape)}, torch.{port.dtype}, {port.requires_grad})"
            yield f"        {row},  # {clean(port.value, 60)}"
        yield "    ],"
    yield ")"
    if plan.tied:
        yield "TIED = (  # holders of one weight: stage, name"
        for one in plan.tied:
            held = ((k, name_on(stages[k].interface, one.fqn)) for k in one.stages)
            yield f"    {tuple(held)},"
        yield ")"


def _loss(stage: NeighbourStage) -> str:
    """The loss of a microbatch, from what the last stage gives."""
    signature, given = stage.interface.train, [port.value for port in stage.sent]
    if not signature.loss_inputs:
        return f"output[{given.index(signature.loss or '')}]  # the model's own"
    arguments = ", ".join(
        "target" if port.path is not None else f"output[{given.index(port.value)}]"
        for port in signature.loss_inputs
    )
    return f"parts[{stage.interface.index}].loss({arguments})"
