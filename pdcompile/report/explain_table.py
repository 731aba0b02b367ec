"""Why a plan is as it is, as a person reads it: what binds, the next cuts, looser limits."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdcompile.passes.partition.alternatives import Boundary, Move, Relaxed, StageUse
from pdcompile.passes.planning.explain import Explanation
from pdcompile.report import names
from pdcompile.units import format_bytes, format_seconds

SHOWN = 3  # items of a move by name
BINDS = {
    "compute": "computing",
    "sending": "sending",
    "receiving": "receiving",
    "link": "its half-duplex link",
    "round trip": "waiting: round trip",
}


def explain_report(found: Explanation) -> Group:
    """What binds each stage, the next-best cuts, and what looser limits would bring."""
    parts: list[RenderableType] = [Text(""), stage_table(found), deciding(found)]
    if found.edited:
        parts.append(
            Text(
                f"note: the plan was edited: its stages take {_objective(found)}, which is not "
                "what its certificate says",
                style="yellow",
            )
        )
    parts += [Text(f"note: not allowed as it is: {one}", style="red") for one in found.broken]
    if found.boundaries:
        parts += [Text(""), boundary_table(found)]
    if found.relaxed:
        parts += [Text(""), relaxed_table(found)]
    return Group(*parts)


def stage_table(found: Explanation) -> Table:
    """One row a stage: what a microbatch spends where, and how much memory is left."""
    table = _table()
    for name in ("stage", "bound by"):
        table.add_column(name, no_wrap=True, justify="right" if name == "stage" else "left")
    columns = ["compute", "sends", "receives", "round trip", "idle"]
    columns += ["memory left"] if any(use.limit_bytes for use in found.stages) else []
    columns += ["critical path"] if found.flush else []
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for use in found.stages:
        row = [str(use.stage), BINDS[use.binds]]
        row += [format_seconds(use.compute_seconds), format_seconds(use.sent_seconds)]
        row += [format_seconds(use.received_seconds), format_seconds(use.round_trip_seconds)]
        row += [f"{100 * use.idle:.1f} %"]
        if "memory left" in columns:
            row.append(_room(use))
        if found.flush:
            row.append(_share(use.critical_seconds, found.objective_seconds))
        table.add_row(*row, style="bold" if use.stage == found.bottleneck else None)
    return table


def deciding(found: Explanation) -> Text:
    """One sentence: which stage decides, and how the time adds up."""
    use = found.stages[found.bottleneck]
    if not found.flush:
        why = BINDS[use.binds]
        if use.binds == "round trip":
            return Text(
                f"stage {use.stage} decides: a microbatch is back after "
                f"{format_seconds(use.round_trip_seconds)}, and {use.in_flight} may be under way: "
                f"one every {format_seconds(use.binding_seconds)}"
            )
        return Text(
            f"stage {use.stage} decides: {why} takes {format_seconds(use.binding_seconds)} of "
            f"each microbatch's {format_seconds(found.objective_seconds)}"
        )
    alike: dict[tuple[int, int], list[StageUse]] = {}
    for one in found.stages:
        if one.forwards or one.backwards:
            alike.setdefault((one.forwards, one.backwards), []).append(one)
    parts = []
    for (ahead, back), uses in alike.items():
        stages = ", ".join(names.ranges({one.stage for one in uses}))
        where = f"stage {stages}" if len(uses) == 1 else f"each of stages {stages}"
        seconds = format_seconds(sum(one.critical_seconds for one in uses))
        work = f"{_times(ahead, 'forward')} and {_times(back, 'backward')}"
        parts.append(f"{work} of {where} ({seconds})")
    parts.append(f"transfers ({format_seconds(found.transfer_seconds)})")
    return Text(
        f"stage {use.stage} decides; the longest chain of a step, {_objective(found)}, is "
        + _list(parts)
    )


def boundary_table(found: Explanation) -> Table:
    """For each cut what crosses it, the next-best cut and its price."""
    table = _table()
    table.add_column("cut", no_wrap=True)
    table.add_column("crosses", justify="right", no_wrap=True)
    table.add_column("the next-best cut", ratio=1, overflow="fold")
    table.add_column("then", justify="right", no_wrap=True)
    for one in found.boundaries:
        crosses = f"{one.values} × {format_bytes(one.bytes)}" if one.values else "-"
        if one.values:
            crosses = f"{_times(one.values, 'value')}, {format_bytes(one.bytes)}"
        table.add_row(
            f"{one.boundary} | {one.boundary + 1}",
            crosses,
            _next_best(found, one),
            _price(found, one.next_best) if one.next_best else "-",
        )
        if one.better is not None:
            text = f"faster, but not allowed: {_moved(found, one.better)}: {one.better.broken[0]}"
            table.add_row("", "", text, _price(found, one.better))
    return table


def relaxed_table(found: Explanation) -> Table:
    """One row a limit: what the plan would be without it."""
    table = _table()
    table.add_column("limit eased", ratio=1, overflow="fold")
    table.add_column("best plan", justify="right", no_wrap=True)
    table.add_column("change", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for one in found.relaxed:
        if one.objective_seconds is None:
            table.add_row(one.text, "-", "-", f"not tried: {one.reason}")
            continue
        table.add_row(
            one.text,
            format_seconds(one.objective_seconds),
            change_text(one.objective_seconds, found.objective_seconds),
            _says(one, found),
        )
    return table


def _says(one: Relaxed, found: Explanation) -> str:
    assert one.objective_seconds is not None
    if one.status == "optimal":
        binds = one.objective_seconds < found.objective_seconds * (1 - 1e-5)
        return "" if binds else "does not bind"
    most = change_text(one.bound_seconds or 0.0, found.objective_seconds)
    return f"at most {most}" if one.bound_seconds else "not proved"


def _next_best(found: Explanation, one: Boundary) -> str:
    if one.moves == 0:
        return "none: nothing may move over this boundary"
    if one.next_best is None:
        return f"none of {one.looked_at} neighbouring cuts is allowed"
    return _moved(found, one.next_best)


def _moved(found: Explanation, move: Move) -> str:
    names = [found.names[i] for i in move.items]
    shown = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        shown = f"{names[0]} … {names[-1]} ({len(names)} items)"
    return f"{shown} on stage {move.to}"


def _price(found: Explanation, move: Move) -> str:
    change = change_text(move.objective_seconds, found.objective_seconds)
    return f"{format_seconds(move.objective_seconds)}  {change}"


def change_text(after: float, before: float) -> str:
    """``+1.2 %``, ``x 25``; what is too small to see is said to be nothing."""
    if before <= 0 or abs(after / before - 1) < 5e-6:
        return "±0 %"
    if after >= 10 * before:
        return f"x {after / before:,.0f}"
    percent = 100 * (after / before - 1)
    return f"{percent:+.2g} %" if abs(percent) < 10 else f"{percent:+.0f} %"


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


def _times(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _list(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
