"""``pdcompile simulate``: time and memory of a plan, as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from pdcompile.cli.app import app
from pdcompile.cli.options import AsJson, PlanFile
from pdcompile.plan import Plan

MOST_LINES = 32  # of the timeline, where numbers need the room


@app.command()
def simulate(
    plan: PlanFile,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Minibatches in the timeline, which ends with a drain. [default: as many as show "
            "a full pipeline, 3 or more]",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace for https://ui.perfetto.dev (.json)."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one self-contained HTML page.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the timeline: .svg, or .png with matplotlib."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a plan: the timeline of every rank, idle time, memory, traffic.

    Walks the same instructions that would run, with the times and sizes in the plan. Needs no
    model and no torch.

    Examples:

      pdcompile simulate plan.json

      pdcompile simulate plan.json --steps 4 --html report.html --trace trace.json
    """
    from pdcompile.cli.output import emit_json, stderr, stdout, write_text
    from pdcompile.passes.simulate import drained
    from pdcompile.passes.simulate import simulate as simulated
    from pdcompile.report import chrome, timeline
    from pdcompile.report import html as page
    from pdcompile.report.picture import save
    from pdcompile.report.plan_table import forecast_line, memory_table
    from pdcompile.report.svg import Panel
    from pdcompile.schedule.registry import name_of
    from pdcompile.schedule.spec import spec_of

    loaded = Plan.load(plan)
    steps = steps or 2 * spec_of(loaded).reach - 1
    forecast = simulated(loaded).forecast
    loaded = replace(loaded, forecast=forecast)
    events = drained(loaded, steps)
    if trace is not None:
        write_text(trace, json.dumps(chrome.trace(events)))
    if html is not None:
        write_text(html, page.page(loaded, events, title=plan.name))
    if picture is not None:
        write_text(picture, "")  # the same errors for a place that cannot be written
        save([Panel(name_of(loaded.training.schedule), events)], picture)
    shown = timeline.bars(events)
    if as_json:
        document = {
            "status": "done",
            "forecast": asdict(forecast),
            "steps": steps,
            "seconds": timeline.duration(shown),
            "idle": timeline.idle(shown),
        }
        emit_json(document)
        return
    console = stdout()
    bands = max(1, MOST_LINES // max(1, len(loaded.stages)))
    console.print(timeline.text(events, width=console.width, bands=bands))
    number = timeline.numbered(shown)
    key = f"F forward, B backward, U update, dots idle; the number is the {number}"
    console.print(key)
    console.print(memory_table(loaded))
    console.print(forecast_line(loaded))
    for path in (trace, html, picture):
        if path is not None:
            stderr().print(f"written: {path}", soft_wrap=True)
