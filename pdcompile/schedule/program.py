"""Schedule: what every rank does in one call, as a table and back.

`passes.check` walks it with tokens, `passes.simulate` with seconds and bytes, the runtime
with tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from pdcompile.errors import ScheduleError
from pdcompile.schedule.instruction import REPLICATED, TO_WEIGHTS, Action, Instruction, Kind, Phase


@dataclass(frozen=True, slots=True)
class Schedule:
    """The program of one call (`step`, `flush` or a forward-only evaluation), rank by rank."""

    name: str  # gpipe, 1f1b, 2bw, …, and "+flush", "+eval" for those programs
    columns: tuple[tuple[Instruction, ...], ...]

    def __str__(self) -> str:
        """A table with one column a rank and one instruction a row; `parse` reads it back."""
        homes = [column[0].stage if column else -1 for column in self.columns]
        cells = [
            [f"rank {rank} stage {home}", *(one.text(home) for one in column)]
            for rank, (home, column) in enumerate(zip(homes, self.columns, strict=True))
        ]
        widths = [max(map(len, column)) for column in cells]
        lines = [f"schedule {self.name}", *LEGEND]
        written = [one for column in self.columns for one in column]
        if any(one.target >= 0 for one in written):
            lines.append("#   >R/K to stage K on rank R, which holds several")
        if any(one.action.kind in (Kind.OUTPUT, Kind.STATE) for one in written):
            lines.append("#   oK output K, nK tensor K of the model")
        for row in zip_longest(*cells, fillvalue=""):
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("| " + " | ".join(padded) + " |")
        return "\n".join(lines)

    @staticmethod
    def parse(text: str, where: str = "schedule") -> Schedule:
        """Read what `str` wrote.  Raises ScheduleError with the line that is not understood."""
        lines = [line for line in text.splitlines() if line.strip() and line[0] != "#"]
        if not lines or not re.fullmatch(r"schedule \S+", lines[0].strip()):
            raise ScheduleError("the text does not begin with 'schedule NAME'", where=where)
        name = lines[0].split()[1]
        rows = [_row(line, where) for line in lines[1:]]
        if not rows:
            return Schedule(name, ())
        homes = []
        for rank, cell in enumerate(rows[0]):
            match = re.fullmatch(r"rank (\d+) stage (-?\d+)", cell)
            if match is None or int(match[1]) != rank:
                raise ScheduleError(f"column {rank} is headed {cell!r}", where=where)
            homes.append(int(match[2]))
        columns: list[list[Instruction]] = [[] for _ in homes]
        for number, row in enumerate(rows[1:]):
            if len(row) != len(homes):
                raise ScheduleError(
                    f"row {number} has {len(row)} cells for {len(homes)} ranks", where=where
                )
            for rank, cell in enumerate(row):
                if not cell:
                    continue
                if len(columns[rank]) != number:
                    raise ScheduleError(f"a gap in the column of rank {rank}", where=where)
                columns[rank].append(_cell(cell, homes[rank], where))
        return Schedule(name, tuple(map(tuple, columns)))


def ending_in_sums(column: Iterable[Instruction], stage: int) -> frozenset[Instruction]:
    """A stage's backwards after which its replicas next sum the gradients of their minibatch.

    What such a backward has completed is ready for the sum: no other one comes before POST_REDUCE,
    nor does a sum of anything else, so that all replicas begin their sums in one order.
    """
    found, last = [], None
    for one in column:
        if one.stage != stage:
            continue
        if one.action in TO_WEIGHTS:
            last = one
        elif one.action.phase is Phase.POST and one.action.kind in REPLICATED:
            # An update of several minibatches is named by the last one.
            if last and one.action.kind is Kind.REDUCE and one.minibatch >= last.minibatch:
                found.append(last)
            last = None
    return frozenset(found)


LEGEND = (
    "# one column a rank, one instruction a row; ACTION MINIBATCH:MICROBATCH, then",
    "#   eK edge K of the plan, tK tied parameter K, >R to rank R, <R from rank R,",
    "#   W-1 on the weights of one minibatch before, sK on stage K (where not the column's);",
    "#   MINIBATCH is relative to the call and left out where it is 0",
)

_ACTIONS = {action.value: action for action in Action}
_CELL = re.compile(
    r"(?P<action>[A-Z_]+)(?: (?:(?P<minibatch>-?\d+):)?(?P<microbatch>\d+)?)?"
    r"(?: (?P<kind>[eton])(?P<edge>\d+))?(?: (?P<side>[<>])(?P<peer>\d+)(?:/(?P<target>\d+))?)?"
    r"(?: W-(?P<lag>\d+))?(?: s(?P<stage>-?\d+))?"
)


def _row(line: str, where: str) -> list[str]:
    line = line.strip()
    if not (line.startswith("|") and line.endswith("|") and len(line) > 1):
        raise ScheduleError(f"not a row of the table: {line!r}", where=where)
    return [cell.strip() for cell in line[1:-1].split("|")]


def _cell(cell: str, home: int, where: str) -> Instruction:
    match = _CELL.fullmatch(cell)
    if match is None or match["action"] not in _ACTIONS:
        raise ScheduleError(f"not an instruction: {cell!r}", where=where)

    def number(key: str, default: int) -> int:
        return default if match[key] is None else int(match[key])

    found = Instruction(
        _ACTIONS[match["action"]],
        number("stage", home),
        number("minibatch", 0),
        number("microbatch", -1),
        number("edge", -1),
        number("peer", -1),
        number("lag", 0),
        number("target", -1),
    )
    if found.text(home) != cell:
        raise ScheduleError(f"{cell!r} should be written {found.text(home)!r}", where=where)
    return found
