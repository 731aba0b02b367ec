"""The reasons for a plan, as tables: what binds, and what crosses each cut."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdcompile.passes.partition.alternatives import StageUse
from pdcompile.passes.planning.explain import Explanation
from pdcompile.report import labels
from pdcompile.units import format_bytes, format_seconds

BINDS = {
    "compute": "computing",
    "sending": "sending",
    "receiving": "receiving",
    "link": "its half-duplex link",
    "reduction": "sending, and summing gradients",
    "round trip": "waiting: round trip",
}


def explain_report(found: Explanation) -> Group:
    """Limits of each stage, and what crosses each cut."""
    parts: list[RenderableType] = [Text(""), stage_table(found), deciding(found)]
    if found.edited:
        said = f"note: the plan was edited: its stages take {_objective(found)}"
        parts.append(Text(f"{said}, which is not what its certificate says", style="yellow"))
    parts += [Text(f"note: not allowed as it is: {one}", style="red") for one in found.broken]
    if found.boundaries:
        parts += [Text(""), boundary_table(found)]
    if found.commands:
        said = "what plans gain without one limit or option (pdcompile diff compares them):"
        parts += [Text(""), Text(said)]
    return Group(*parts)


def stage_table(found: Explanation) -> Table:
    """One row a stage: what a microbatch spends where, and how much memory is left."""
    trips = [">round trip"] if not found.flush else []  # which binds nothing where it drains
    columns = [">compute", ">sends", ">receives", *trips, ">idle"]
    limited = any(use.limit_bytes for use in found.stages)
    columns += [">memory left"] if limited else []
    columns += [">critical path"] if found.chained else []
    table = labels.table(">stage", "|bound by", *columns)
    for use in found.stages:
        row = [str(use.stage), BINDS[use.binds]]
        row += [format_seconds(use.compute_seconds), format_seconds(use.sent_seconds)]
        row += [format_seconds(use.received_seconds)]
        row += [format_seconds(use.round_trip_seconds)] if trips else []
        row += [f"{100 * use.idle:.1f} %"]
        row += [_room(use)] if limited else []
        row += [_share(use.critical_seconds, found.objective_seconds)] if found.chained else []
        table.add_row(*row, style="bold" if use.stage == found.bottleneck else None)
    return table


def deciding(found: Explanation) -> Text:
    """One sentence: which stage decides, and how the time adds up."""
    use = found.stages[found.bottleneck]
    if not found.flush:
        why = BINDS[use.binds]
        if use.binds == "round trip":
            return Text(
                f"stage {use.stage} decides: a microbatch is back from stage {use.turn} after "
                f"{format_seconds(use.round_trip_seconds)}, and {use.in_flight} may be on that "
                f"way: one every {format_seconds(use.binding_seconds)}"
            )
        return Text(
            f"stage {use.stage} decides: {why} takes {format_seconds(use.binding_seconds)} of "
            f"each microbatch's {format_seconds(found.objective_seconds)}"
        )
    if not found.chained:
        busy = format_seconds(use.binding_seconds * found.num_microbatches)
        return Text(
            f"a rank of stage {use.stage} decides: {BINDS[use.binds]} takes {busy} of its "
            f"{_objective(found)}; the rest is transfers, sums of gradients and waiting"
        )
    own, sent = format_seconds(use.critical_seconds), format_seconds(found.transfer_seconds)
    return Text(
        f"stage {use.stage} decides; the longest chain of a step, {_objective(found)}, "
        f"has {own} of its work and {sent} of transfers"
    )


def boundary_table(found: Explanation) -> Table:
    """One row a cut: the values that cross it."""
    table = labels.table("|cut", ">crosses")
    for one in found.boundaries:
        crosses = f"{labels.counted(one.values, 'value')}, {format_bytes(one.bytes)}"
        table.add_row(f"{one.boundary} | {one.boundary + 1}", crosses if one.values else "-")
    return table


def _room(use: StageUse) -> str:
    if use.limit_bytes is None:
        return "no limit"
    left = use.limit_bytes - use.memory_bytes
    if left < 0:
        return f"−{format_bytes(-left)}"
    return f"{format_bytes(left)} ({100 * left / max(use.limit_bytes, 1):.0f} %)"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 and part > 0 else "-"


def _objective(found: Explanation) -> str:
    what = "a step" if found.flush else "a microbatch"
    return f"{format_seconds(found.objective_seconds)} {what}"
