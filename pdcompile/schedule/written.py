"""Schedule that a person wrote down, task by task: a CSV file, or one line of text in a plan.

The file is that of torch.distributed.pipelining, which reads and writes it too: one row a rank, one
cell a unit of time, empty where the rank idles.  ``0F3`` is the forward of microbatch 3 on stage
0, B its backward, or I and W the two parts of one that is split::

    0F0,0F1,,0B0,0B1
    ,1F0,1B0,1F1,1B1

A plan carries the same in place of a schedule's name::

    mine: 0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1

Sends, receives and updates are in no cell: they are added to every schedule by one lowering.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import groupby, pairwise
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from pdcompile.errors import DeadlockError, ScheduleError
from pdcompile.files import read_limited
from pdcompile.schedule.instruction import BACKWARDS, TO_INPUTS, TO_WEIGHTS, Action, most_held

SUFFIX = ".csv"
COMPUTES = (Action.FORWARD, *BACKWARDS)
_ACTIONS = {one.value: one for one in COMPUTES}
_CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_BOTH = re.compile(r"\((.*)\)OVERLAP_F_B")
#: what torch's own lowering adds to a schedule, as pdcompile's adds its own
_ADDED = re.compile(r"\d+(UNSHARD|RESHARD|(WAIT_)?(REDUCE_GRAD|SEND_F|SEND_B)|RECV_F|RECV_B)\d*")


class Cell(NamedTuple):
    """A forward, or a backward or part of one."""

    stage: int
    action: Action
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.action.value}{self.microbatch}"


class Place(NamedTuple):
    """Place of a cell, counted from 1."""

    row: int
    column: int

    def __str__(self) -> str:
        return f"row {self.row}, column {self.column}"


Row = tuple[Cell, ...]
Placed = tuple[Place, Cell]
Problem = tuple[Place, str, str]  # with its message and remedy


@dataclass(frozen=True)
class Written:
    """A schedule as rows of cells; `read_rows` makes one that runs."""

    name: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return f"{self.name}: " + " | ".join(" ".join(map(str, row)) for row in self.rows)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of every stage."""
        found = {cell.stage: rank for rank, row in enumerate(self.rows) for cell in row}
        return tuple(found[stage] for stage in range(len(found)))

    @cached_property
    def num_microbatches(self) -> int:
        return 1 + max(cell.microbatch for row in self.rows for cell in row)

    @cached_property
    def backward_actions(self) -> tuple[Action, ...]:
        """All kinds of backward that it has."""
        found = {cell.action for row in self.rows for cell in row}
        return tuple(action for action in BACKWARDS if action in found)

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """Place of each microbatch in the order of backwards, on every stage; empty: ascending."""
        last = len(self.placement) - 1
        order = [
            cell.microbatch
            for cell in self.rows[self.placement[last]]
            if cell.stage == last and cell.action in TO_INPUTS
        ]
        if order == sorted(order):
            return ()
        return tuple(order.index(microbatch) for microbatch in range(len(order)))

    @cached_property
    def warmup(self) -> tuple[int, ...]:
        """Depth of each stage: one less than the microbatches that it holds at most."""
        tasks = ((cell.stage, cell.action) for row in self.rows for cell in row)
        return tuple(count - 1 for count in most_held(tasks, len(self.placement)))

    def to_csv(self) -> str:
        """The text of a file, with a column for each unit of time if every task takes one."""
        begin = _begins(self.rows)
        lines = []
        for row in self.rows:
            slots = [""] * (begin[row[-1]] + 1)
            for cell in row:
                slots[begin[cell]] = str(cell)
            lines.append(",".join(slots) + "\n")
        return "".join(lines)


def read(path: str | PathLike[str]) -> Written:
    """Read a file, whose name without its suffix is the schedule's.

    Raises:
        ScheduleError: it cannot be read, or is no schedule; with row and column, from 1.
        DeadlockError: its ranks wait for each other.
    """
    path = Path(path)
    check_suffix(path, "read from")
    try:
        text = read_limited(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(
            f"cannot read the schedule: {getattr(error, 'strerror', None) or error}",
            where=str(path),
            remedy="the path of a CSV file, which `pdcompile schedule NAME -o FILE.csv` writes",
        ) from error
    return from_csv(text, str(path), re.sub(r"[^\w.-]+", "-", path.stem) or "written")


def check_suffix(path: Path, what: str) -> None:
    """Refuse a file that a schedule is not read from, or not written to.  Raises ScheduleError."""
    suffix = path.suffix.lower()
    if suffix != SUFFIX:
        raise ScheduleError(
            f"a schedule is {what} {SUFFIX}, not {what.split()[-1]} {suffix or path}",
            where=str(path),
            remedy=f"a CSV file, such as {path.stem or 'mine'}{SUFFIX}",
        )


def named(schedule: Any) -> Any:
    """A schedule's name as it is; for the path of a file the tasks in it (`registry.kind_of`).

    Raises:
        ScheduleError: they are none of a schedule: see `read`.
    """
    text = isinstance(schedule, str)
    if isinstance(schedule, PathLike) or (text and schedule.lower().endswith(SUFFIX)):
        return str(read(schedule))
    if text and ":" in schedule:
        parse(schedule, "schedule")
    return schedule


def from_csv(text: str, where: str, name: str) -> Written:
    """Read the text of a file: see `read`."""
    rows = [line.split(",") for line in text.splitlines()]
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    return read_rows(name, rows, where)


def parse(text: str, where: str) -> Written:
    """Read what `str` wrote.  Raises ScheduleError, DeadlockError: see `read_rows`."""
    name, colon, rest = text.partition(":")
    if not (colon and re.fullmatch(r"[\w.-]+", name)):
        raise ScheduleError(
            f"{text[:40]!r} is not a written schedule",
            where=where,
            remedy="'NAME: 0F0 0B0 | 1F0 1B0': the tasks of every rank in their order",
        )
    return read_rows(name, [row.split() for row in rest.split("|")], where)


def read_rows(name: str, texts: Sequence[Sequence[str]], where: str) -> Written:
    """A schedule from the texts of its cells, proved to be one as far as it can be without a plan.

    Idle cells only show when something happens, and what torch's lowering added is left out.

    Raises:
        ScheduleError: a cell is not understood, a task is missing, doubled, on another rank than
            its stage, or out of order; with row and column, counted from 1.
        DeadlockError: ranks wait for each other.
    """
    rows = [list(_row(number, row, where)) for number, row in enumerate(texts, 1)]
    if not any(rows):
        raise ScheduleError(
            "there is no task in it", where=where, remedy="one row a rank, such as 0F0,0B0"
        )
    _refuse(_ranks(rows), where)
    stages = [dict[Cell, Place]() for _ in {cell.stage for row in rows for _, cell in row}]
    for row in rows:
        for place, cell in row:
            stages[cell.stage][cell] = place
    _refuse(_microbatches(stages), where)
    _refuse(_order(stages), where)
    made = Written(name, tuple(tuple(cell for _, cell in row) for row in rows))
    try:
        _begins(made.rows)
    except CycleError as error:
        raise _deadlock(error.args[1], stages, where) from None
    return made


def _row(number: int, texts: Iterable[str], where: str) -> Iterator[Placed]:
    for column, text in enumerate(texts, 1):
        both = _BOTH.fullmatch(text.strip())
        for part in both[1].split(";") if both else [text]:
            if not part.strip() or _ADDED.fullmatch(part.strip()):
                continue
            place, match = Place(number, column), _CELL.fullmatch(part.strip())
            if match is None:
                raise ScheduleError(
                    f"{text.strip()[:40]!r} is not a task",
                    where=f"{where}: {place}",
                    remedy="a stage, F, B, I or W, and a microbatch: 0F3; nothing where a rank "
                    "idles",
                )
            yield place, Cell(int(match[1]), _ACTIONS[match[2]], int(match[3]))


def _refuse(problems: Iterator[Problem], where: str) -> None:
    for place, message, remedy in problems:
        raise ScheduleError(message, where=f"{where}: {place}", remedy=remedy)


def _ranks(rows: Sequence[Sequence[Placed]]) -> Iterator[Problem]:
    """Ranks without a task, stages on two ranks or left out, tasks that are there twice."""
    found: dict[Cell, Place] = {}
    first: dict[int, Place] = {}
    for number, row in enumerate(rows, 1):
        if not row:
            message = f"the rank of row {number} computes nothing"
            remedy = "one row for each rank that holds a stage: remove the row"
            yield Place(number, 1), message, remedy
        for place, cell in row:
            other = first.setdefault(cell.stage, place)
            if other.row != number:
                message = f"stage {cell.stage} is on two ranks: {cell} is in row {number}, "
                message += f"and {other} is of that stage too"
                yield place, message, "all tasks of a stage in one row, which is its rank"
            if cell in found:
                yield place, f"{cell} is there twice, first in {found[cell]}", "each task once"
            found[cell] = place
    for number, stage in enumerate(sorted(first)):
        if stage != number:
            message = f"there is a stage {stage}, and no stage {number}"
            yield first[stage], message, "number the stages from 0 without gaps"


def _microbatches(stages: Sequence[dict[Cell, Place]]) -> Iterator[Problem]:
    """Microbatches that do not go forward and backward once on a stage."""
    number = attrgetter("microbatch")
    by_number = [
        {i: [*own] for i, own in groupby(sorted(cells, key=number), number)} for cells in stages
    ]
    count = max(map(len, by_number))
    for stage, (cells, numbered) in enumerate(zip(stages, by_number, strict=True)):
        for i in range(count):
            found = numbered.get(i, [])
            kinds = {cell.action for cell in found}
            if kinds not in ({Action.FORWARD, Action.BACKWARD}, {*COMPUTES} - {Action.BACKWARD}):
                there = ", ".join(map(str, found)) or "nothing"
                message = f"stage {stage} has {there} of microbatch {i}, not one forward and one "
                yield (
                    cells[found[-1] if found else [*cells][-1]],
                    f"{message}backward",
                    f"{count} microbatches on every stage, from 0 without gaps, each once as F and "
                    "B, or as F, I and W",
                )


def _order(stages: Sequence[dict[Cell, Place]]) -> Iterator[Problem]:
    """Forwards ascend; backwards have one order on all stages, which decides the sums."""
    order = [cell.microbatch for cell in stages[-1] if cell.action in TO_INPUTS]
    rules = (
        ("forward", frozenset((Action.FORWARD,)), sorted(order), "in which they are numbered"),
        ("backward", TO_INPUTS, order, f"of stage {len(stages) - 1}: gradients arrive as sent"),
        ("backward", TO_WEIGHTS, order, "of the other gradients: sums then have one order"),
    )
    for stage, cells in enumerate(stages):
        for what, actions, due, remedy in rules:
            found = [cell for cell in cells if cell.action in actions]
            for cell, microbatch in zip(found, due, strict=True):
                if cell.microbatch != microbatch:
                    message = f"{cell} comes where stage {stage} is to go {what} with microbatch "
                    yield (
                        cells[cell],
                        f"{message}{microbatch}",
                        f"microbatches go {what} in the order {remedy}",
                    )


def _begins(rows: Sequence[Row]) -> dict[Cell, int]:
    """Time at which each task begins if all take one unit.  Raises CycleError."""
    before: dict[Cell, list[Cell]] = {cell: [] for row in rows for cell in row}
    for cell, needed in before.items():
        needed += [one for one in _needed(cell) if one in before]
    for row in rows:
        for one, following in pairwise(row):
            before[following].append(one)
    begin: dict[Cell, int] = {}
    for cell in TopologicalSorter(before).static_order():
        begin[cell] = max((begin[one] + 1 for one in before[cell]), default=0)
    return begin


def _needed(cell: Cell) -> list[Cell]:
    """The tasks of which one has to be done before, if it is there."""
    stage, action, microbatch = cell
    if action is Action.FORWARD:
        return [Cell(stage - 1, action, microbatch)]
    own = Action.BACKWARD_INPUT if action is Action.BACKWARD_WEIGHT else Action.FORWARD
    later = [Cell(stage + 1, one, microbatch) for one in BACKWARDS if {one, action} <= TO_INPUTS]
    return [Cell(stage, own, microbatch), *later]


def _deadlock(
    cycle: Sequence[Cell], placed: Sequence[dict[Cell, Place]], where: str
) -> DeadlockError:
    """The tasks that wait for each other in a circle, of which each is needed by the next one."""
    places = {cell: place for cells in placed for cell, place in cells.items()}
    waits = [(one, due) for due, one in pairwise(cycle) if due in _needed(one)][::-1]
    first = min(range(len(waits)), key=lambda n: places[waits[n][0]])
    waits = waits[first:] + waits[:first]
    words = [f"{one} ({places[one]}) waits for {due}" for one, due in waits]
    cell = waits[0][0]
    return DeadlockError(
        "deadlock: " + ", which comes after ".join([*words, str(cell)]),
        where=f"{where}: {places[cell]}",
        remedy="move one of these cells, in its row, behind what it holds up",
    )
