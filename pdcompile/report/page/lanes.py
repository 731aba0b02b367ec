"""The timeline of a page: bars of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdcompile.report.page.page_data import Lane, Lanes
from pdcompile.report.palette import WORK
from pdcompile.report.timeline import Bar, Event, bars, duration, numbered

KINDS = tuple(WORK)


def lanes(events: Iterable[Event], measured: Iterable[Event] = ()) -> Lanes:
    """The compute of every rank, predicted, and `measured` of a run, whose first start is at
    second 0 too."""
    predicted, real = bars(events), bars(measured)
    found = [
        Lane(rank, measured, tuple(_row(bar) for bar in own if bar.rank == rank))
        for measured, own in ((False, predicted), (True, real))
        for rank in {bar.rank for bar in own}
    ]
    found.sort(key=lambda lane: (lane.rank, lane.measured))
    spans = _minibatches([*predicted, *real])
    return Lanes(
        kinds=KINDS,
        lanes=tuple(found),
        seconds=max(duration(predicted), duration(real)),
        minibatches=spans,
        shown=len(spans) // 2,
        numbered=numbered(predicted),
    )


def _row(bar: Bar) -> tuple[int, int, int, int, int, float, float]:
    kind = KINDS.index(bar.kind)
    length = bar.end - bar.start
    return kind, bar.stage, bar.minibatch, bar.microbatch, bar.number, bar.start, length


def _minibatches(shown: Sequence[Bar]) -> tuple[tuple[int, float, float], ...]:
    found: dict[int, tuple[float, float]] = {}
    for bar in shown:
        start, end = found.get(bar.minibatch, (bar.start, bar.end))
        found[bar.minibatch] = min(start, bar.start), max(end, bar.end)
    return tuple((number, *found[number]) for number in sorted(found))
