"""The timeline of a page: bars of each rank, and of long ones only their beginning and end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdcompile.report.labels import counted
from pdcompile.report.page.page_data import Lane, Lanes
from pdcompile.report.palette import WORK
from pdcompile.report.timeline import Bar, Event, bars, duration, numbered

MOST_BARS = 12_000  # that are embedded: about 500 kB
KINDS = tuple(WORK)


def lanes(
    events: Iterable[Event],
    measured: Iterable[Event] = (),
    *,
    most: int = MOST_BARS,
) -> Lanes:
    """The compute of every rank, predicted and measured.

    Args:
        measured: of a run, its first start at second 0 too.
        most: bars that are embedded; of more, those in the middle are left out.
    """
    predicted, real = bars(events), bars(measured)
    total = max(duration(predicted), duration(real))
    share = most // 2 if real else most
    found = [
        *_lanes(predicted, share, measured=False),
        *_lanes(real, share, measured=True),
    ]
    found.sort(key=lambda lane: (lane.rank, lane.measured))
    spans = _minibatches([*predicted, *real])
    return Lanes(
        kinds=KINDS,
        lanes=tuple(found),
        seconds=total,
        minibatches=spans,
        shown=len(spans) // 2,
        numbered=numbered(predicted),
        note=_note(found),
    )


def _lanes(shown: Sequence[Bar], most: int, *, measured: bool) -> list[Lane]:
    begin, end = kept(shown, most)
    what = "measured, " if measured else ""
    found = []
    for rank in sorted({bar.rank for bar in shown}):
        own = [bar for bar in shown if bar.rank == rank]
        middle = [bar for bar in own if begin < bar.end and bar.start < end]
        out = {id(bar) for bar in middle}
        stages = ", ".join(str(s) for s in sorted({bar.stage for bar in own}))
        found.append(
            Lane(
                rank,
                f"rank {rank}, {what}stage {stages}",
                measured,
                tuple(_row(bar) for bar in own if id(bar) not in out),
                ((middle[0].start, middle[-1].end, len(middle)),) if middle else (),
            )
        )
    return found


def kept(shown: Sequence[Bar], most: int) -> tuple[float, float]:
    """Seconds between which bars are left out, so that at most so many remain; (0, 0): none are.

    As many remain before as after.
    """
    if len(shown) <= most:
        return 0.0, 0.0
    ends = sorted(bar.end for bar in shown)
    starts = sorted(bar.start for bar in shown)
    return ends[most // 2], starts[len(starts) - most // 2]


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


def _note(found: Sequence[Lane]) -> str:
    count = sum(out for lane in found for _, _, out in lane.left_out)
    if not count:
        return ""
    return (
        f"{counted(count, 'bar')} in the middle, which repeat their neighbours, are left out to "
        "keep this file small, and drawn as one grey bar a rank."
    )
