"""``pdcompile schedule``: a schedule alone, proved, drawn, and written to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdcompile.cli.options import argument, verb, written_to
from pdcompile.cli.output import Result, stdout, write_text
from pdcompile.errors import ConfigError, did_you_mean
from pdcompile.plan import Plan
from pdcompile.schedule.registry import KINDS, find, flush_schedules, kind_of
from pdcompile.schedule.written import SUFFIX, Written, check_suffix, read

STAGES, MOST = 4, 1_000  # of a schedule by name, where nobody says; more take minutes to write


@verb()
def schedule(
    source: Annotated[
        str,
        argument(
            "SCHEDULE",
            f"FILE.csv; a plan.json, whose schedule is meant; or one of {flush_schedules()}.",
        ),
    ],
    stages: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help=f"Stages of a schedule by name; default: {STAGES}."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks that hold them; default: one each, or as is usual."),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, help="Microbatches of a schedule by name; default: two a stage."),
    ] = None,
    output: Annotated[Path | None, written_to("Write it to FILE.csv.")] = None,
) -> Result:
    """Prove and draw a schedule, and write it to a file to edit or to take elsewhere.

    A file has a row for each rank and a cell for each task, in the order in which the rank runs
    them: 0F3 is the forward of microbatch 3 on stage 0, B its backward, or I and W the two parts
    of one that is split (gradients of the stage's inputs, then of its weights). Empty cells
    idle, for the eye alone. This is the CSV of torch.distributed.pipelining, whose schedules come
    in as torch writes them. Which rank holds which stage follows from the rows.

    Sends, receives, sums and updates are in no cell: they are added, and the whole is proved. A
    shorter minibatch takes the same order without the microbatches that it has not. In the
    drawing a forward takes one unit, a backward two. Needs no model and no torch.

    Examples:

      pdcompile schedule 1f1b --stages 4 --microbatches 8 -o mine.csv

      pdcompile schedule mine.csv

      pdcompile plan examples/gpt.py:build --schedule mine.csv -o plan.json

      pdcompile schedule plan.json -o mine.csv
    """
    from rich.text import Text

    from pdcompile.passes.check import check
    from pdcompile.passes.schedules.alone import chain
    from pdcompile.passes.simulate import simulate_drained
    from pdcompile.report import timeline
    from pdcompile.report.labels import counted
    from pdcompile.report.progress import working

    if output is not None:
        check_suffix(output, "written to")
    counts = {"--stages": stages, "--ranks": ranks, "--microbatches": microbatches}
    known = ":" not in source and find(source)
    written = (_by_name if known else _of_file)(source, counts)
    plan = chain(str(written), len(written.placement), written.num_microbatches, len(written.rows))
    size = (
        f"{counted(len(written.placement), 'stage')} on {counted(len(written.rows), 'rank')}, "
        f"{counted(written.num_microbatches, 'microbatch', 'microbatches')}"
    )
    with working("proving", size):
        proof, events = check(plan), simulate_drained(plan, 1).timeline
    if output is not None:
        write_text(output, written.to_csv())
    drawn, idle = timeline.drawn(events, stdout().width), timeline.idle(timeline.bars(events))
    document = {
        "status": "done",
        "schedule": written.name,
        "ranks": [" ".join(map(str, row)) for row in written.rows],
        "microbatches": written.num_microbatches,
        "in_flight": [depth + 1 for depth in written.warmup],
        "idle": idle,
        "proof": list(proof.statements),
    }
    headline = Text(f"{written.name}: {size}, {100 * idle:.3g} % idle")
    return Result(document, [headline, *drawn, Text(str(proof))], [output])


def _by_name(name: str, counts: dict[str, int | None]) -> Written:
    """A schedule of ours, for so many stages, ranks and microbatches.

    Raises:
        ConfigError: its ranks cannot hold these stages.
        ScheduleError: no file can have it.
    """
    from pdcompile.passes.schedules.alone import chain, written_of

    kind = kind_of(name)
    stages = counts["--stages"] or kind.usual * (counts["--ranks"] or STAGES // kind.usual)
    ranks = counts["--ranks"] or -(-stages // kind.usual)
    if not kind.dispatched and (stages % ranks or not kind.holds(stages // ranks)):
        most = kind.stages_per_rank
        raise ConfigError(
            f"{stages} stages on {ranks} ranks under schedule {name!r}",
            where="--stages",
            remedy="as many stages on every rank" + (f", {most} at most" if most else ""),
        )
    return written_of(chain(name, stages, counts["--microbatches"] or 2 * stages, ranks))


def _of_file(source: str, counts: dict[str, int | None]) -> Written:
    """A schedule in a file of its own, or that of a plan.

    Raises:
        ConfigError: there is no such schedule, or the file says already what an option asks for.
        ScheduleError: the file cannot be read, or has none.
    """
    from pdcompile.passes.schedules.alone import written_of

    path = Path(source)
    if path.suffix.lower() not in (SUFFIX, ".json"):
        raise ConfigError(
            f"{source!r} is neither a schedule nor a file of one",
            remedy=did_you_mean(source, KINDS)
            + f"one of {flush_schedules()}, FILE.csv, or a plan.json",
        )
    for option, given in counts.items():
        if given is not None:
            raise ConfigError(
                f"{option} {given} would have no effect: the file says how many there are",
                where=option,
                remedy=f"leave {option} out, or name a schedule",
            )
    return read(path) if path.suffix.lower() == SUFFIX else written_of(Plan.load(path))
