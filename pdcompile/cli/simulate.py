"""``pdcompile simulate``: time and memory of a plan, on the terminal and as a page."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from pdcompile.cli.options import PlanFile, verb
from pdcompile.cli.output import Result, stdout, write_text
from pdcompile.plan import Plan


@verb()
def simulate(
    plan: PlanFile,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Minibatches in the timeline, which ends with a drain. [default: 1; where a "
            "schedule does not drain, as many as show a full pipeline, 3 or more]",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace for https://ui.perfetto.dev (.json)."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one self-contained HTML page.")
    ] = None,
) -> Result:
    """Simulate a plan: the timeline of every rank, idle time, memory, traffic.

    Walks the same instructions that would run, with the times and sizes in the plan. Needs no
    model and no torch.

    Examples:

      pdcompile simulate plan.json

      pdcompile simulate plan.json --steps 4 --html report.html --trace trace.json
    """
    from rich.text import Text

    from pdcompile.passes.simulate import simulate as simulated
    from pdcompile.passes.simulate import simulate_drained
    from pdcompile.passes.simulate.critical_chain import critical_path
    from pdcompile.report import chrome, page, timeline
    from pdcompile.report.page.words import path_in_words
    from pdcompile.report.plan_table import forecast_line, memory_table
    from pdcompile.report.progress import working

    loaded = Plan.load(plan)
    stream = loaded.training.kind.stream
    steps = steps or (2 * loaded.spec.reach - 1 if stream else 1)
    with working("simulating", f"{steps} minibatches"):
        steady, drawn = simulated(loaded), simulate_drained(loaded, steps)
    loaded, events = replace(loaded, forecast=steady.forecast), drawn.timeline
    path = critical_path(steady.timeline, steady.window, flush=not stream)
    if trace is not None:
        write_text(trace, json.dumps(chrome.trace(events, loaded.fingerprint)))
    if html is not None:
        date = datetime.now().astimezone().strftime("%d %B %Y, %H:%M %Z")
        data = page.page_data(loaded, steady, drawn, title=plan.name, date=date)
        write_text(html, page.html(data))
    shown = timeline.bars(events)
    document = {
        "status": "done",
        "costs": loaded.costs,
        "forecast": steady.forecast,
        "steps": steps,
        "seconds": timeline.duration(shown),
        "idle": timeline.idle(shown),
        "critical_path": path.shares,
    }
    bars = timeline.drawn(events, stdout().width, loaded.processes_of)
    memory, forecast = memory_table(loaded), forecast_line(loaded)
    words = Text(f"critical path: {path_in_words(path)}")
    return Result(document, [*bars, memory, forecast, words], [trace, html])
