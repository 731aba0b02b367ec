"""``pdcompile whatif``: the problem inside a plan, solved again under other limits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pdcompile.cli.app import app
from pdcompile.cli.options import AsJson, PlanFile, machines, search, takes_flags, training
from pdcompile.errors import ConfigError
from pdcompile.plan import Plan
from pdcompile.problem.scenario import Scenario, parse_devices, parse_named
from pdcompile.schedule.registry import KINDS
from pdcompile.units import format_seconds, parse_bytes, parse_rate, parse_seconds

if TYPE_CHECKING:
    from pdcompile.passes.planning.whatif import Answer

CHANGED = "changed.toml"  # the changed machines, where nobody has written them to a file yet
SHOWN = ("training", "cluster", "stages", "certificate", "forecast")  # of each side, as JSON
COSTS = (
    "costs are those of the plan; memory is that of the schedule's ledger, where activations and "
    "workspace of another cut are added up over ops, which a plan counts exactly"
)
LEVEL = "NAME is a level of the plan's cluster, intra (innermost) or inter (outermost); none: all."


@dataclass(frozen=True, slots=True)
class WhatifFlags:
    """One field an option; the field's annotation is its help."""

    devices: Annotated[
        str | None,
        machines(
            metavar="HOSTSxDEVICES",
            help="Other machines of the same kind, one stage a device: 4x8.",
        ),
    ] = None
    memory: Annotated[
        str | None,
        machines(
            metavar="BYTES", help="Memory limit of every device, for example 24GB; none: no limit."
        ),
    ] = None
    bandwidth: Annotated[
        list[str] | None,
        machines(
            metavar="[NAME=]RATE",
            help=f"Bandwidth of links, for example inter=12.5GB/s or 25Gbit/s. {LEVEL} "
            "May be given several times.",
        ),
    ] = None
    latency: Annotated[
        list[str] | None,
        machines(
            metavar="[NAME=]TIME",
            help="Latency of a message, for example inter=5us. Named as --bandwidth.",
        ),
    ] = None
    speed: Annotated[
        list[str] | None,
        machines(
            metavar="[DEVICE=]FACTOR",
            help="Speed of devices relative to that of the costs: 2, or 3=0.5 for device 3.",
        ),
    ] = None
    schedule: Annotated[str | None, training(help=f"One of {', '.join(KINDS)}.")] = None
    microbatches: Annotated[
        int | None, training(metavar="M", min=1, help="Microbatches in a minibatch.")
    ] = None
    batch_size: Annotated[int | None, training(min=1, help="Samples in a minibatch.")] = None
    time_limit: Annotated[
        float | None,
        search(
            metavar="SECONDS",
            min=0,
            help="Stop the search then, with the best answer so far and its gap.",
        ),
    ] = None

    def scenario(self) -> Scenario:
        """The scenario that the flags describe.  Raises ConfigError for a malformed value."""
        return Scenario(
            devices=None if self.devices is None else parse_devices(self.devices),
            memory_bytes=_memory(self.memory),
            bandwidth=_named(self.bandwidth, "--bandwidth", _rate),
            latency=_named(self.latency, "--latency", parse_seconds),
            speed=tuple(
                (_device(name), factor) for name, factor in _named(self.speed, "--speed", _factor)
            ),
            schedule=self.schedule,
            microbatches=self.microbatches,
            batch_size=self.batch_size,
        )


@app.command()
@takes_flags
def whatif(
    plan: PlanFile,
    flags: WhatifFlags,
    write_cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the changed cluster, for `pdcompile plan --cluster FILE`."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What would the best plan be on other machines or with another schedule?

    The problem that the planner solved is in the plan file; it is solved again under the changed
    limits, and compared as `pdcompile diff` does. Costs are those of the plan. No plan is written:
    its stages would need the model, and the command that makes it is printed. Needs no model and
    no torch.

    Examples:

      pdcompile whatif plan.json --memory 24GB --bandwidth inter=12.5GB/s --devices 4x8

      pdcompile whatif plan.json --schedule 2bw --json
    """  # fmt: skip
    scenario = flags.scenario()
    from pdcompile.cli.output import emit_json, stderr, stdout, write_text
    from pdcompile.jsonio import encode
    from pdcompile.passes.planning.whatif import command
    from pdcompile.passes.planning.whatif import whatif as answered
    from pdcompile.plan.diff import diff
    from pdcompile.report.diff_table import diff_report
    from pdcompile.report.progress import compiling

    loaded = Plan.load(plan)
    with compiling(lines=not as_json, title="solving") as listener:
        listener.starts("again")
        before, answer, notes = answered(
            loaded, scenario, time_limit=flags.time_limit, progress=listener.found, where=str(plan)
        )
    if write_cluster is not None:
        write_text(write_cluster, answer.plan.cluster)
    output = str(plan.with_name(f"{plan.stem}.whatif.json"))  # and this plan stays
    line = command(loaded, answer, scenario, output, str(write_cluster or CHANGED))
    notes += tuple(_about_command(loaded, answer.plan, line))
    found = diff(before, answer.plan)
    if as_json:
        sides = {"before": before, "after": answer.plan, "own_cut": answer.own}
        shown = {
            side: None if one is None else {name: encode(getattr(one, name)) for name in SHOWN}
            for side, one in sides.items()
        }
        status = {"status": answer.plan.certificate.status}
        about = {"broken": answer.broken, "notes": notes, "command": line}
        emit_json(status | {"differences": encode(found)} | shown | about)
        return
    console = stdout()
    console.print(diff_report(found, str(plan), "what if"))
    console.print(_own_cut(answer), markup=False)
    for note in (*notes, COSTS):
        console.print(f"note: {note}", markup=False)
    # A command that can be pasted is never broken.
    console.print(f"to get this plan: {line}", markup=False, soft_wrap=True)
    if write_cluster is not None:
        stderr().print(f"written: {write_cluster}", markup=False, soft_wrap=True)


def _about_command(plan: Plan, after: Plan, line: str) -> Iterator[str]:
    if CHANGED in line:
        yield f"--write-cluster {CHANGED} makes that file"
    if plan.training.batch_size != after.training.batch_size:
        yield f"TARGET has to give minibatches of {after.training.batch_size} samples"
    if not plan.command:
        yield (
            "the plan does not tell the command that made it: give the options, optimizer and "
            "costs that it was made with"
        )


def _own_cut(answer: Answer) -> str:
    """Seconds of a step with the plan's own cut, or the reason for none."""
    from pdcompile.report.labels import change

    if answer.own is None:
        return f"the plan's own cut would not do: {answer.broken[0]}"
    own, best = answer.own.certificate, answer.plan.certificate
    if [stage.ops for stage in answer.own.stages] == [stage.ops for stage in answer.plan.stages]:
        return "the plan's own cut stays the best that was found"
    training = answer.plan.training
    steps = training.num_microbatches if training.kind.stream else 1
    slower = change(own.objective_seconds, best.objective_seconds)
    seconds = format_seconds(own.objective_seconds * steps)
    return f"the plan's own cut would take {seconds} a step ({slower})"


def _memory(text: str | None) -> int | Literal["none"] | None:
    if text is None or text.strip().lower() == "none":
        return None if text is None else "none"
    return parse_bytes(text, what="--memory")


def _named(
    texts: Sequence[str] | None, option: str, parse: Callable[..., float]
) -> tuple[tuple[str | None, float], ...]:
    number = functools.partial(parse, what=option, where=option)
    return tuple(parse_named(text, option, number) for text in texts or ())


def _rate(text: str, *, what: str, where: str) -> float:
    rate = (
        math.inf
        if text.strip().lower() == "unlimited"
        else parse_rate(text, what=what, where=where)
    )
    if rate <= 0:
        raise ConfigError(f"{what} {text!r} is not above 0", where=where, remedy="12.5GB/s")
    return rate


def _factor(text: str, *, what: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        remedy = "--speed 2, or --speed 3=0.5 for device 3"
        raise ConfigError(f"{what} {text!r} is not a number above 0", where=where, remedy=remedy)
    return value


def _device(name: str | None) -> int | None:
    if name is not None and not (name.isascii() and name.isdigit()):
        raise ConfigError(
            f"--speed: {name!r} is not a device",
            where="--speed",
            remedy="--speed 3=0.5 for device 3, counted from 0",
        )
    return None if name is None else int(name)
