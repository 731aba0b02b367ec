"""``train.py``: stages in torch.distributed.pipelining, compared with plain PyTorch."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from pdcompile.eager.autocast import NO_CASTS, on_gpu
from pdcompile.ir.graph import Capture, Op, OpGraph
from pdcompile.ir.stage_interface import Port
from pdcompile.passes.codegen.header import model_name
from pdcompile.passes.codegen.source_text import WIDTH, Line, clean, render, shape_text
from pdcompile.passes.export import train_parts as fixed
from pdcompile.passes.export.crossings import NeighbourStage, value_names
from pdcompile.passes.export.subject import OptimizerCall, Source
from pdcompile.passes.form.expressions import quote
from pdcompile.plan import Plan
from pdcompile.plan.schema import ranks_of
from pdcompile.schedule.registry import kind_of

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
    optimizer: OptimizerCall,
) -> str:
    """The text of ``train.py``.  What torch would get wrong was refused before."""
    names = value_names(stages, _OWN)
    quiet = bool(random_ops(capture.train))
    words = _words(plan, source, stages, quiet=quiet)

    def filled(part: str) -> str:
        """A fixed part with what it leaves open; names of the model are never looked through."""
        return re.sub("|".join(map(re.escape, words)), lambda found: words[found[0]], part)

    parts = [
        _top(capture, plan, stages, source, quiet=quiet),
        *(render(_part(stage, names, plan, quiet=quiet)) for stage in stages),
        render(_tables(plan, stages, names)),
        filled(fixed.WORKLOAD_FILE if source.is_file else fixed.WORKLOAD_MODULE) + fixed.FIELDS,
        filled(fixed.MAKE_PARTS),
        render(_make_loss(stages[-1], names, plan.training.autocast)),
        f"def make_optimizer(parameters):\n    return {optimizer}",
        *([fixed.TIED] if plan.tied else []),
        *([filled(fixed.CLIP)] if plan.training.max_grad_norm else []),
        *([fixed.NO_DROPOUT] if quiet else []),
        *([fixed.AGAIN] if quiet and any(one.recompute for one in plan.stages) else []),
        filled(fixed.TRAIN),
        filled(fixed.PLAIN),
        fixed.COMPARE,
        filled(fixed.AGREE),
        filled(fixed.MAIN),
        'if __name__ == "__main__":\n    main()',
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def _words(
    plan: Plan, source: Source, stages: Sequence[NeighbourStage], *, quiet: bool
) -> dict[str, str]:
    """What the words in capitals of fixed parts stand for; a line of nothing else may go."""
    training, last = plan.training, stages[-1]
    opaque = any(stage.interface.opaque for stage in stages)
    mean = training.loss_reduction == "mean"
    several = len(plan.stages) > plan.num_ranks
    return {
        "FUNCTION": source.function,
        "PLACE": source.place,
        "    FILL\n": "    fill(parts.values(), copy.deepcopy(model))\n" if opaque else "",
        "    CASTS\n": f'    if not cuda:\n        raise SystemExit("{NO_CASTS}")\n'
        if on_gpu(training.autocast)
        else "",
        "    TIE\n": "    groups = tied_groups()\n" if plan.tied else "",
        "        SUM\n": "        sum_tied(parts, groups)\n" if plan.tied else "",
        "        OWN\n": ""
        if last.interface.train.loss_inputs
        else "        target = torch.zeros(MICROBATCHES)  # unused: the model has its own loss\n",
        "        CLIP_PARTS\n": "        clip(parts, device)\n" if training.max_grad_norm else "",
        "        CLIP_MODEL\n": "        torch.nn.utils.clip_grad_norm_(model.parameters(), "
        f"{training.max_grad_norm!r})\n"
        if training.max_grad_norm
        else "",
        "        DIVIDE\n": "        for parameter in model.parameters():\n"
        "            if parameter.grad is not None:\n"
        "                parameter.grad.div_(MICROBATCHES)\n"
        if mean
        else "",
        "LIMIT": repr(training.max_grad_norm),
        "TIED_COPIES": "{(k, name) for holders in TIED for k, name in holders[1:]}"
        if plan.tied
        else "set()",
        "SCHEDULE_CLASS": torch_schedule(plan),
        "STAGES_OF_RANK": "stages" if several else "stages[0]",
        "SCALE": "" if mean else ", scale_grads=False",
        "MEAN": "mean" if mean else "sum",
        "REGION": _region(training.autocast) or "contextlib.nullcontext()",
        "QUIET": "NoDropout()" if quiet else "contextlib.nullcontext()",
    }


def torch_schedule(plan: Plan) -> str:
    """The class of torch's schedule of the same order."""
    return f"Schedule{kind_of(plan.training.schedule).in_torch}"


def random_ops(graph: OpGraph) -> list[Op]:
    """Ops that may draw random numbers."""
    return [op for op in graph.ops if op.draw is not None]


def _top(
    capture: Capture,
    plan: Plan,
    stages: Sequence[NeighbourStage],
    source: Source,
    *,
    quiet: bool,
) -> str:
    training, n, ranks = plan.training, len(stages), plan.num_ranks
    schedule = torch_schedule(plan)
    opaque = any(stage.interface.opaque for stage in stages)
    recomputes = any(stage.recompute for stage in plan.stages)
    where = clean(f"{source.place}:{source.function}", 80)
    imports = ["contextlib", "copy"]
    imports += ["importlib.util" if source.is_file else "importlib", "inspect", "itertools"]
    lines = [
        f'"""Trains {model_name(capture)} as {n} stages with torch.distributed.pipelining: '
        f"{schedule}.",
        "",
        f"    torchrun --nproc-per-node={ranks} train.py",
        "",
        *textwrap.wrap(
            f"Model, data and loss are those of {where}.  After {STEPS} steps it compares losses, "
            "weights and buffers with those of plain PyTorch, and exits 1 unless they are equal "
            f"within tolerances that it prints{QUIETLY if quiet else ''}.  Needs torch, the files "
            f"beside it, and that {'file' if source.is_file else 'module'} with what it "
            "imports.  Written by pdcompile, as a place to begin.",
            WIDTH,
            break_long_words=False,
        ),
        '"""',
        "",
        *(f"import {name}" for name in [*imports, "os", "sys"]),
        "from pathlib import Path",
        "",
        "import torch",
        "import torch.distributed as dist",
        f"from pipeline import {'fill, ' if opaque else ''}load",
        *sorted(f"from stage_{k} import Stage{k}" for k in range(n)),
        f"from torch.distributed.pipelining import PipelineStage, {schedule}",
        *(["from torch.overrides import TorchFunctionMode"] if quiet else []),
        "from torch.utils._pytree import tree_leaves, tree_map_only",
        *(["from torch.utils.checkpoint import checkpoint"] if recomputes else []),
        "",
        "HERE = Path(__file__).resolve().parent",
        *([f"TARGET = HERE / {quote(source.place)}"] if source.is_file else []),
        f"STEPS = {STEPS}",
        *_tolerances(plan),
        f"BATCH, MICROBATCHES = {training.batch_size}, {training.num_microbatches}",
        "B = BATCH // MICROBATCHES",
    ]
    return "\n".join(lines)


def _tolerances(plan: Plan) -> list[str]:
    """By what is compared.  Tied weights are summed in another order than eager has; optimizers
    such as Adam make much of that where the true gradient is zero."""
    loss, gradient, weight = "1e-5", "1e-3", "0.1"
    if plan.training.autocast:
        loss, gradient, weight = "1e-2", "0.03", "1.0"
    return [
        "TOLERANCES = {  # shares, see difference()",
        f'    "losses": {loss},',
        f'    "last gradients": {gradient},',
        f'    "changes of weights": {weight},  # Adam: rounding over rounding',
        f'    "buffers": {loss},',
        "}",
    ]


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
    """Whether a tensor lies in memory row by row, as receive buffers do."""
    return port.stride_order in ((), tuple(range(len(port.shape))))


def _argument(port: Port, names: dict[str, str]) -> str:
    """A stage that writes into its input gets a copy: autograd's leaf is the received tensor."""
    return names[port.value] + (".clone()" if port.mutated else "")


def _tables(plan: Plan, stages: Sequence[NeighbourStage], names: dict[str, str]) -> list[Line]:
    n = len(stages)
    ranks = ", ".join(str(own[0]) for own in ranks_of(plan.stages))
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
