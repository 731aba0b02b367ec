"""Start: who compiles, and how the result reaches every rank.

Rank 0 runs the passes once and hands the result to the others, so that all ranks run one plan;
a failure there is raised on every rank.
"""

from __future__ import annotations

import base64
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdcompile import weights
from pdcompile.cluster import Cluster
from pdcompile.compiled import Compiled
from pdcompile.errors import ConfigError, PlanError, SourceError
from pdcompile.ir.graph import OpGraph, fingerprint
from pdcompile.ir.stage_interface import Sources
from pdcompile.options import Options
from pdcompile.options.choices import Choices, machines
from pdcompile.passes import codegen
from pdcompile.passes.schedules import make_stream
from pdcompile.passes.stages.assemble import FINGERPRINT_DIGITS
from pdcompile.plan import Plan, check
from pdcompile.runtime.prepared import Prepared
from pdcompile.runtime.transport.launch import from_rank0, is_distributed, num_ranks
from pdcompile.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from torch import nn

    from pdcompile.batch import FlatCall

Build = Callable[["FlatCall | None", "int | None"], Compiled]


def preparation(
    model: nn.Module, options: Options, build: Build
) -> Callable[[FlatCall | None], Prepared]:
    """What the pipeline calls with its first minibatch."""

    def prepare(flat: FlatCall | None) -> Prepared:
        ranks = num_ranks(options)
        if ranks is None:
            compiled = build(flat, None)
        else:
            compiled = _decode(from_rank0(options, lambda: _encode(build(flat, ranks))))
        refuse_devices(compiled.plan)
        refuse_unbuilt(compiled.plan)
        assert compiled.sources is not None, "more than a plan was asked for"
        return Prepared(
            capture=compiled.capture,
            plan=compiled.plan,
            interfaces=compiled.sources.interfaces,
            stage_classes=codegen.stage_classes(compiled.sources),
            eval_edges=compiled.eval_edges,
            stream=make_stream(compiled.plan),
            layout=compiled.layout,
            in_process=ranks is None,
            explain=compiled.explain,
            dump=lambda folder: compiled.dump(folder, model),
        )

    return prepare


def check_given(options: Options) -> None:
    """Read the files that the options name, and see whether stages and cluster agree.

    Only in one process: under torchrun rank 0 compiles, and the others need not have them.

    Raises:
        PdcompileError: a plan or cluster cannot be read, or they contradict each other.
    """
    if is_distributed(options):
        return
    machines(following(options), None)


def check_weights(model: nn.Module, options: Options) -> None:
    """Compare the names in the source of weights with the model's, before hours of planning.

    Raises ConfigError when it cannot be read or does not fit; values are not read.
    """
    if options.weights is not None:
        weights.check(model, weights.open_source(options.weights))


def refuse_devices(plan: Plan) -> None:
    """Plans may be for any machine; what runs here runs on the CPU.  Raises ConfigError."""
    cluster = Cluster.from_toml(plan.cluster, where="plan: cluster")
    others = sorted({device.kind for device in cluster.devices} - {"cpu"})
    if others:
        raise ConfigError(
            f"the plan is for {', '.join(others)} devices, and this version runs on cpu only",
            where="cluster",
            remedy='describe the machines that it is to run on now, with kind = "cpu"; '
            "`pdcompile plan`, `simulate` and `dump` work for any kind",
        )


def refuse_unbuilt(plan: Plan) -> None:
    """Plans may use more than the runtime can do so far.  Raises ConfigError."""
    for stage in plan.stages:
        for found, remedy in (
            (stage.replicas > 1 and f"has {stage.replicas} replicas", "one replica a stage"),
            (stage.recompute and "recomputes its forward", "stages that do not recompute"),
        ):
            if found:
                raise ConfigError(
                    f"stage {stage.index} {found}, which is planned, checked and simulated, but "
                    "does not run yet",
                    where=f"plan: stages[{stage.index}]",
                    remedy=f"plan with {remedy}",
                )


def given_plan(options: Options, chosen: Choices, graph: OpGraph) -> Plan | None:
    """The plan that the user gives (a `Plan` or the path of plan.json), None without one.

    A folder of sources brings its own plan: its stages are cut as that plan says.

    Raises:
        PlanError: it cannot be read, is of another model, or contradicts the other options.
    """
    plan = _plan_of(options)
    if plan is None:
        return None
    training = plan.training
    wanted = {
        "schedule": (training.schedule, chosen.schedule),
        "stages": (len(plan.stages), chosen.num_stages),
        "microbatches": (training.num_microbatches, chosen.num_microbatches),
        "batch size": (training.batch_size, chosen.batch_size),
        "max_grad_norm": (training.max_grad_norm, chosen.max_grad_norm),
        "loss_reduction": (training.loss_reduction, chosen.loss_reduction),
        "autocast": (training.autocast, chosen.autocast),
        "seed": (training.seed, chosen.seed),
    }
    for name, (planned, asked) in wanted.items():
        if planned != asked:
            raise PlanError(
                f"the plan was made for {name} {planned!r}, and {asked!r} is asked for",
                where="plan",
                remedy="plan again with these options, or give the options of the plan",
            )
    if plan.fingerprint.split(".")[0] != fingerprint(graph)[:FINGERPRINT_DIGITS]:
        raise PlanError(
            "the plan is of another model: the fingerprint of the captured graph differs",
            where="plan",
            remedy="plan again for this model",
        )
    check(plan, graph, Cluster.from_toml(plan.cluster, where="plan: cluster"))
    return plan


def following(options: Options) -> Options:
    """With a plan given, it decides what the options leave open: stages and microbatches.

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
                f"{name} is for the search, and a plan is given: it would have no effect",
                remedy=f"leave {name} out, or plan again with it",
            )
    if options.microbatches == "auto":
        options = replace(options, microbatches=plan.training.num_microbatches)
    if options.stages is None:
        options = replace(options, stages=len(plan.stages))
    return options if options.plan is None else replace(options, plan=plan)


def chosen_sources(options: Options, generated: Sources) -> Sources:
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
    return given if isinstance(given, Plan) else _read_plan(given)


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


def _read_plan(given: Any) -> Plan:
    try:
        content = Path(given).read_bytes()
    except (OSError, TypeError) as error:
        raise PlanError(
            f"cannot read the plan: {error}",
            where=str(given),
            remedy="give a Plan, the path of a plan.json, or a folder that dump wrote",
        ) from error
    return Plan.from_json(content, where=str(given))


def _encode(compiled: Compiled) -> str:
    # The ranks of one job trust each other: the same program started all of them.
    return base64.b64encode(pickle.dumps(compiled)).decode()


def _decode(text: str) -> Compiled:
    with warnings.catch_warnings():
        # torch's own unpickling of a pytree spec warns of a name that torch deprecates.
        warnings.filterwarnings("ignore", message=".*treespec.*", category=FutureWarning)
        compiled: Compiled = pickle.loads(base64.b64decode(text))
    return compiled
