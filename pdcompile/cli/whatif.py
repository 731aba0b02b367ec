"""``pdcompile whatif``: the problem inside a plan, solved again under other limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from pdcompile.cli.app import app
from pdcompile.cli.options import AsJson, PlanFile, machines, search, takes_flags, training
from pdcompile.errors import ConfigError
from pdcompile.plan import Plan
from pdcompile.problem.scenario import Scenario, parse_devices, parse_named
from pdcompile.schedule.registry import KINDS
from pdcompile.units import parse_bytes, parse_rate, parse_seconds

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
        int | None, training(metavar="M", help="Microbatches in a minibatch.")
    ] = None
    batch_size: Annotated[int | None, training(help="Samples in a minibatch.")] = None
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
            latency=_named(self.latency, "--latency", _latency),
            speed=tuple(_speed(text) for text in self.speed or ()),
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
    limits. Costs are those of the plan. No plan is written: its stages would need the model, and
    the command that makes it is printed. Needs no model and no torch.

    Examples:

      pdcompile whatif plan.json --memory 24GB --bandwidth inter=12.5GB/s --devices 4x8

      pdcompile whatif plan.json --schedule 2bw --json
    """  # fmt: skip
    scenario = flags.scenario()
    from pdcompile.cli.output import emit_json, stderr, stdout, write_text
    from pdcompile.passes.planning.whatif import whatif as answered
    from pdcompile.passes.planning.whatif_command import command
    from pdcompile.report.progress import compiling
    from pdcompile.report.whatif_table import document, whatif_report

    loaded = Plan.load(plan)
    with compiling(lines=not as_json, title="solving") as listener:
        listener.starts("again")
        found = answered(
            loaded, scenario, time_limit=flags.time_limit, progress=listener.found, where=str(plan)
        )
    if write_cluster is not None:
        write_text(write_cluster, found.after.cluster.to_toml())
    output = plan.with_name(f"{plan.stem}.whatif.json")  # and this plan stays
    line, notes = command(found, loaded, str(output), write_cluster)
    if as_json:
        emit_json(document(found, line, notes))
        return
    console = stdout()
    console.print(whatif_report(found))
    # A command that can be pasted is never broken.
    console.print(f"to get this plan: {line}", markup=False, soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", markup=False)
    if write_cluster is not None:
        stderr().print(f"written: {write_cluster}", markup=False, soft_wrap=True)


def _memory(text: str | None) -> int | Literal["none"] | None:
    if text is None:
        return None
    return "none" if text.strip().lower() == "none" else parse_bytes(text, what="--memory")


def _named(
    texts: Sequence[str] | None, option: str, parse: Callable[[str], float]
) -> tuple[tuple[str | None, float], ...]:
    return tuple(parse_named(text, option, parse) for text in texts or ())


def _rate(text: str) -> float:
    if text.strip().lower() == "unlimited":
        return math.inf
    rate = parse_rate(text, what="--bandwidth", where="--bandwidth")
    if rate <= 0:
        raise ConfigError(
            f"--bandwidth {text!r} is not above 0", where="--bandwidth", remedy="12.5GB/s"
        )
    return rate


def _latency(text: str) -> float:
    return parse_seconds(text, what="--latency", where="--latency")


def _speed(text: str) -> tuple[int | None, float]:
    def factor(number: str) -> float:
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"--speed {text!r} is not a number above 0",
                where="--speed",
                remedy="--speed 2, or --speed 3=0.5 for device 3",
            )
        return value

    name, value = parse_named(text, "--speed", factor)
    if name is None:
        return None, value
    if not (name.isascii() and name.isdigit()):
        raise ConfigError(
            f"--speed {text!r}: {name!r} is not a device",
            where="--speed",
            remedy="--speed 3=0.5 for device 3, counted from 0",
        )
    return int(name), value
