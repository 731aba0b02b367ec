"""Plans and sources that the user gives in place of the passes that would make them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from pdcompile import weights
from pdcompile.cluster import Cluster
from pdcompile.errors import ConfigError, PlanError, SourceError
from pdcompile.ir.graph import LeftOut, OpGraph, fingerprint, walk
from pdcompile.ir.stage_interface import Sources
from pdcompile.options import Options
from pdcompile.options.configuration import Configuration, machines, recomputation
from pdcompile.passes import codegen
from pdcompile.passes.stages.assemble import FINGERPRINT_DIGITS, with_own_bytes
from pdcompile.passes.stages.boundaries import stage_of_ops
from pdcompile.passes.stages.kept_outputs import given_by, left_out_bytes, planned
from pdcompile.plan import Plan, Training, check
from pdcompile.runtime.transport.launch import is_distributed
from pdcompile.schedule.registry import name_of
from pdcompile.units import format_bytes, parse_bytes

# Fields of `Training` in which a given plan has to be what the options ask for.
COMPARED = (
    ("schedule", "schedule"), ("num_microbatches", "microbatches"), ("batch_size", "batch size"),
    ("max_grad_norm", "max_grad_norm"), ("loss_reduction", "loss_reduction"),
    ("autocast", "autocast"), ("seed", "seed"), ("linear_lr_scaling", "linear_lr_scaling"),
)  # fmt: skip


def check_given(model: nn.Module, options: Options) -> None:
    """Read the files that the options name, and compare stages with machines, names with weights.

    Plan and cluster only in one process: under torchrun rank 0 compiles, and the others need not
    have them.  Of weights names are read, not values.

    Raises:
        PdcompileError: a file cannot be read, contradicts another, or does not fit the model.
    """
    if not is_distributed(options):
        machines(with_given_plan(options), None)
    if options.weights is not None:
        weights.check(model, weights.open_source(options.weights))


def with_given_plan(options: Options) -> Options:
    """The options, with stages and microbatches of a given plan where they leave these open.

    Raises:
        PlanError: the plan cannot be read.
        ConfigError: options that a given plan would leave without effect.
    """
    plan = _plan_of(options)
    if plan is None:
        return options
    for name in ("constraints", "time_limit"):
        if getattr(options, name) not in (None, (), []):
            raise ConfigError(
                f"{name} would have no effect: it is an option of the search, and a plan is given",
                remedy=f"leave {name} out, or plan again with it",
            )
    if options.microbatches == "auto":
        options = replace(options, microbatches=plan.training.num_microbatches)
    if options.stages is None:
        options = replace(options, stages=len(plan.stages))
    return replace(options, plan=plan)


def given_plan(options: Options, chosen: Configuration, graph: OpGraph) -> Plan | None:
    """The plan that the user gives (a `Plan` or the path of plan.json), None without one.

    A folder of sources brings its own plan: its stages are cut as that plan says.

    Raises:
        PlanError: it cannot be read, is of another model, or contradicts the other options.
    """
    plan = _plan_of(options)
    if plan is None:
        return None
    compared: list[tuple[str, object, object]] = [("stages", len(plan.stages), chosen.num_stages)]
    asked_again = recomputation(options, chosen.num_stages)
    if asked_again is not None and options.recompute is not False:
        again = tuple(stage.recompute for stage in plan.stages)
        compared.append(("recompute", again, asked_again))
    counts = tuple(stage.replicas for stage in plan.stages)
    if (many := _replicas(options, counts)) is not None:
        compared.append(("replicas", counts, many))
    for field, name in COMPARED:
        compared.append((name, getattr(plan.training, field), getattr(chosen.training, field)))
    for name, stated, asked in compared:
        if stated != asked:
            if name == "schedule":
                stated, asked = name_of(str(stated)), name_of(str(asked))
            differs = " with other tasks" if stated == asked else ""
            raise PlanError(
                f"the plan has {name}={stated!r}, but the options ask for {asked!r}{differs}",
                where="plan",
                remedy=_remedy(compared),
            )
    needed = planned(graph, plan.training)
    if plan.fingerprint.split(".")[0] != fingerprint(needed)[:FINGERPRINT_DIGITS]:
        raise PlanError(
            "the plan is of another model: the fingerprint of the captured graph differs",
            where="plan",
            remedy="plan again for this model",
        )
    check(plan, needed, Cluster.from_toml(plan.cluster, where="plan: cluster"))
    plan = _with_outputs(plan, chosen.training, options.outputs, graph)
    # Forecast and bytes may be of another day or version, or edited.
    return with_own_bytes(replace(plan, forecast=None), planned(graph, plan.training))


def _remedy(compared: list[tuple[str, object, object]]) -> str:
    """What to say with the plan, of all that differs."""
    differing = {name: stated for name, stated, asked in compared if stated != asked}
    if "schedule" in differing:
        differing["schedule"] = name_of(str(differing["schedule"]))
    # What is no option by this name, or a file that only who wrote it knows.
    loose = {"batch size", "loss_reduction"} & set(differing) or ":" in str(
        [stated for name, stated, _ in compared if name == "schedule"]
    )
    if loose:
        return "plan again with these options, or give the options of the plan"
    said = ", ".join(f"{name}={stated!r}" for name, stated in differing.items())
    return f"give {said} with the plan, as it was made with; or plan again with these options"


def _replicas(options: Options, planned: tuple[int, ...]) -> object:
    """The counts that the options ask for; None where they leave them to the plan."""
    asked = options.replicas
    if asked == "equal":
        return None if len(set(planned)) == 1 else asked
    if isinstance(asked, int):
        return None if asked == 1 else (asked,) * len(planned)
    return asked if isinstance(asked, tuple) else None


def _with_outputs(plan: Plan, chosen: Training, outputs: str, graph: OpGraph) -> Plan:
    """The plan with a note where it sends more outputs than are asked for: its times are of that.

    Raises:
        PlanError: it does not send those that are asked for.
    """
    less = replace(plan.training, keeps_outputs=True, sends_outputs=False)
    needed, last = planned(graph, less), len(plan.stages) - 1
    stage_of = stage_of_ops(needed, plan)
    given = given_by(less, needed, stage_of, last + 1)
    missing = walk(given.output, LeftOut)
    if not (plan.training.keeps_outputs and plan.training.sends_outputs):
        if missing and chosen.sends_outputs:
            raise PlanError(
                f"outputs={outputs!r} asks for all outputs of training steps, and the plan does "
                f"not send {len(missing)} of them to the last stage",
                where="plan: training.sends_outputs",
                remedy=f"plan again with outputs={outputs!r} (--outputs {outputs}), or leave "
                "outputs out: evaluation gives them all",
            )
        return replace(plan, training=replace(less, keeps_outputs=chosen.keeps_outputs))
    if not missing or chosen.sends_outputs:
        return plan
    size = format_bytes(left_out_bytes(less, needed, given, stage_of, last))
    note = (
        f"the plan sends {size} a step that only outputs need, as it was made with "
        "outputs='everything' or by an earlier version; plan again to leave them out"
    )
    return replace(plan, notes=(*plan.notes, note))


def given_sources(options: Options, generated: Sources) -> Sources:
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
        raise SourceError(
            f"{', '.join(sources.edited)} is not what this plan and model generate",
            where=str(options.sources),
            remedy="allow_edited=True (--allow-edited) runs it as it is, and explain() reports how "
            "it differs from the model; or dump the folder anew",
        )
    return sources


def _plan_of(options: Options) -> Plan | None:
    given = options.plan
    if given is None:
        if options.sources is None:
            return None
        given = Path(options.sources) / "plan.json"
    return given if isinstance(given, Plan) else Plan.load(given)


def check_memory(options: Options, plan: Plan) -> None:
    """Raise PlanError when a given plan's forecast exceeds the limit that is asked for."""
    if options.memory is None or plan.forecast is None:
        return
    limit = parse_bytes(options.memory, what="memory")
    for rank, ledger in enumerate(plan.forecast.ledgers):
        if ledger.total_bytes > limit:
            raise PlanError(
                f"rank {rank} needs {format_bytes(ledger.total_bytes)} by this plan, and memory "
                f"is limited to {format_bytes(limit)}",
                where="plan",
                remedy="plan again with this limit",
            )
