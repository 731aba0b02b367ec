"""Schedule: what every rank does in one call, which prints as a table; and what a run notes of it.

`passes.check` walks it with tokens, `passes.simulate` with seconds and bytes, the runtime
with tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from pdcompile.schedule.instruction import Instruction, Kind


@dataclass(frozen=True, slots=True)
class Schedule:
    """The program of one call (`step`, `flush` or a forward-only evaluation), rank by rank."""

    name: str  # gpipe, 1f1b, 2bw, …, and "+flush", "+eval" for those programs
    columns: tuple[tuple[Instruction, ...], ...]

    def __str__(self) -> str:
        """A table with one column a rank and one instruction a row."""
        homes = [column[0].stage if column else -1 for column in self.columns]
        cells = [
            [f"rank {rank} stage {home}", *(one.text(home) for one in column)]
            for rank, (home, column) in enumerate(zip(homes, self.columns, strict=True))
        ]
        lines = [f"schedule {self.name}", *LEGEND]
        written = [one for column in self.columns for one in column]
        if any(one.target >= 0 for one in written):
            lines.append("#   >R/K to stage K on rank R, which holds several")
        if any(one.action.kind is Kind.OUTPUT for one in written):
            lines.append("#   oK output K")
        return "\n".join((*lines, *(f"| {row} |" for row in side_by_side(cells))))


LEGEND = (
    "# one column a rank, one instruction a row; ACTION MINIBATCH:MICROBATCH, then",
    "#   eK edge K of the plan, tK tied parameter K, >R to rank R, <R from rank R,",
    "#   W-1 on the weights of one minibatch before, sK on stage K (where not the column's);",
    "#   MINIBATCH is relative to the call and left out where it is 0",
)


def side_by_side(columns: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns of texts, line by line."""
    widths = [max(map(len, column)) for column in columns]
    for row in zip_longest(*columns, fillvalue=""):
        yield " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))


class RecordedEvent(NamedTuple):
    """One instruction that took time, as a run notes it and a trace file holds it; its fields are
    those of an event of the simulator too.

    `action` is the text of an `Action`; seconds are those of the hosts' clocks, from where the
    timeline begins.
    """

    rank: int
    stage: int
    action: str
    minibatch: int
    microbatch: int
    start_seconds: float
    end_seconds: float
