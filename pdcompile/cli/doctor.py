"""``pdcompile doctor``: what is here, and does it work?"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdcompile.cli.options import verb, written_to
from pdcompile.cli.output import EXIT_DIFFERENT, Result, is_first_rank, write_text
from pdcompile.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from pdcompile.cli.self_test import Outcome
    from pdcompile.hardware.checkup import Line
    from pdcompile.passes.probe.probed import Probed

STYLES = {"ok": "green", "look": "yellow", "wrong": "bold red"}


@verb()
def doctor(
    devices: Annotated[
        bool,
        typer.Option(
            "--devices",
            help="Also run a self-test of about a minute: all schedules, links and ops.",
        ),
    ] = False,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A plan.json, to be held against what is here."),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="That the plan is to run on; default: those of torchrun, or one."),
    ] = None,
    output: Annotated[Path | None, written_to("Where the report of --devices goes, too.")] = None,
) -> Result | None:
    """Look at this host: versions, processes and threads, memory, disk, network, devices, plan.

    Nothing is run, it takes a second or two. "look" is worth a thought, "wrong" stands in the way.

    With --devices, under torchrun, a small model is trained under every schedule on the devices
    that are here, and losses and weights are compared with pdcompile.reference in plain PyTorch;
    links and ops are measured. The report that it prints is made to be pasted into an issue. It
    names this host.

    Exit codes: 0 nothing is wrong, 1 something is, or a schedule differs.

    Examples:

      pdcompile doctor

      pdcompile doctor --plan plan.json --processes 4

      torchrun --nproc-per-node=2 -m pdcompile doctor --devices
    """
    from pdcompile.hardware.checkup import checkup

    if output is not None and not devices:
        raise ConfigError("-o has no effect without --devices", remedy="give both, or leave -o out")
    if devices:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many as torchrun gives a process
        began = time.monotonic()
        probed, outcomes = tested()
        taken = time.monotonic() - began
    if not is_first_rank():
        return None
    lines = checkup(plan, processes)
    wrong = any(line.state == "wrong" for line in lines)
    document: dict[str, Any] = {"lines": lines}
    if devices:
        wrong |= not all(outcome.passed for outcome in outcomes)
        text = report(lines, probed, outcomes, taken)
        document |= {"schedules": outcomes, "seconds": taken}
        if output is not None:
            write_text(output, text)
    shown = text if devices else table(lines)
    document = {"status": "wrong" if wrong else "done", **document}
    return Result(document, [shown], exit_code=EXIT_DIFFERENT if wrong else 0)


def tested() -> tuple[Probed, list[Outcome]]:
    """The self-test; all ranks call it, rank 0 has the outcomes."""
    from pdcompile.cli.self_test import self_test
    from pdcompile.passes.probe.links import alone, job
    from pdcompile.passes.probe.probed import probe
    from pdcompile.report.progress import working

    place = job() if "WORLD_SIZE" in os.environ else alone()
    with working("doctor", "testing") as live, place as (rank, ranks, device):
        found = probe(rank, ranks, device, live.found)
        return found, self_test(rank, ranks, device, live.found)


def table(lines: Sequence[Line]) -> Table:
    """One row a line, grouped by what it is about."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    about = ""
    for line in lines:
        text = Text(line.text)
        if line.remedy and line.state != "ok":
            text.append(f"\n{line.remedy}", style="italic")
        state = Text(line.state, style=STYLES[line.state])
        shown.add_row("" if line.about == about else Text(line.about, style="bold"), state, text)
        about = line.about
    return shown


def report(
    lines: Sequence[Line], probed: Probed, outcomes: Sequence[Outcome], seconds: float
) -> str:
    """The report of a self-test, as Markdown."""
    from pdcompile.cli.probe import lines as measured
    from pdcompile.units import format_seconds

    passed = sum(outcome.passed for outcome in outcomes)
    kind = probed.devices[0].name
    ranks = len(probed.devices)
    parts = [
        "## pdcompile doctor --devices",
        "",
        f"{passed} of {len(outcomes)} schedules equal the reference, on {ranks} x {kind}, "
        + (f"{ranks} processes" if ranks > 1 else "one process")
        + f"; {seconds:.0f} s",
        "",
        "| schedule | against the reference | a step |",
        "|---|---|---|",
        *(
            f"| {one.schedule} | {one.result}{': ' + one.said if one.said else ''} | "
            f"{format_seconds(one.step_seconds) if one.difference is not None else ''} |"
            for one in outcomes
        ),
        "",
        "```",
        *measured(probed),
        "",
        *(
            f"{line.about}: {'' if line.state == 'ok' else line.state.upper() + ': '}{line.text}"
            for line in lines
        ),
        "```",
    ]
    return "\n".join(parts) + "\n"
