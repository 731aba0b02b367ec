"""A timeline as data, and as text for the terminal.

Predicted timelines (`passes.simulate`) and measured ones have the same events, so every
drawing here takes either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich.text import Text

from pdcompile.passes.simulate import TimelineEvent
from pdcompile.report import labels
from pdcompile.report.palette import WORK
from pdcompile.schedule.program import RecordedEvent

Kind = Literal["forward", "backward", "backward to inputs", "backward to weights", "update"]

# Instructions that occupy the device; everything else waits or moves bytes.
COMPUTE: dict[str, Kind] = {
    "F": "forward",
    "B": "backward",
    "I": "backward to inputs",
    "W": "backward to weights",
    "STEP": "update",
}
LETTERS: dict[Kind, str] = {
    kind: "U" if kind == "update" else letter for letter, kind in COMPUTE.items()
}
FILL: dict[Kind, str] = dict(zip(LETTERS, "-==~U", strict=True))
STYLES: dict[str, tuple[str, str]] = {  # even and odd minibatches
    kind: (f"black on {even}", f"black on {odd}") for kind, (even, odd) in WORK.items()
}

Event: TypeAlias = TimelineEvent | RecordedEvent
Processes: TypeAlias = Callable[[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Bar:
    """Compute on one rank, in seconds from the start of the timeline."""

    rank: int
    stage: int
    kind: Kind
    minibatch: int
    microbatch: int  # −1 for an optimizer step
    start: float
    end: float
    number: int  # what is written on it, −1 for nothing: see `numbered`

    @property
    def label(self) -> str:
        """``F3``, ``B3``, ``U``."""
        return LETTERS[self.kind] + (str(self.number) if self.number >= 0 else "")


def bars(events: Iterable[Event]) -> tuple[Bar, ...]:
    """The compute events of a timeline, ordered by rank and start, from second 0."""
    chosen = [event for event in events if str(event.action) in COMPUTE]
    first = min((event.start_seconds for event in chosen), default=0.0)
    several = any(event.microbatch > 0 for event in chosen)
    found = [
        Bar(
            event.rank,
            event.stage,
            COMPUTE[str(event.action)],
            event.minibatch,
            event.microbatch,
            event.start_seconds - first,
            event.end_seconds - first,
            event.microbatch if several or event.microbatch < 0 else event.minibatch,
        )
        for event in chosen
    ]
    return tuple(sorted(found, key=lambda bar: (bar.rank, bar.start, bar.end)))


def numbered(shown: Iterable[Bar]) -> str:
    """Meaning of the numbers on bars: microbatch, or minibatch where each is one microbatch."""
    return "microbatch" if any(bar.microbatch > 0 for bar in shown) else "minibatch"


def duration(shown: Sequence[Bar]) -> float:
    """Seconds from the first start to the last end."""
    return max((bar.end for bar in shown), default=0.0)


def idle(shown: Sequence[Bar]) -> float:
    """The idle fraction of all ranks over the whole of the timeline that is shown."""
    ranks = {bar.rank for bar in shown}
    total = duration(shown) * len(ranks)
    return 1.0 - sum(bar.end - bar.start for bar in shown) / total if total else 0.0


def text(events: Iterable[Event], *, width: int = 96, of: Processes = lambda n: (n,)) -> Text:
    """One line a rank: ``F2--`` a forward of microbatch 2 (or minibatch 2, where each is one),
    ``B2====`` its backward (``I2==`` and ``W2~~`` where it is split), ``U`` an update, dots where
    the rank is idle; colours tell minibatches apart.

    `width` is the number of characters of a line, the rank's name included; `of`: the processes
    of a rank, which compute the parts of its stages.
    """
    shown = bars(events)
    named = {rank: of(rank) for rank in sorted({bar.rank for bar in shown})}
    rows = {f"rank{'s' * (len(n) > 1)} {labels.ranks(n)} ": rank for rank, n in named.items()}
    margin = max(map(len, rows), default=0)
    total, columns = duration(shown), max(width - margin, 10)
    drawing = Text(no_wrap=True)
    for name, rank in rows.items():
        drawing.append(name.rjust(margin), style="bold")
        own = [bar for bar in shown if bar.rank == rank]
        drawing.append_text(_line(own, total, columns)).append("\n")
    return drawing


def drawn(events: Iterable[Event], width: int, of: Processes = lambda n: (n,)) -> list[Text]:
    """`text` and its legend."""
    listed = [*events]
    made = text(listed, width=width, of=of)
    return [made, Text(legend(made, bars(listed)))]


def legend(drawing: Text, shown: Sequence[Bar]) -> str:
    """Meaning of the signs that a text timeline has.

    Args:
        drawing: what `text` made of the events whose bars are `shown`.
    """
    signs = {sign for line in drawing.plain.splitlines() for sign in line.split(None, 2)[-1]}
    marks = {kind: letter + FILL[kind] * (FILL[kind] != letter) for kind, letter in LETTERS.items()}
    parts = [f"{mark} {kind}" for kind, mark in marks.items() if mark[0] in signs]
    parts += ["dots idle"] * ("·" in signs)
    number = f"; the number is the {numbered(shown)}" if any(map(str.isdigit, signs)) else ""
    return ", ".join(parts) + number


def _line(row: Sequence[Bar], total: float, wide: int) -> Text:
    """The characters of one rank."""
    line, at = Text(no_wrap=True), 0
    for bar in row:
        start, end = (round(time / total * wide) if total else 0 for time in (bar.start, bar.end))
        start = max(at, start)
        if end <= start:
            # Too short for a character: better left out than drawn over its neighbour.
            continue
        line.append("·" * (start - at), style="dim")
        # A label that does not fit would name another microbatch: 1 of 12 becomes a letter.
        label = bar.label if len(bar.label) <= end - start else LETTERS[bar.kind]
        style = STYLES[bar.kind][bar.minibatch % 2]
        line.append(label.ljust(end - start, FILL[bar.kind]), style=style)
        at = end
    line.append("·" * (wide - at), style="dim")
    return line
