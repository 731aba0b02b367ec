"""Plans and sources that the user gives in place of the passes that would make them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from pdcompile.batch import BatchLayout
from pdcompile.batch.omitted_output import DROPPED
from pdcompile.checkpoint.contents import Contents
from pdcompile.checkpoint.folder import newest
from pdcompile.checkpoint.manifest import PLAN
from pdcompile.cluster import Cluster
from pdcompile.errors import ConfigError, PdcompileError, PlanError, SourceError, some
from pdcompile.hardware import devices
from pdcompile.hardware.host import memory_bytes
from pdcompile.ir.graph import Capture, LeftOut, OpGraph, fingerprint, walk
from pdcompile.ir.stage_interface import Sources
from pdcompile.options import Options
from pdcompile.options.configuration import Configuration, machines
from pdcompile.options.layouts import layouts
from pdcompile.options.of_plan import completed, refuse_others
from pdcompile.options.table import ROWS
from pdcompile.passes import codegen
from pdcompile.passes.costs.forecast import Progress
from pdcompile.passes.planning.optimizer_state import optimizer_costs
from pdcompile.passes.planning.plan_check import check_plan
from pdcompile.passes.stages.assemble import FINGERPRINT_DIGITS, with_own_bytes
from pdcompile.passes.stages.boundaries import stage_of_ops
from pdcompile.passes.stages.kept_outputs import given_by, planned
from pdcompile.plan import Plan, Training
from pdcompile.plan.host_requirements import lacks, lacks_devices
from pdcompile.problem.constraints import Placed
from pdcompile.runtime.pipeline import check_supported
from pdcompile.runtime.transport.launch import is_distributed
from pdcompile.units import format_bytes
from pdcompile.weights import source as weights

ANOTHER_MODEL = "plan again for this model, or give the target that the plan was made of"
COSTS_ARE_THE_PLANS = (
    "times are forecast from the costs in the plan; costs= (--costs) has no effect on it"
)
# Of a model that nobody has looked at.
NO_OPS = OpGraph(True, (), {}, (), {}, (), None, 1)


def check_user_files(model: nn.Module, options: Options) -> None:
    """Read the files that the options name, and compare stages with machines, names with weights.

    Plan and cluster only in one process: under torchrun rank 0 compiles, and the others need not
    have them.  Of weights names are read, not values.

    Raises:
        PdcompileError: a file cannot be read, contradicts another, or does not fit the model.
    """
    if not is_distributed(options):
        machines(layouts(with_user_plan(options, model), None)[0], None)
    if options.weights is not None:
        weights.check(model, weights.open_source(options.weights))


def read_plan(options: Options) -> Options:
    """The options with the plan that they name: in a file, or in their folder of sources.

    Raises:
        PlanError: it cannot be read.
    """
    if isinstance(options.plan, Plan) or options.plan is options.sources is None:
        return options
    file = str(Path(options.sources) / "plan.json" if options.plan is None else options.plan)
    return replace(options, plan=Plan.load(file), plan_file=file)


def check_here(options: Options, num_ranks: int | None) -> None:
    """Refuse devices that do not run, and a given plan that processes or memory which are here
    cannot run; after `read_plan`.

    Args:
        num_ranks: processes, None for one.

    Raises:
        PdcompileError: says what is missing.
    """
    plan, local = options.plan, os.environ.get("LOCAL_WORLD_SIZE", "")
    on_this_host = int(local) if local.isdecimal() else None
    if plan is None:
        _, cluster = machines(layouts(options, num_ranks)[0], num_ranks)
        here = cluster.devices[: None if num_ranks is None else on_this_host]
        for error in lacks_devices(here, alone=num_ranks is None, gpus=devices.gpus()):
            raise error
        return
    for error in lacks(
        plan,
        processes=num_ranks,
        on_this_host=on_this_host,
        memory_bytes=memory_bytes(),
        gpus=devices.gpus(),
    ):
        raise error
    check_supported(plan, NO_OPS)


def with_user_plan(options: Options, model: nn.Module | None = None) -> Options:
    """The options as a given plan completes them.

    Raises:
        PlanError: the plan cannot be read, or options contradict it and its weights the model.
        ConfigError: options that contradict the plan, or that it would leave without effect.
    """
    options = read_plan(options)
    plan = options.plan
    if plan is None:
        return options
    with places_in_its_file(options):
        for name, row in ROWS.items():
            if row.of_search and getattr(options, name) not in (None, (), [], 0):
                raise ConfigError(
                    f"{name} would have no effect: it is an option of the search, and a plan is "
                    "given",
                    remedy=f"leave {name} out, or plan again with it",
                )
        if model is not None:
            _refuse_another_model(plan, model, options.plan_file)
        refuse_others(options, plan)
    return completed(options, plan)


@contextmanager
def places_in_its_file(options: Options) -> Iterator[None]:
    """Errors name the file that the plan of the options was read from, not "plan" alone."""
    try:
        yield
    except PdcompileError as error:
        if error.where == "plan" or (error.where or "").startswith("plan: "):
            error.where = options.plan_file + str(error.where).removeprefix("plan")
        raise


def with_saved_plan(options: Options, num_ranks: int | None) -> Options:
    """The options with the plan of the checkpoint to resume, where no other is given.

    Raises:
        PdcompileError: it is damaged, or of another number of ranks.
    """
    given = options.plan is not None or options.sources is not None
    place = None if options.resume is None or given else newest(Path(options.resume))
    if place is None:
        return options
    plan = Plan.from_json(Contents(place).plan_text(), where=str(place / PLAN))
    if num_ranks not in (None, plan.num_processes):
        raise PlanError(
            f"it has {plan.num_processes} ranks, and {num_ranks} processes are running",
            where=str(place),
            remedy=f"torchrun --nproc-per-node={plan.num_processes}, or give plan= too",
        )
    # The program still says how to search, as when it began; that search is over.
    over = {name: row.unsaid for name, row in ROWS.items() if row.of_search}
    if f"constraints {some([*map(str, options.constraints)], 8)}" not in plan.certificate.scope:
        del over["constraints"]  # the plan was made under others
    return replace(options, plan=plan, plan_file=str(place / PLAN), **over)


def check_minibatch(options: Options, layout: BatchLayout) -> None:
    """Raise PlanError where a given plan is for other minibatches; after `with_user_plan`."""
    if options.plan is None:
        return
    training: Training = options.plan.training
    if layout.splits and layout.size != training.batch_size:
        raise PlanError(
            f"the plan is for minibatches of {training.batch_size} samples, and this one has "
            f"{layout.size}",
            where="plan: training.batch_size",
            remedy=f"prepare with {training.batch_size} samples, or plan again for {layout.size}",
        )
    if not layout.splits and training.num_microbatches > 1:
        raise PlanError(
            f"the plan splits minibatches into {training.num_microbatches}, and no input of this "
            "one has a dimension that counts samples",
            where="plan: training.num_microbatches",
            remedy="give batch_dims as it was planned with, or plan again",
        )


def _refuse_another_model(plan: Plan, model: nn.Module, file: str) -> None:
    """Raise PlanError where the model lacks a parameter of the plan; known before capture."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    held = ((fqn, stage.index) for stage in plan.stages for fqn in stage.parameters)
    for fqn, stage in held:
        if fqn not in known:
            raise PlanError(
                f"the plan is of another model: {plan.made_of}, and this is "
                f"{type(model).__name__}: the parameter {fqn!r} on stage {stage} is only in the "
                "plan",
                where=f"{file}: stages[{stage}].parameters",
                remedy=ANOTHER_MODEL,
            )


def user_plan(
    options: Options, chosen: Configuration, graph: OpGraph, progress: Progress | None = None
) -> Plan:
    """The plan that the user gives; after `with_user_plan`.

    A folder of sources brings its own plan: its stages are cut as that plan says.

    Raises:
        PlanError: it is of another model.
        ConfigError: it does not send the outputs that are asked for.
    """
    plan: Plan = options.plan
    needed = planned(graph, plan.training)
    try:
        check_plan(plan, needed, plan.machines)
    except PlanError as error:
        if plan.fingerprint.split(".")[0] == fingerprint(needed)[:FINGERPRINT_DIGITS]:
            raise
        split = f" or split than {plan.training.split!r}" * (plan.training.parts != 1)
        raise PlanError(
            f"the plan is of another model{split}: {plan.made_of}, and this is {graph.model}: "
            f"{error.message}",
            where=error.where,
            remedy=ANOTHER_MODEL,
        ) from None
    plan = _with_outputs(plan, chosen, options, graph)
    notes = (
        *(note for note in plan.notes if not note.startswith(DROPPED)),  # which may be kept now
        *_more_state(plan.training, options.optimizer),
        *((COSTS_ARE_THE_PLANS,) if options.costs != "measured" else ()),
    )
    plan = replace(plan, notes=notes)
    # Forecast and bytes may be of another day or version, or edited.
    return with_own_bytes(replace(plan, forecast=None), planned(graph, plan.training), progress)


def _with_outputs(plan: Plan, chosen: Configuration, options: Options, graph: OpGraph) -> Plan:
    """The plan with the outputs that are asked for; it may send more of them.

    Where nobody named any, the plan's own choice stands, but for a plan of one process on several
    or the other way; stages in a folder are as they are.

    Raises:
        ConfigError: it does not send those that are asked for.
    """
    training, asked, outputs = plan.training, chosen.training, options.outputs
    if training.outputs_by_size and "outputs" not in options.said:
        keeps = training.keeps_outputs
        if options.sources is None and options.alone:
            keeps = True
        elif options.sources is None and keeps and not chosen.idle:
            keeps = asked.keeps_outputs
        return replace(plan, training=replace(training, keeps_outputs=keeps))
    less = replace(training, keeps_outputs=True, sends_outputs=False, outputs_by_size=False)
    needed, last = planned(graph, less), len(plan.stages) - 1
    stage_of = stage_of_ops(needed, plan)
    given = given_by(less, needed, stage_of, last + 1)
    missing = walk(given.output, LeftOut)
    if not (training.keeps_outputs and training.sends_outputs):
        if missing and asked.sends_outputs:
            raise ConfigError(
                f"outputs={outputs!r} asks for all outputs of training steps, and the plan does "
                f"not send {len(missing)} of them to the last stage",
                where="plan: training.sends_outputs",
                remedy=f"plan again with outputs={outputs!r} (--outputs {outputs}), or leave "
                "outputs out: evaluation gives them all",
            )
        return replace(plan, training=replace(less, keeps_outputs=asked.keeps_outputs))
    return plan


def _more_state(training: Training, optimizer: Any) -> Iterator[str]:
    """A note on an optimizer that keeps more than the one that the plan was made with."""
    factor = optimizer_costs(optimizer)[0].factor
    if factor > training.optimizer_factor:
        yield (
            f"the optimizer keeps {factor:g} bytes for each byte of weights, and it was planned "
            f"with one that keeps {training.optimizer_factor:g}: memory is more than forecast"
        )


def user_sources(options: Options, generated: Sources) -> Sources:
    """The folder that the user gives, or what was generated.

    Raises:
        SourceError: the folder cannot be read, or holds edited files without `allow_edited`.
    """
    if options.sources is None:
        return generated
    sources = codegen.read(options.sources, generated)
    # The plan is not source: it was checked as a plan, and its times may be of another day.
    sources = replace(sources, edited=tuple(n for n in sources.edited if n.endswith(".py")))
    if sources.edited and not options.allow_edited:
        words = ("verify", options.command_target, "--sources", str(options.sources))
        raise SourceError(
            f"{', '.join(sources.edited)} is not what this plan and model generate",
            where=str(options.sources),
            remedy=f"`pdcompile {shlex.join(words)} --allow-edited` (explain() in a program) says "
            "how it differs from the model; --allow-edited (allow_edited=True) runs it as it is; "
            "or dump the stages into another folder",
        )
    return sources


def check_memory(cluster: Cluster, plan: Plan) -> None:
    """Raise PlanError when a given plan's forecast exceeds what the devices have, those that run
    it and those that it was made for."""
    made_for = plan.machines.devices if plan.cluster else ()
    for rank, device in (*enumerate(cluster.devices), *enumerate(made_for)):
        needed = sum(one.total_bytes for one in plan.ledgers[rank : rank + 1])
        if device.memory_bytes is not None and needed > device.memory_bytes:
            raise PlanError(
                f"rank {rank} needs {format_bytes(needed)} of memory by this plan, and "
                f"has {format_bytes(device.memory_bytes)}",
                where="plan",
                remedy="plan again with this limit",
            )


def in_place(options: Options, captured: Capture) -> Options:
    """Options with ops on the stages that hold their tensors, where ranks split a model; or, where
    they were written for stages, on these, whose cut kept the user's constraints."""
    if written := captured.division.stage_of:
        return replace(options, constraints=(Placed(tuple(written.items())),))
    held = [
        (op.name, options.held.get(fqn)) for op in captured.train.ops for fqn in op.used_tensors
    ]
    stages = dict.fromkeys((op, one.stages[0]) for op, one in held if one and len(one.stages) == 1)
    placed = (Placed(tuple(stages)),) if stages else ()
    return replace(options, constraints=(*options.constraints, *placed))
