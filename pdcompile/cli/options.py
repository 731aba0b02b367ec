"""The options that several verbs share, and how they become `Options` and a compiled plan.

Those of `pdcompile.compile` are rows of `pdcompile.options.table`, flags too; here are the flags
that stand for none of these alone.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdcompile.cli.app import app, unwrapped
from pdcompile.cli.output import Result, check_places, is_first_rank
from pdcompile.errors import ConfigError
from pdcompile.options import Options, texts
from pdcompile.options.row import Flag, Row, rows_of
from pdcompile.options.table import PLANNING, ROWS
from pdcompile.pass_runner import collecting_seldom
from pdcompile.plan import Plan
from pdcompile.problem.constraints import KINDS as CONSTRAINTS
from pdcompile.problem.constraints import Constraint, parsed
from pdcompile.workload import Workload, load_target

if TYPE_CHECKING:
    from pdcompile.compiled import Compiled


def argument(metavar: str, help: str) -> Any:
    """Argument that a verb cannot do without."""
    return typer.Argument(metavar=metavar, show_default=False, help=help)


def written_to(help: str, metavar: str = "FILE") -> Any:
    """Option ``-o``: the place of a verb's result."""
    return typer.Option("-o", "--output", metavar=metavar, help=help)


Target = Annotated[
    str,
    argument(
        "TARGET", "file.py:function or package.module:function that returns a pdcompile.Workload."
    ),
]
PlanFile = Annotated[Path, argument("PLAN", "plan.json, made by `plan -o`.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print exactly one JSON object on stdout, nothing else.")
]

AGAIN = ("whatif",)  # verbs whose options are those of a plan where nothing else is said
WARMUP = Row(
    "Microbatches in flight between neighbouring stages beyond one, to hide transfers; auto: 0 or "
    "1.",
    flag=Flag("auto|E", texts.warmup, verbs=PLANNING, remedy="auto, or numbers such as 0,1"),
    name="warmup",
    panel="Search",
)
OWN = {
    "lr": Row(
        "Learning rate of a class; default: 3e-4.",
        flag=Flag("RATE", type=float, least=0),
        panel="Training",
    ),
    "warmup": WARMUP,
    **{
        name: Row(text, flag=Flag(form, type=list[str]), panel="Constraints")
        for name, form, text in (
            (
                "cut_at",
                "PATTERN",
                'Cut only where a module that matches begins or ends: --cut-at "model.layers.*" '
                "cuts between blocks alone. A PATTERN, here and below, is a module with all that "
                "is in it, an op of the graph, or several of them with * ? [], in quotes. Options "
                "of constraints can be repeated.",
            ),
            (
                "cut_before",
                "PATTERN",
                "A stage begins there: all that it reads is made on earlier stages.",
            ),
            ("pin", "PATTERN=S", "Runs on stage S, from 0; -1 is the last stage."),
            ("together", "PATTERN,…", "All that match run on one stage: --together wte,lm_head."),
            ("apart", "PATTERN,…", "No stage has parts of two of these."),
            (
                "split_of",
                "PATTERN=AXIS",
                "Divided along this axis of --split, or whole, where its stage has parts: "
                '--split-of "h.*.mlp=sequence".',
            ),
        )
    },
}


def parameters_of(verb: str, rows: Mapping[str, Row]) -> list[inspect.Parameter]:
    """The flags that a verb has of some rows, as typer takes them."""
    flags = [(replace(row, name=name), row.flag) for name, row in rows.items() if row.flag]
    shown = verb not in AGAIN
    return [_parameter(row, flag, shown) for row, flag in flags if verb in (flag.verbs or (verb,))]


def _parameter(row: Row, flag: Flag, shown: bool) -> inspect.Parameter:
    """The flag of a row; its default is what is not said: `shown`, or None."""
    default = None if callable(row.unsaid) or not shown else row.unsaid
    if flag.type is str and isinstance(default, int):
        default = str(default)
    option = typer.Option(
        *([row.written] if flag.type is bool else []),
        metavar=flag.form,
        rich_help_panel=row.panel or None,
        help=f"{flag.help or row.help} {flag.more}".rstrip(),
        min=flag.least,
    )
    kind = flag.type | None if default is None else flag.type
    return inspect.Parameter(
        row.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


@dataclass(frozen=True, slots=True)
class Flags:
    """Values of a command line by the names of rows, as they are written there.

    What is not said, a given plan says, or else the default of `Options` holds.
    """

    said: Mapping[str, Any]
    verb: str = "run"

    def check(self) -> None:
        """Checks the values before the target is imported, which takes seconds.

        Raises:
            ConfigError: an option has an invalid value, or the schedule has not that.
            ScheduleError: the schedule is a file that cannot be read.
        """
        from pdcompile.options.chosen_schedule import chosen_schedule

        self._constraints()
        chosen_schedule(Options.given(self._read()))

    def given(self) -> dict[str, Any]:
        """Options of a plan and stages to use; the plan of a folder of stages is the one in it.

        Raises:
            PlanError: it cannot be read.
        """
        sources: Path | None = self.said.get("sources")
        path: Path | None = self.said.get("plan") or (sources and sources / "plan.json")
        found: dict[str, Any] = {} if sources is None else {"sources": str(sources)}
        return found if path is None else found | {"plan": Plan.load(path), "plan_file": str(path)}

    def to_options(self, workload: Workload, **more: Any) -> Options:
        """`Options` for a workload; `more` are options that the verb decides, and `given`.

        Raises:
            ConfigError: there is no such optimizer, or no function of that name.
        """
        reduction = self.said.get("loss_reduction") or _planned(more)
        found = self._read() | {
            "constraints": self._constraints(),
            "loss_fn": workload.loss_fn,
            "loss_reduction": texts.reduction_of(reduction),
        }
        found |= more
        silent = {name: one for name, one in workload.options.items() if found.get(name) is None}
        return Options.given(found | silent | {"optimizer": self._optimizer(workload)})

    @staticmethod
    def of_words(words: Sequence[str], verb: str) -> dict[str, Any]:
        """Values by the names of a verb's rows, of what `words` gave.

        Raises:
            ConfigError: it has no such option any more, or not with such a value.
        """
        rows, said = {**ROWS, **OWN}, dict[str, Any]()
        for word in words:
            name, is_given, value = word.removeprefix("--").partition("=")
            flag = rows.get(name := name.replace("-", "_"), Row("")).flag
            try:
                wants = flag is not None and flag.type is not bool
                if not flag or verb not in (flag.verbs or (verb,)) or wants != bool(is_given):
                    raise ValueError(word)
                if flag.type == list[str]:
                    said[name] = [*said.get(name, []), value]
                else:
                    said[name] = flag.type(value) if is_given else True
            except ValueError as error:
                raise ConfigError(
                    f"the plan's command has {word}, which is no option of pdcompile {verb}",
                    where="plan: command",
                    remedy="make the plan again with this version: pdcompile plan TARGET",
                ) from error
        return said

    def words(self) -> tuple[str, ...]:
        """The options that decide what becomes of a target, as ``--name=value``."""
        found = []
        for name, value in self.said.items():
            values = value if isinstance(value, list) else [value]
            flag = f"--{name.replace('_', '-')}"
            found += [flag if one is True else f"{flag}={one}" for one in values]
        return tuple(found)

    def _read(self) -> dict[str, Any]:
        """Options of the table from their texts; of a plan, what the planner decides too."""
        found = {name: row.read(self.said[name]) for name, row in ROWS.items() if name in self.said}
        return found | self._search(found) if self.verb == "plan" else found

    def _search(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Options of the search beside the cut.  Raises ConfigError: there is no such warm-up."""
        found: dict[str, Any] = {}
        counts = said.get("microbatches", "auto")
        warmup = WARMUP.read(self.said["warmup"]) if "warmup" in self.said else None
        straight = said.get("replicas", 1) == 1
        asked = not straight or warmup is not None or said.get("recompute") in (True, "auto")
        if asked or isinstance(counts, tuple) or said.get("schedule") == "auto":
            if straight:  # of as many stages as are best
                found["replicas"] = "1"
            for name, one in (("extra_warmup", warmup), ("microbatch_counts", counts)):
                if one not in (None, "auto"):
                    found[name] = one if isinstance(one, tuple) else (one,)
            if counts != "auto":
                found["microbatches"] = found["microbatch_counts"][0]
        return found

    def _constraints(self) -> tuple[Constraint, ...]:
        """Raises ConfigError: one is written in another form."""
        return parsed({name: self.said.get(name) or [] for name in CONSTRAINTS})

    def _optimizer(self, workload: Workload) -> Any:
        """Optimizer of the flags, else the workload's, else AdamW."""
        name, lr = self.said.get("optimizer"), self.said.get("lr")
        if name is not None or "optimizer" not in workload.options:
            return texts.optimizer_of(name or "AdamW", lr)
        if lr is not None:
            raise ConfigError(
                f"--lr {lr:g} would have no effect: TARGET has an optimizer of its own",
                where="--lr",
                remedy="leave --lr out, or give --optimizer too",
            )
        return workload.options["optimizer"]


def _planned(more: Mapping[str, Any]) -> str | None:
    """The loss reduction that a plan's command named, where it is a function in the very file that
    this command runs; another file is not run because a plan names it."""
    plan, place = more.get("plan"), str(more.get("command_target", "")).rpartition(":")[0]
    word = plan.named_reduction if isinstance(plan, Plan) else ""
    return word if word and word.rpartition(":")[0] == place else None


def compiled(target: str, flags: Flags, **more: object) -> tuple[Workload, Compiled]:
    """Load the target and run every pass on it, with a bar or lines on stderr.

    Raises:
        PdcompileError: whatever the target or a pass refuses.
    """
    from pdcompile.report.progress import working

    # As many threads as torchrun gives a process: the times are to be those of a run.  Read when
    # torch is imported, which the check does.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with collecting_seldom():
        flags.check()
        more |= flags.given()
        with working("loading", target):
            workload = load_target(target)
        options = flags.to_options(workload, progress=True, command_target=target, **more)
        example = workload.example()

        # The compiler is imported last: a mistake in the target is reported at once.
        from pdcompile import driver
        from pdcompile.batch import example_call
        from pdcompile.options.option_checks import check_options
        from pdcompile.passes.trace.global_state import freeze

        freeze()  # what was loaded stays: each full collection of it took half a second
    check_options(options)
    return workload, driver.build(workload.model, example_call(workload.model, *example), options)


def verb(group: typer.Typer = app) -> Callable[[Callable[..., Result | None]], object]:
    """Decorator that adds a function to the verbs of a group.

    It gets ``--json``, its flags of the table in place of a parameter that is `Flags`, and an
    option for each field of a dataclass among its parameters; what it returns is printed.
    """
    return lambda function: group.command(help=unwrapped(function.__doc__ or ""))(
        _as_command(function)
    )


def _as_command(verb: Callable[..., Result | None]) -> Callable[..., None]:
    signature = inspect.signature(verb, eval_str=True)
    own: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, list[inspect.Parameter]]] = {}
    for name, parameter in signature.parameters.items():
        kind = parameter.annotation
        if is_dataclass(kind):
            rows = {**ROWS, **OWN} if kind is Flags else rows_of({"": parameter.annotation})
            groups[name] = (kind, parameters_of(verb.__name__, rows))
        else:
            own.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    kind = inspect.Parameter.KEYWORD_ONLY
    own.append(inspect.Parameter("as_json", kind, default=False, annotation=AsJson))
    added = [one for _, parameters in groups.values() for one in parameters]

    @functools.wraps(verb)
    def wrapped(*, as_json: bool, **given: Any) -> None:
        if is_first_rank():
            check_places(given)
        made = {}
        for name, (kind, parameters) in groups.items():
            values = {one.name: given.pop(one.name) for one in parameters}
            if kind is Flags:
                said = {p.name: v for p in parameters if (v := values[p.name]) != p.default}
                made[name] = Flags(said, verb.__name__)
            else:
                made[name] = kind(**values)
        found = verb(**made, **given)
        if found is not None:
            found.print(as_json=as_json)
            if found.exit_code:
                raise typer.Exit(found.exit_code)

    del wrapped.__wrapped__  # inspect must see the new signature, not the old one
    wrapped.__signature__ = signature.replace(parameters=own + added)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {
        parameter.name: parameter.annotation for parameter in own + added
    } | {"return": None}
    return wrapped
