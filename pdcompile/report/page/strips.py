"""Bars of a page that compare: parts of the critical path, and how busy each link is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pdcompile.cluster import Cluster
from pdcompile.passes.simulate import Simulation, TimelineEvent
from pdcompile.passes.simulate.critical_chain import CriticalPath
from pdcompile.plan import Plan
from pdcompile.report.labels import counted
from pdcompile.report.page.page_data import Strip, Strips
from pdcompile.report.page.words import named, path_in_words, percent
from pdcompile.schedule import Kind, Phase
from pdcompile.units import format_bytes, format_rate, format_seconds

MOST = 16  # bars; of the rest only the number is told
SHOWN = 0.001  # of the whole, from which a part of the critical path has a bar
COLOURS = {"compute": "stage", "update": "step", "link": "link", "sum": "link", "norms": "link"}
CARRIED = {
    Kind.VALUE: "values",
    Kind.GRADIENT: "gradients",
    Kind.TIED: "gradients of tied parameters",
    Kind.WEIGHT: "tied weights",
}


def critical_strips(path: CriticalPath) -> Strips:
    """Each part of the critical path, the largest first."""
    whole = path.seconds or 1.0
    large = [one for one in path.shares[:MOST] if one.seconds >= SHOWN * whole]
    strips = tuple(
        Strip(
            named(one),
            f"{percent(one.seconds / whole)}, {format_seconds(one.seconds)}, "
            f"{counted(one.events, 'event')}",
            one.seconds / whole,
            COLOURS.get(one.what, "idle"),
        )
        for one in large
    )
    rest = path.shares[len(large) :]
    note = f"{counted(len(rest), 'smaller part')} left out." if rest else ""
    return Strips(path_in_words(path), strips, note)


def traffic(plan: Plan, found: Simulation) -> Strips:
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
        elif event.action.kind is Kind.REDUCE and event.action.phase is Phase.POST:
            sums[event.stage].append(event)
    rows = [_link(plan, ends, own, end - begin, steps) for ends, own in links.items()]
    rows += [_sums(plan, stage, own, end - begin, steps) for stage, own in sums.items()]
    rows.sort(key=lambda row: -row.fraction)
    total = sum(found.forecast.sent_bytes)
    rest = rows[MOST:]
    note = f"{counted(len(rest), 'less busy link')} left out." if rest else ""
    sentence = (
        f"{format_bytes(total)} are sent a step, over {counted(len(rows), 'link')}."
        if rows
        else "Nothing is sent."
    )
    return Strips(sentence, tuple(rows[:MOST]), note)


def _link(
    plan: Plan,
    ends: tuple[int, int],
    events: Sequence[TimelineEvent],
    seconds: float,
    steps: int,
) -> Strip:
    carried: dict[str, int] = defaultdict(int)
    for event in events:
        carried[CARRIED[event.action.kind]] += event.num_bytes
    what = ", ".join(f"{format_bytes(count / steps)} {name}" for name, count in carried.items())
    label = f"rank {ends[0]} → {ends[1]}{_level(plan, ends)}"
    return _busy(label, events, seconds, f"a step: {what}")


def _level(plan: Plan, ends: tuple[int, int]) -> str:
    if not plan.cluster.strip():
        return ""
    level = Cluster.from_toml(plan.cluster, where="plan: cluster").level_between(*ends)
    return f", {level.name} {format_rate(level.bytes_per_second)}"


def _sums(
    plan: Plan, stage: int, events: Sequence[TimelineEvent], seconds: float, steps: int
) -> Strip:
    ranks = plan.stages[stage].ranks
    own = [event for event in events if event.rank == events[0].rank]
    sent = format_bytes(sum(event.num_bytes for event in own) / steps)
    label = f"replicas of stage {stage}, ranks {', '.join(map(str, ranks))}"
    return _busy(label, own, seconds, f"each sends {sent} of sums of gradients a step")


def _busy(label: str, events: Sequence[TimelineEvent], seconds: float, what: str) -> Strip:
    busy = sum(one.end_seconds - one.start_seconds for one in events) / seconds if seconds else 0.0
    return Strip(label, f"{percent(busy)} busy; {what}", busy, "link")
