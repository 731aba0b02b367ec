"""The critical path of a simulation: the chain of work and messages that its length is made of.

Every event of a timeline began at the end of the one that it waited for (`TimelineEvent.cause`).
Followed back from the last event, these leave no gap: to make one of them shorter is the only way
to make the step shorter, and what is not among them has time to spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdcompile.passes.simulate.clock import TimelineEvent
from pdcompile.schedule import Action, Kind, Phase

What = Literal["compute", "update", "link", "sum", "gather", "norms", "fill", "drain"]


@dataclass(frozen=True, slots=True)
class Share:
    """Part of a critical path: computing or updates of a stage, a link between two ranks, sums of
    gradients over a stage's replicas, norms over all ranks; `fill` and `drain` are other stages and
    links before the largest of these begins and after it has ended."""

    what: What
    seconds: float
    events: int
    stage: int = -1
    ranks: tuple[int, ...] = ()  # of a link: from, to


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Events that follow each other without a gap, and what they are; shares add up to all."""

    seconds: float
    events: tuple[TimelineEvent, ...]
    shares: tuple[Share, ...]  # the largest first


def critical_path(
    timeline: Sequence[TimelineEvent], window: tuple[float, float], *, flush: bool
) -> CriticalPath:
    """The events that decided when the window ended, as far back as it began.

    Args:
        flush: the window is a whole call, which fills and drains the pipeline.
    """
    begin, end = window
    last = max(
        (one for one in timeline if begin < one.end_seconds <= end),
        key=lambda one: (one.end_seconds, one.start_seconds),
        default=None,
    )
    found: list[TimelineEvent] = []
    while last is not None and last.end_seconds > begin:
        found.append(last)
        last = last.cause
    events = tuple(reversed(found))
    parts = [(_what(one), max(0.0, one.end_seconds - max(one.start_seconds, begin)))
             for one in events]  # fmt: skip
    shares = _summed(parts)
    if flush and shares:
        top = shares[0].what, shares[0].stage, shares[0].ranks
        inside = [n for n, (key, seconds) in enumerate(parts) if key == top and seconds > 0]
        first, after = (inside[0], inside[-1] + 1) if inside else (0, len(parts))
        parts = [
            *((_moving(key, "fill"), seconds) for key, seconds in parts[:first]),
            *parts[first:after],
            *((_moving(key, "drain"), seconds) for key, seconds in parts[after:]),
        ]
        shares = _summed(parts)
    return CriticalPath(sum(seconds for _, seconds in parts), events, shares)


_Key = tuple[What, int, tuple[int, ...]]


def _moving(key: _Key, what: What) -> _Key:
    """Microbatches on their way fill and drain a pipeline; updates and sums do neither."""
    return (what, -1, ()) if key[0] in ("compute", "link") else key


def _what(event: TimelineEvent) -> _Key:
    action = event.action
    if action is Action.STEP:
        return "update", event.stage, ()
    if action.phase is Phase.COMPUTE:
        return "compute", event.stage, ()
    if action.phase is Phase.SEND:
        return "link", -1, (event.rank, event.peer)
    if action.kind is Kind.NORMS:
        return "norms", -1, ()
    return "gather" if action.kind is Kind.GATHER else "sum", event.stage, ()


def _summed(parts: Sequence[tuple[_Key, float]]) -> tuple[Share, ...]:
    found: dict[_Key, list[float]] = {}
    for key, seconds in parts:
        found.setdefault(key, []).append(seconds)
    shares = (Share(k[0], sum(times), len(times), k[1], k[2]) for k, times in found.items())
    return tuple(sorted((one for one in shares if one.seconds > 0), key=lambda one: -one.seconds))
