"""``train.py``: stages in torch.distributed.pipelining, compared with plain PyTorch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from pdcompile.eager.autocast import NO_CASTS, on_gpu
from pdcompile.ir.graph import Capture, Op, OpGraph
from pdcompile.ir.stage_interface import Port
from pdcompile.passes.codegen.header import model_name
from pdcompile.passes.codegen.source_text import WIDTH, Line, clean, render, shape_text
from pdcompile.passes.export.crossings import NeighbourStage, value_names
from pdcompile.passes.export.subject import Source
from pdcompile.passes.form.expressions import quote
from pdcompile.plan import Plan

TEMPLATE = Path(__file__).with_name("train.py.txt")
STEPS = 3
QUIETLY = "; both run without dropout for that"
_OWN = (
    "workload", "call_of", "examples", "make_parts", "load", "fill", "tied_groups",
    "sum_tied", "clip", "rows", "plain", "train", "make_optimizer", "make_loss", "loss_fn",
    "difference", "gradient", "agree", "main", "output", "target", "last", "parts", "dist", "os",
    "sys", "copy", "checkpoint", "again",
)  # fmt: skip


def train_file(
    capture: Capture,
    plan: Plan,
    stages: Sequence[NeighbourStage],
    source: Source,
    optimizer: str,
) -> str:
    """The text of ``train.py``.  What torch would get wrong was refused before."""
    names, n = value_names(stages, _OWN), len(stages)
    quiet, training = bool(random_ops(capture.train)), plan.training
    recomputes = any(stage.recompute for stage in plan.stages)
    kept = {
        "file": source.is_file,
        "module": not source.is_file,
        "quiet": quiet,
        "recomputes": recomputes,
        "again": quiet and recomputes,
        "opaque": any(stage.interface.opaque for stage in stages),
        "tied": bool(plan.tied),
        "clips": bool(training.max_grad_norm),
        "divides": training.loss_reduction == "mean",
        "own_loss": not stages[-1].interface.train.loss_inputs,
        "casts": on_gpu(training.autocast),
    }
    parts = (render(_part(stage, names, plan, quiet=quiet)) for stage in stages)
    words = {
        "model": model_name(capture),
        "about": _about(source, quiet=quiet),
        "imports": "\n".join(sorted(f"from stage_{k} import Stage{k}" for k in range(n))),
        "fill": "fill, " if kept["opaque"] else "",
        "quoted_place": quote(source.place),
        "place": source.place,
        "function": source.function,
        "parts": "\n\n\n".join(part.strip("\n") for part in parts),
        "tables": render(_tables(plan, stages, names)).strip("\n"),
        "loss": render(_make_loss(stages[-1], names, training.autocast)).strip("\n"),
        "optimizer": optimizer,
        "quietly": "NoDropout()" if quiet else "contextlib.nullcontext()",
    }
    # Names of the model are never looked through.
    text = _chosen(TEMPLATE.read_text(encoding="utf-8"), kept)
    return Template(text).substitute(words | _of_plan(plan))


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
        "schedule": torch_schedule(plan),
        "ranks": plan.num_ranks,
        "steps": STEPS,
        "batch": training.batch_size,
        "microbatches": training.num_microbatches,
        "tied_copies": copies if plan.tied else "set()",
        "limit": repr(training.max_grad_norm),
        "stages_of_rank": "stages" if n > plan.num_ranks else "stages[0]",
        "scale": "" if mean else ", scale_grads=False",
        "mean": "mean" if mean else "sum",
        "region": _region(training.autocast) or "contextlib.nullcontext()",
        "no_casts": NO_CASTS,
        **dict(zip(("loss_share", "gradient_share", "weight_share"), shares, strict=True)),
    }


def _chosen(template: str, kept: Mapping[str, bool]) -> str:
    """The lines of a template, of those between ``#if name`` and ``#end``, or another ``#if``, the
    ones that are kept."""
    lines, keeps = [], True
    for line in template.splitlines(keepends=True):
        if line.startswith("#if "):
            keeps = kept[line.split()[1]]
        elif line == "#end\n":
            keeps = True
        elif keeps:
            lines.append(line)
    return "".join(lines)


def _about(source: Source, *, quiet: bool) -> str:
    where = clean(f"{source.place}:{source.function}", 80)
    return textwrap.fill(
        f"Model, data and loss are those of {where}.  After {STEPS} steps it compares losses, "
        "weights and buffers with those of plain PyTorch, and exits 1 unless they are equal "
        f"within tolerances that it prints{QUIETLY if quiet else ''}.  Needs torch, the files "
        f"beside it, and that {'file' if source.is_file else 'module'} with what it "
        "imports.  Written by pdcompile, as a place to begin.",
        WIDTH,
        break_long_words=False,
    )


def torch_schedule(plan: Plan) -> str:
    """The class of torch's schedule of the same order."""
    return f"Schedule{plan.training.kind.in_torch}"


def random_ops(graph: OpGraph) -> list[Op]:
    """Ops that may draw random numbers."""
    return [op for op in graph.ops if op.draw is not None]


def _region(autocast: str | None) -> str:
    """The autocast region of the whole model as source; "" without one."""
    if autocast is None:
        return ""
    kind, _, dtype = autocast.rpartition(":")
    return f"torch.autocast({quote(kind)}, dtype=torch.{dtype})"


def _part(
    stage: NeighbourStage, names: dict[str, str], planned: Plan, *, quiet: bool
) -> list[Line]:
    """The class of a stage in the chain of neighbours."""
    interface = stage.interface
    k, region = interface.index, _region(planned.training.autocast)
    arguments = ["self", *(names[port.value] for port in stage.received)]
    if stage.shared:
        arguments.append("/")  # later stages get some of these by name, and this one too
    if stage.from_call:
        arguments += ["*", *(names[port.value] for port in stage.from_call)]
    own = ", ".join(_argument(port, names) for port in interface.train.inputs)
    made = [names[port.value] for port in interface.train.outputs]
    sent = [names[port.value] + ("" if _by_rows(port) else ".contiguous()") for port in stage.sent]
    lines = [Line(f"class Part{k}(Stage{k}):")]
    if stage.handed_on:
        handed = ", ".join(names[port.value] for port in stage.handed_on)
        lines += [Line(f'"""Hands on {handed}."""', depth=1, is_text=True), Line()]
    lines.append(Line(f"def forward({', '.join(arguments)}, **_):", depth=1))
    if region:
        lines.append(Line(f"with {region}:", depth=2))
    left = ", ".join(made) if len(made) > 1 else f"({made[0]},)"
    call = f"super().forward({own})"
    if planned.stages[k].recompute:
        again = ", context_fn=again" if quiet else ""
        call = f"checkpoint(super().forward, {own}, use_reentrant=False{again})"
    lines.append(Line(f"{left} = {call}", depth=3 if region else 2))
    lines.append(Line(f"return {', '.join(sent) if len(sent) > 1 else f'({sent[0]},)'}", depth=2))
    return lines


def _by_rows(port: Port) -> bool:
    """True if a tensor lies in memory row by row, as receive buffers do."""
    return port.stride_order in ((), tuple(range(len(port.shape))))


def _argument(port: Port, names: dict[str, str]) -> str:
    """A stage that writes into its input gets a copy: autograd's leaf is the received tensor."""
    return names[port.value] + (".clone()" if port.mutated else "")


def _tables(plan: Plan, stages: Sequence[NeighbourStage], names: dict[str, str]) -> list[Line]:
    n = len(stages)
    ranks = ", ".join(str(own[0]) for own in plan.ranks)
    comma = "," if n == 1 else ""
    inputs = [quote(port.path or "") for port in stages[0].received]
    later = dict.fromkeys(quote(p.path or "") for one in stages for p in one.from_call)
    lines = [
        Line(f"PARTS = ({', '.join(f'Part{k}' for k in range(n))}{comma})"),
        Line(f"RANKS = ({ranks}{comma})", "of each stage"),
        Line(f"INPUTS = [{', '.join(inputs)}]", "of the first stage, in its order"),
        Line(f"LATER = [{', '.join(later)}]", "inputs of later stages, by name"),
        Line("CROSSING = (  # into each stage, out of the last one: shape, dtype, gradient?",
             is_text=True),
    ]  # fmt: skip
    for ports in (*(stage.received for stage in stages), stages[-1].sent):
        lines.append(Line("[", depth=1, is_text=True))
        for port in ports:
            lines.append(Line(f"({_shape(port)}, torch.{port.dtype}, {port.requires_grad}),",
                              f"{names[port.value]} {shape_text(port.shape, port.dtype)}", 2,
                              is_text=True))  # fmt: skip
        lines.append(Line("],", depth=1, is_text=True))
    lines.append(Line(")", is_text=True))
    if plan.tied:
        lines.append(Line("TIED = (  # holders of one weight: stage, name", is_text=True))
        for one in plan.tied:
            held = ", ".join(f"({k}, {quote(_name_on(stages[k], one.fqn))})" for k in one.stages)
            lines.append(Line(f"({held}),", depth=1, is_text=True))
        lines.append(Line(")", is_text=True))
    return lines


def _name_on(stage: NeighbourStage, fqn: str) -> str:
    aliases = stage.interface.aliases.items()
    return next((name for name, canonical in aliases if canonical == fqn), fqn)


def _shape(port: Port) -> str:
    sizes = [
        str(size) if isinstance(size, int) else str(size).replace("b", "B") for size in port.shape
    ]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def _make_loss(stage: NeighbourStage, names: dict[str, str], autocast: str | None) -> list[Line]:
    """The loss of a microbatch, of what the last stage gave."""
    signature, k = stage.interface.train, stage.interface.index
    lines = [
        Line("def make_loss(parts):"),
        Line('"""The loss of one microbatch, from what the last stage gives."""', "", 1, True),
        Line(),
        Line("def loss_fn(output, target):", depth=1),
    ]
    given = [port.value for port in stage.sent]
    if not signature.loss_inputs:
        place = given.index(signature.loss or "")
        lines.append(Line(f"return output[{place}]", "the model's own", 2))
        return [*lines, Line(), Line("return loss_fn", depth=1)]
    arguments = ", ".join(
        "target" if port.path is not None else f"output[{given.index(port.value)}]"
        for port in signature.loss_inputs
    )
    region = _region(autocast)
    if region:
        lines.append(Line(f"with {region}:", depth=2))
    lines.append(Line(f"return parts[{k}].loss({arguments})", depth=3 if region else 2))
    return [*lines, Line(), Line("return loss_fn", depth=1)]
