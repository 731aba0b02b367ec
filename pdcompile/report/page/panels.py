"""Panels of a page that draw: timeline, memory, and bars of the critical path and of links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from pdcompile.passes.simulate import Simulation, TimelineEvent
from pdcompile.passes.simulate.critical_chain import CriticalPath
from pdcompile.passes.simulate.ledger import Held
from pdcompile.plan import MemoryLedger, Plan
from pdcompile.report.labels import counted
from pdcompile.report.page.words import named, path_in_words, percent
from pdcompile.report.palette import MEMORY, WORK
from pdcompile.report.plan_table import fullest, memory_table
from pdcompile.report.timeline import Bar, Event, bars, duration, numbered
from pdcompile.schedule import Kind, Phase
from pdcompile.schedule.instruction import REPLICATED
from pdcompile.units import format_bytes, format_rate, format_seconds

KINDS = tuple(WORK)
MOST_CURVES = 8
MOST_POINTS = 400  # of a curve
MOST = 16  # bars; of the rest only the number is told
SHOWN = 0.001  # of the whole, from which a part of the critical path has a bar
COLOURS = {"compute": "stage", "update": "update", "fill": "idle", "drain": "idle"}
CARRIED = {
    Kind.VALUE: "values",
    Kind.GRADIENT: "gradients",
    Kind.TIED: "gradients of tied parameters",
    Kind.WEIGHT: "tied weights",
}


def grid(table: Table) -> dict[str, Any]:
    """A table of the terminal; columns that are set to the right hold numbers."""
    columns = table.columns
    return {
        "head": [str(column.header) for column in columns],
        "numbers": [column.justify == "right" for column in columns],
        "rows": [*zip(*(map(str, one.cells) for one in columns), strict=True)],
    }


def lanes(events: Iterable[Event]) -> dict[str, Any]:
    """The compute of every rank; `shown` is the minibatch that the page opens with."""
    every = bars(events)
    found = [
        {"rank": rank, "bars": [_row(bar) for bar in every if bar.rank == rank]}
        for rank in sorted({bar.rank for bar in every})
    ]
    spans = _minibatches(every)
    return {
        "kinds": KINDS,
        "lanes": found,
        "seconds": duration(every),
        "minibatches": spans,
        "shown": len(spans) // 2,
        "numbered": numbered(every),
    }


def _row(bar: Bar) -> tuple[int, int, int, int, int, float, float]:
    """Index into kinds, stage, minibatch, microbatch, number shown or −1, start, seconds."""
    kind = KINDS.index(bar.kind)
    length = bar.end - bar.start
    return kind, bar.stage, bar.minibatch, bar.microbatch, bar.number, bar.start, length


def _minibatches(shown: Sequence[Bar]) -> list[tuple[int, float, float]]:
    """The number, first start and last end of each."""
    found: dict[int, tuple[float, float]] = {}
    for bar in shown:
        start, end = found.get(bar.minibatch, (bar.start, bar.end))
        found[bar.minibatch] = min(start, bar.start), max(end, bar.end)
    return [(number, *found[number]) for number in sorted(found)]


def memory_lanes(plan: Plan, curves: Sequence[Sequence[Held]], seconds: float) -> dict[str, Any]:
    """Memory of a plan with a forecast: of each rank at its peak by group, and over so many seconds
    from the rank's `curves`, as (second, bytes a group …)."""
    drawn = fullest(plan)[:MOST_CURVES]
    lanes = []
    for rank, ledger in enumerate(plan.ledgers):
        limit, total = plan.machines.devices[rank].memory_bytes, ledger.total_bytes
        lanes.append(
            {
                "rank": rank,
                "limit_bytes": limit,
                "limit": "no limit" if limit is None else format_bytes(limit),
                "peak": format_bytes(total),
                "share": f"{100 * total / limit:.0f} %" if limit else "",
                "over": limit is not None and total > limit,
                "peak_bytes": grouped(ledger),
                "points": thinned(curves[rank]) if rank in drawn else (),
            }
        )
    hidden = len(plan.ledgers) - len(drawn)
    note = f"Over time: the {MOST_CURVES} fullest ranks; {hidden} others are left out." * (
        hidden > 0
    )
    return {
        "groups": tuple(MEMORY),
        "seconds": seconds,
        "lanes": lanes,
        "ledger": grid(memory_table(plan)),
        "note": note,
    }


def grouped(ledger: MemoryLedger) -> tuple[int, ...]:
    """The bytes of each group; together they are the ledger's total."""
    return tuple(sum(getattr(ledger, name) for name in names) for _, names in MEMORY.values())


def thinned(
    curve: Sequence[Held], most: int = MOST_POINTS
) -> tuple[tuple[float, *tuple[int, ...]], ...]:
    """Points of a curve, at most so many; of neighbours the fullest, so that the peak remains."""
    size = -(-len(curve) // most) if curve else 1
    chunks = (curve[i : i + size] for i in range(0, len(curve), size))
    kept = (max(chunk, key=lambda one: one.ledger.total_bytes) for chunk in chunks)
    return tuple((one.seconds, *grouped(one.ledger)) for one in kept)


def critical_strips(path: CriticalPath) -> dict[str, Any]:
    """Each part of the critical path, the largest first."""
    whole = path.seconds or 1.0
    large = [one for one in path.shares[:MOST] if one.seconds >= SHOWN * whole]
    strips = [
        {
            "label": named(one),
            "value": f"{percent(one.seconds / whole)}, {format_seconds(one.seconds)}, "
            f"{counted(one.events, 'event')}",
            "fraction": one.seconds / whole,
            "colour": COLOURS.get(one.what, "link"),
        }
        for one in large
    ]
    rest = path.shares[len(large) :]
    note = f"{counted(len(rest), 'smaller part')} left out." if rest else ""
    return {"sentence": path_in_words(path), "strips": strips, "note": note}


def traffic(plan: Plan, found: Simulation) -> dict[str, Any]:
    """Bytes of a step and busy time of every link, the busiest first."""
    begin, end = found.window
    steps = max(1, round((end - begin) / (found.forecast.step_seconds or 1.0)))
    links: dict[tuple[int, int], list[TimelineEvent]] = defaultdict(list)
    sums: dict[int, list[TimelineEvent]] = defaultdict(list)
    for event in found.timeline:
        if not begin < event.end_seconds <= end:
            continue
        if event.action.phase is Phase.SEND:
            links[event.rank, event.peer].append(event)
        elif event.action.kind in REPLICATED and event.action.phase is Phase.POST:
            sums[event.stage].append(event)
    rows = [_link(plan, ends, own, end - begin, steps) for ends, own in links.items()]
    rows += [_sums(plan, stage, own, end - begin, steps) for stage, own in sums.items()]
    rows.sort(key=lambda row: -row["fraction"])
    total = sum(found.forecast.sent_bytes)
    rest = rows[MOST:]
    note = f"{counted(len(rest), 'less busy link')} left out." if rest else ""
    sentence = (
        f"{format_bytes(total)} are sent a step, over {counted(len(rows), 'link')}."
        if rows
        else "Nothing is sent."
    )
    return {"sentence": sentence, "strips": rows[:MOST], "note": note}


def _link(
    plan: Plan, ends: tuple[int, int], events: Sequence[TimelineEvent], seconds: float, steps: int
) -> dict[str, Any]:
    carried: dict[str, int] = defaultdict(int)
    for event in events:
        carried[CARRIED[event.action.kind]] += event.num_bytes
    what = ", ".join(f"{format_bytes(count / steps)} {name}" for name, count in carried.items())
    level = plan.machines.level_between(*ends)
    label = f"rank {ends[0]} → {ends[1]}, {level.name} {format_rate(level.bytes_per_second)}"
    return _busy(label, events, seconds, f"a step: {what}")


def _sums(
    plan: Plan, stage: int, events: Sequence[TimelineEvent], seconds: float, steps: int
) -> dict[str, Any]:
    of = plan.stages[stage]
    own = [event for event in events if event.rank == events[0].rank]
    sent = format_bytes(sum(event.num_bytes for event in own) / steps)
    label = f"replicas of stage {stage}, ranks {', '.join(map(str, of.ranks))}"
    what = "gradients and new weights" if of.home_bytes else "sums of gradients"
    return _busy(label, own, seconds, f"each sends {sent} of {what} a step")


def _busy(label: str, events: Sequence[TimelineEvent], seconds: float, what: str) -> dict[str, Any]:
    busy = sum(one.end_seconds - one.start_seconds for one in events) / seconds if seconds else 0.0
    value = f"{percent(busy)} busy; {what}"
    return {"label": label, "value": value, "fraction": busy, "colour": "link"}
