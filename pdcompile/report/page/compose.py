"""Data of a page from a plan, its simulations and a run, in the form that its scripts read.

Texts are finished: they have their units, and are plain text, never markup.  Seconds count from the
start of the timeline.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pdcompile.errors import PlanError
from pdcompile.passes.simulate import Simulation
from pdcompile.passes.simulate.critical_chain import critical_path
from pdcompile.passes.simulate.ledger import held_over_time
from pdcompile.plan import Plan
from pdcompile.report import palette
from pdcompile.report.labels import counted
from pdcompile.report.page.panels import critical_strips, grid, lanes, memory_lanes, traffic
from pdcompile.report.page.words import cluster_in_words, gap_tile, what_limits
from pdcompile.report.plan_table import certificate_line, fullest, headline
from pdcompile.report.plan_table import stage_table as plan_stages
from pdcompile.units import format_bytes, format_seconds

COLOURS = {
    **{kind.replace(" ", "-"): even for kind, (even, _) in palette.WORK.items()},
    **{f"{kind.replace(' ', '-')}-odd": odd for kind, (_, odd) in palette.WORK.items()},
    **{name.replace(" ", "-"): fill for name, (fill, _) in palette.MEMORY.items()},
    "link": palette.LINK,
    "stage": palette.WEIGHTS,
    "ink": palette.INK,
}


def page_data(
    plan: Plan, steady: Simulation, drawn: Simulation, *, title: str, date: str
) -> dict[str, Any]:
    """The page of a plan.

    Args:
        steady: the simulation that the forecast is read from.
        drawn: that of the minibatches in the timeline.
        title: names the plan where it does not know its model.
    """
    plan = replace(plan, forecast=steady.forecast)
    path = critical_path(steady.timeline, steady.window, flush=not plan.training.kind.stream)
    curves = held_over_time(plan, drawn.programs, drawn.passed_seconds)
    return {
        "title": f"{plan.model or title} on {counted(plan.num_processes, 'rank')}",
        "subtitle": f"{headline(plan).plain}. {cluster_in_words(plan)}. {date}",
        "tiles": _tiles(plan),
        "limits": what_limits(path),
        "certificate": certificate_line(plan).plain,
        "timeline": lanes(drawn.timeline),
        "critical": critical_strips(path),
        "stages": grid(plan_stages(plan)),
        "memory": memory_lanes(plan, curves, max(drawn.ends_seconds)),
        "traffic": traffic(plan, steady),
        "binding": _binding(plan, title),
        "notes": plan.notes,
        "colours": COLOURS,
    }


def _tiles(plan: Plan) -> list[dict[str, str]]:
    """Headline numbers; a tone of "bad" says that something is wrong."""
    forecast, rank = plan.forecast, fullest(plan)[0]
    assert forecast is not None
    total, limit = plan.ledgers[rank].total_bytes, plan.machines.devices[rank].memory_bytes
    room = f"rank {rank}; no limit"
    if limit:
        room = f"of {format_bytes(limit)} on rank {rank}: {100 * total / limit:.0f} %"
    gap, certain = gap_tile(plan.certificate)
    source = f"forecast from {plan.costs}" if plan.costs else "forecast"
    rate, tone = forecast.samples_per_second, "bad" if limit and total > limit else ""
    tiles = (
        ("step time", format_seconds(forecast.step_seconds), source, ""),
        ("samples/s", f"{rate:,.3g}" if rate < 100 else f"{rate:,.0f}",
         f"minibatches of {plan.training.batch_size}", ""),
        ("idle", f"{100 * forecast.bubble:.1f} %", "of the time of all devices", ""),
        ("peak memory", format_bytes(total), room, tone),
        ("gap", gap, certain, ""),
    )  # fmt: skip
    return [dict(zip(("label", "value", "note", "tone"), one, strict=True)) for one in tiles]


def _binding(plan: Plan, title: str) -> dict[str, Any]:
    from pdcompile.passes.planning.explain import explain
    from pdcompile.report.explain_table import boundary_table, deciding, stage_table

    try:
        found = explain(plan, where=title)
    except PlanError as error:
        return {"sentence": f"Not known: {error.message}.", "stages": None, "cuts": None}
    cuts = grid(boundary_table(found)) if found.boundaries else None
    return {"sentence": f"{deciding(found)}.", "stages": grid(stage_table(found)), "cuts": cuts}
