"""The options that several verbs share, and how they become `Options` and a compiled plan."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from pdcompile.cli.dry_run import intended, show
from pdcompile.clusters import cluster_of, names
from pdcompile.errors import ConfigError
from pdcompile.files import VARIABLE as CACHE
from pdcompile.options import OUTPUTS, Options
from pdcompile.options.option_texts import (
    check_one_of,
    microbatches_of,
    numbers_of,
    optimizer_of,
    recompute_of,
    reduction_of,
    refine_of,
    replicas_of,
)
from pdcompile.pass_runner import collecting_seldom
from pdcompile.plan import Plan
from pdcompile.plan.other_model import recorded_reduction
from pdcompile.problem.constraints import KINDS as CONSTRAINTS
from pdcompile.problem.constraints import parsed
from pdcompile.schedule.registry import DEFAULT, described, several_a_rank, usual_stages
from pdcompile.schedule.written import named
from pdcompile.units import parse_bytes
from pdcompile.workload import Workload

if TYPE_CHECKING:
    from pdcompile.compiled import Compiled

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        show_default=False,
        help="file.py:function or package.module:function that returns a pdcompile.Workload.",
    ),
]
PlanFile = Annotated[
    Path, typer.Argument(metavar="PLAN", show_default=False, help="plan.json, made by `plan -o`.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print exactly one JSON object on stdout, nothing else.")
]

# Options by the panel of the help that shows them.
machines = functools.partial(typer.Option, rich_help_panel="Machines")
training = functools.partial(typer.Option, rich_help_panel="Training")
search = functools.partial(typer.Option, rich_help_panel="Search")
constraint = functools.partial(typer.Option, rich_help_panel="Constraints")


@dataclass(frozen=True, slots=True)
class Flags:
    """One field an option; the field's annotation is its help.

    None is what is not said: a given plan says it, or else the default of `Options` holds.
    """

    cluster: Annotated[
        str,
        machines(
            metavar="WHAT",
            help="cluster.toml, 2x4 (hosts x devices), 2x8:h100 (of machines with a name: "
            f"{', '.join(names())}), local:4 (four stages in one process), or auto: one device a "
            "process.",
        ),
    ] = "auto"
    stages: Annotated[
        int | None,
        machines(
            help=f"Stages; default: {usual_stages()}. Under {several_a_rank()} also a multiple "
            "of the devices, which take turns."
        ),
    ] = None
    memory: Annotated[
        str | None,
        machines(
            metavar="BYTES", help="Memory limit of every device, for example '16 GB' or '512 MiB'."
        ),
    ] = None
    schedule: Annotated[
        str | None,
        training(
            help=f"{described()}; FILE.csv: your own (see pdcompile "
            f"schedule); auto: the planner chooses of those that update as "
            f"eager does, and that --max-staleness allows. Default: {DEFAULT}."
        ),
    ] = None
    replicas: Annotated[
        str | None,
        machines(
            metavar="R|R,R,…|equal|any",
            help="Devices of a stage, which take microbatches in turn: so many for all stages, one "
            "number a stage, equally many for all, or as many as is best; default: 1.",
        ),
    ] = None
    recompute: Annotated[
        str | None,
        training(
            metavar="off|on|auto|1,0,…",
            help="Keep only a stage's inputs and run forward again before backward: all stages, "
            "where memory asks for it, or one number a stage; default: off.",
        ),
    ] = None
    microbatches: Annotated[
        str, training(metavar="M", help="Microbatches in a minibatch, or auto.")
    ] = "auto"
    outputs: Annotated[
        str | None,
        training(
            metavar="|".join(OUTPUTS),
            help="Outputs of training steps: none (evaluation: none, and evaluation's on all "
            "ranks); what the last stage makes; those of earlier stages too, which are sent to it; "
            "and on all ranks. Evaluation gives everything. Default: last, where that takes at "
            "most 2 % of its rank's memory.",
        ),
    ] = None
    max_grad_norm: Annotated[
        float | None, training(help="Clip gradients to this norm over all stages.")
    ] = None
    grad_scaler: Annotated[
        bool | None,
        training(
            "--grad-scaler",
            help="Scale losses for float16 and skip updates that overflow, as a "
            "torch.amp.GradScaler with its defaults does.",
        ),
    ] = None
    linear_lr_scaling: Annotated[
        bool | None,
        training(
            "--linear-lr-scaling",
            help="Learning rates in proportion to the replicas of a stage, where an update "
            "averages a minibatch of each.",
        ),
    ] = None
    autocast: Annotated[
        str | None,
        training(
            metavar="DTYPE", help="Run model and loss in torch.autocast: bfloat16 or float16."
        ),
    ] = None
    loss_reduction: Annotated[
        str | None,
        training(
            metavar="mean|sum|FILE:FUNCTION",
            help="What the loss is over a minibatch: the mean (default) or sum of its samples' "
            "losses, or a mean over the items that a function (args, kwargs, target) counts.",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        training(
            metavar="CLASS|FILE:FUNCTION|none",
            help="A class of torch.optim, or a function of parameters (.named: with names) that "
            "makes an optimizer; its state counts in memory. Default: TARGET's, or AdamW.",
        ),
    ] = None
    lr: Annotated[
        float | None, training(metavar="RATE", help="Learning rate of a class; default: 3e-4.")
    ] = None
    seed: Annotated[int | None, training(help="Seed of dropout and of the search; default: 0.")] = (
        None
    )
    costs: Annotated[
        str,
        search(
            help="measured: time the ops here; estimated: from FLOPs and bytes; or a profile file."
        ),
    ] = "measured"
    refine: Annotated[
        str,
        search(
            metavar="auto|on|off",
            help="Time the planned stages, rescale the costs of their ops and plan again; auto: "
            "with measured costs, when that takes seconds.",
        ),
    ] = "auto"
    time_limit: Annotated[
        float | None,
        search(
            metavar="SECONDS", help="Stop the search then, with the best plan so far and its gap."
        ),
    ] = None

    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Say what would be done, and do nothing of it but load TARGET."
        ),
    ] = False
    no_cache: Annotated[
        bool,
        search(
            "--no-cache",
            help="Measure anew: read and write no file of ~/.cache/pdcompile (PDCOMPILE_CACHE: "
            "another folder, or off).",
        ),
    ] = False
    cut_tolerance: Annotated[
        float | None,
        search(
            metavar="SHARE",
            help="How much slower than the fastest plan found one may be whose cuts lie at "
            "borders of modules and send less; default: 0.01, 1 %. 0: the fastest.",
        ),
    ] = None
    cut_at: Annotated[
        list[str] | None,
        constraint(
            metavar="PATTERN",
            help='Cut only where a module that matches begins or ends: --cut-at "model.layers.*" '
            "cuts between blocks alone. A PATTERN, here and below, is a module with all that is "
            "in it, an op of the graph, or several of them with * ? [], in quotes. Options of "
            "constraints can be repeated.",
        ),
    ] = None
    cut_before: Annotated[
        list[str] | None,
        constraint(
            metavar="PATTERN",
            help="A stage begins there: all that it reads is made on earlier stages.",
        ),
    ] = None
    pin: Annotated[
        list[str] | None,
        constraint(metavar="PATTERN=S", help="Runs on stage S, from 0; -1 is the last stage."),
    ] = None
    forbid: Annotated[
        list[str] | None,
        constraint(metavar="PATTERN=S,…", help="Runs on none of these stages."),
    ] = None
    together: Annotated[
        list[str] | None,
        constraint(
            metavar="PATTERN,…",
            help="All that match run on one stage: --together wte,lm_head.",
        ),
    ] = None
    apart: Annotated[
        list[str] | None,
        constraint(metavar="PATTERN,…", help="No stage has parts of two of these."),
    ] = None
    max_stages: Annotated[
        int | None,
        constraint(metavar="N", help="Leave stages empty where fewer are faster, or all that fit."),
    ] = None

    def check(self) -> None:
        """Checks the values before the target is imported, which takes seconds; without a cache,
        switches it off for this process.

        Raises:
            ConfigError: an option has an invalid value.
            ScheduleError: the schedule is a file that cannot be read.
        """
        if self.no_cache:
            os.environ[CACHE] = "off"
        if self.memory is not None:
            parse_bytes(self.memory, what="--memory", where="--memory")
        if self.schedule is not None:
            named(self.schedule)
        parsed(self._constraints())
        if self.cluster != "auto" and not self.cluster.endswith(".toml"):
            cluster_of(self.cluster)
        refine_of(self.refine)
        recompute_of(self.recompute)
        replicas_of(self.replicas)
        if self.outputs is not None:
            check_one_of("--outputs", self.outputs, OUTPUTS)
        reduction = self.loss_reduction
        if reduction is not None and ":" not in reduction:
            check_one_of("--loss-reduction", reduction, ("mean", "sum", "FILE:FUNCTION"))

    def to_options(self, workload: Workload, **more: Any) -> Options:
        """`Options` for a workload; `more` are options that only one verb has.

        Raises:
            ConfigError: a text is not a number, or there is no such optimizer.
        """
        own = {field.name for field in fields(Flags)} - {"lr", "no_cache", "dry_run", *CONSTRAINTS}
        given = {name: getattr(self, name) for name in own}
        made = {
            "constraints": parsed(self._constraints()),
            "loss_fn": workload.loss_fn,
            "optimizer": _optimizer(self, workload),
            "loss_reduction": reduction_of(self.loss_reduction or _planned(more)),
            "refine": refine_of(self.refine),
            "recompute": recompute_of(self.recompute),
            "replicas": replicas_of(self.replicas),
        }
        if "microbatches" not in more:
            made["microbatches"] = microbatches_of(self.microbatches)
        return Options.given(_with_training(given | made | more, workload))

    def _constraints(self) -> dict[str, list[str]]:
        """As they were written."""
        written = {name: getattr(self, name) or [] for name in CONSTRAINTS}
        return written | {"max_stages": [] if self.max_stages is None else [str(self.max_stages)]}


@dataclass(frozen=True, slots=True)
class GivenPlan:
    """The flag of a plan to use."""

    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Use this plan instead of searching for one."),
    ] = None

    def to_options(self) -> dict[str, Any]:
        """The plan as an option.  Raises PlanError: it cannot be read."""
        if self.plan is None:
            return {"plan": None}
        return {"plan": Plan.load(self.plan), "plan_file": str(self.plan)}


@dataclass(frozen=True, slots=True)
class GivenSources(GivenPlan):
    """The flags of a plan and of stages to use, which may have been edited."""

    sources: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Use the stages in this folder, with its plan.json."),
    ] = None
    allow_edited: Annotated[
        bool, typer.Option("--allow-edited", help="Use --sources also where they were edited.")
    ] = False

    def to_options(self) -> dict[str, Any]:
        """As `GivenPlan.to_options`; the plan of a folder of sources is the one in it."""
        own = None if self.sources is None else self.sources / "plan.json"
        sources = None if self.sources is None else str(self.sources)
        found = GivenPlan(self.plan or own).to_options()
        return found | {"sources": sources, "allow_edited": self.allow_edited}


@dataclass(frozen=True, slots=True)
class PlanFlags(Flags):
    """The flags of `plan`, which may leave more open."""

    microbatches: Annotated[
        str,
        training(
            metavar="M",
            help="Microbatches in a minibatch, auto, or several to choose from: 4,8,16.",
        ),
    ] = "auto"
    warmup: Annotated[
        str | None,
        search(
            metavar="auto|E",
            help="Microbatches in flight between neighbouring stages beyond one, to hide "
            "transfers; auto: 0 or 1.",
        ),
    ] = None
    max_staleness: Annotated[
        str,
        search(
            metavar="0|1|any",
            help="With --schedule auto: how many minibatches old the weights may be that "
            "gradients are of.",
        ),
    ] = "0"

    def check(self) -> None:
        """As `Flags.check`."""
        Flags.check(self)
        self._search()

    def to_options(self, workload: Workload, **more: Any) -> Options:
        """`Flags.to_options`, with what the planner decides besides the cut."""
        return Flags.to_options(self, workload, **self._search(), **more)

    def _search(self) -> dict[str, Any]:
        """The options of the search.  Raises ConfigError: a flag has no such value."""
        check_one_of("--max-staleness", self.max_staleness, ("0", "1", "any"))
        staleness = int(self.max_staleness) if self.max_staleness.isdigit() else "any"
        found: dict[str, Any] = {"max_staleness": staleness}
        straight = self.replicas in (None, "1")
        asked = not straight or self.warmup is not None or self.recompute in ("on", "auto")
        if asked or "," in self.microbatches or self.schedule == "auto":
            if straight:  # of as many stages as are best
                found["replicas"] = "1"
            if self.warmup not in (None, "auto"):
                found["extra_warmup"] = numbers_of("--warmup", self.warmup)
            if self.microbatches != "auto":
                counts = numbers_of("--microbatches", self.microbatches)
                found |= {"microbatch_counts": counts, "microbatches": counts[0]}
        return found


def _with_training(said: dict[str, Any], workload: Workload) -> dict[str, Any]:
    """The options, with what the workload says of its training where nothing else is said."""
    silent = {name: one for name, one in workload.options.items() if said.get(name) is None}
    return said | silent | {"optimizer": said["optimizer"]}  # none is said, too


def _optimizer(flags: Flags, workload: Workload) -> Any:
    """That of the flags, else the workload's, else AdamW."""
    if flags.optimizer is not None or "optimizer" not in workload.options:
        return optimizer_of(flags.optimizer or "AdamW", flags.lr)
    if flags.lr is not None:
        raise ConfigError(
            f"--lr {flags.lr:g} would have no effect: TARGET has an optimizer of its own",
            where="--lr",
            remedy="leave --lr out, or give --optimizer too",
        )
    return workload.options["optimizer"]


def _planned(more: Mapping[str, Any]) -> str | None:
    """The loss reduction that a plan's command named, where it is a function in the very file that
    this command runs; another file is not run because a plan names it."""
    plan, place = more.get("plan"), str(more.get("command_target", "")).rpartition(":")[0]
    word = recorded_reduction(plan) if isinstance(plan, Plan) else ""
    return word if word and word.rpartition(":")[0] == place else None


def compiled(
    target: str,
    flags: Flags,
    given: GivenPlan | None = None,
    *,
    writes: Path | None = None,
    as_json: bool = False,
    **more: object,
) -> tuple[Workload, Compiled]:
    """Load the target and run every pass on it, with a bar or lines on stderr.

    With --dry-run it ends there, and says what the verb would do; `writes`: where to.

    Raises:
        PdcompileError: whatever the target or a pass refuses.
    """
    from pdcompile.workload import load_target

    flags.check()
    if given is not None:
        more |= given.to_options()
    # As many threads as torchrun gives a process: the times are to be those of a run.  Read when
    # torch is imported, which the target does.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with collecting_seldom():
        workload = load_target(target)
        options = flags.to_options(workload, progress=True, command_target=target, **more)
        inputs, expected = workload.example()
        if flags.dry_run:
            show(intended(workload, options, inputs, expected), writes, as_json=as_json)

        # The compiler is imported last: a mistake in the target is reported at once.
        from pdcompile import driver
        from pdcompile.batch import example_call

    flat = example_call(workload.model, inputs, expected)
    return workload, driver.build(workload.model, flat, options)


def words_of(flags: Flags) -> tuple[str, ...]:
    """The options that decide what becomes of a target, as ``--name=value``."""
    found = []
    for field in fields(flags):
        value = getattr(flags, field.name)
        if value == field.default or field.name in ("no_cache", "dry_run"):
            continue
        name = f"--{field.name.replace('_', '-')}"
        values = value if isinstance(value, list) else [value]
        found += [name if one is True else f"{name}={one}" for one in values]
    return tuple(found)


def takes_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb an option for each field of each dataclass among its parameters."""
    signature = inspect.signature(verb, eval_str=True)
    own: list[inspect.Parameter] = []
    added: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        kind = parameter.annotation
        if not is_dataclass(kind):
            own.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[name] = kind
        hints = get_type_hints(kind, include_extras=True)
        added += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY,
                default=field.default, annotation=hints[field.name],
            )
            for field in fields(kind)
        ]  # fmt: skip

    @functools.wraps(verb)
    def wrapped(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        verb(**made, **given)

    del wrapped.__wrapped__  # inspect must see the new signature, not the old one
    wrapped.__signature__ = signature.replace(parameters=own + added)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {
        parameter.name: parameter.annotation for parameter in own + added
    } | {"return": None}
    return wrapped
