"""Written: a schedule that somebody wrote down, task by task, instead of generating it.

One row a rank, one cell a task in the order of its execution: ``0F3`` is the forward of microbatch
3 on stage 0, B its backward, or I and W the two parts of one that is split.  The cells are those of
torch.distributed.pipelining, so that its schedules can be read.  Sends, receives and updates are
in no cell: they are added to every schedule by one lowering.

A plan carries a written schedule as one line of text, in place of a schedule's name::

    mine: 0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pdcompile.errors import DeadlockError, ScheduleError
from pdcompile.schedule.instruction import BACKWARDS, TO_INPUTS, TO_WEIGHTS, Action, most_held

COMPUTES = (Action.FORWARD, *BACKWARDS)
_ACTIONS = {one.value: one for one in COMPUTES}
IDLE = ("", ".")
_CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_BOTH = re.compile(r"\((.*)\)OVERLAP_F_B")
#: what torch's own lowering adds to a schedule, as pdcompile's adds its own
_ADDED = re.compile(r"\d+(UNSHARD|RESHARD|(WAIT_)?(REDUCE_GRAD|SEND_F|SEND_B)|RECV_F|RECV_B)\d*")
_WORDS = {
    Action.FORWARD: "forward",
    Action.BACKWARD: "backward",
    Action.BACKWARD_INPUT: "backward to the inputs",
    Action.BACKWARD_WEIGHT: "backward to the weights",
}


class Cell(NamedTuple):
    """A forward, or a backward or part of one."""

    stage: int
    action: Action
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.action.value}{self.microbatch}"

    @property
    def words(self) -> str:
        return f"{_WORDS[self.action]} of microbatch {self.microbatch} on stage {self.stage}"


class Place(NamedTuple):
    """Where a cell stands, counted from 1; which part of it, where it has several tasks."""

    row: int
    column: int
    part: int = 0

    def __str__(self) -> str:
        return f"row {self.row}, column {self.column}"


Row = tuple[Cell, ...]
Placed = tuple[Place, Cell]


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
    def splits_backward(self) -> bool:
        return Action.BACKWARD_INPUT in self.backward_actions

    @cached_property
    def backward_actions(self) -> tuple[Action, ...]:
        """All kinds of backward that it has."""
        found = {cell.action for row in self.rows for cell in row}
        return tuple(action for action in BACKWARDS if action in found)

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """When each microbatch goes backward, on every stage; empty: in ascending order."""
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
        """Of each stage one less than the microbatches that it holds at most."""
        tasks = ((cell.stage, cell.action) for row in self.rows for cell in row)
        return tuple(count - 1 for count in most_held(tasks, len(self.placement)))

    def slots(self) -> list[list[Cell | None]]:
        """The rows with a column for each unit of time, if every task takes one; None: idle."""
        walk = _Walk(self.rows)
        walk.run()
        return walk.slots


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
    reader = _Reader(where)
    rows = [list(reader.row(number, row)) for number, row in enumerate(texts, 1)]
    if not any(rows):
        raise ScheduleError(
            "there is no task in it", where=where, remedy="one row a rank, such as 0F0,0B0"
        )
    placed = reader.by_stage(rows)
    reader.every_microbatch(placed)
    reader.in_order(placed)
    made = Written(name, tuple(tuple(cell for _, cell in row) for row in rows))
    walk = _Walk(made.rows)
    if not walk.run():
        raise _deadlock(walk, rows, where)
    return made


class _Reader:
    """The checks of `read_rows`, each of which relies on those before it."""

    def __init__(self, where: str):
        self.where = where

    def error(self, place: Place, message: str, remedy: str) -> ScheduleError:
        return ScheduleError(message, where=f"{self.where}: {place}", remedy=remedy)

    def row(self, number: int, texts: Iterable[str]) -> Iterator[Placed]:
        for column, text in enumerate(texts, 1):
            text = text.strip()
            both = _BOTH.fullmatch(text)
            for at, part in enumerate(both[1].split(";") if both else [text]):
                place = Place(number, column, at)
                if part.strip() in IDLE or _ADDED.fullmatch(part.strip()):
                    continue
                match = _CELL.fullmatch(part.strip())
                if match is None:
                    raise self.error(
                        place,
                        f"{text[:40]!r} is not a task",
                        "a stage, F, B, I or W, and a microbatch: 0F3; nothing where a rank idles",
                    )
                yield place, Cell(int(match[1]), _ACTIONS[match[2]], int(match[3]))

    def by_stage(self, rows: Sequence[Sequence[Placed]]) -> list[dict[Cell, Place]]:
        """The cells of every stage, each of which is on one rank, and every rank has one."""
        found: dict[int, dict[Cell, Place]] = {}
        first: dict[int, Place] = {}
        for number, row in enumerate(rows, 1):
            if not row:
                raise self.error(
                    Place(number, 1),
                    f"the rank of row {number} computes nothing",
                    "one row for each rank that holds a stage: remove the row",
                )
            for place, cell in row:
                other = first.setdefault(cell.stage, place)
                if other.row != place.row:
                    raise self.error(
                        place,
                        f"stage {cell.stage} is on two ranks: {cell} is in row {number}, and "
                        f"{other} is of that stage too",
                        "all tasks of a stage in one row, which is its rank",
                    )
                cells = found.setdefault(cell.stage, {})
                if cell in cells:
                    raise self.error(
                        place,
                        f"{cell} is there twice, first in {cells[cell]}",
                        "each task once",
                    )
                cells[cell] = place
        for number, stage in enumerate(sorted(found)):
            if stage != number:
                raise self.error(
                    first[stage],
                    f"there is a stage {stage}, and no stage {number}",
                    "number the stages from 0 without gaps",
                )
        return [found[stage] for stage in range(len(found))]

    def every_microbatch(self, placed: Sequence[dict[Cell, Place]]) -> None:
        """Each goes forward and backward once on every stage."""
        forwards = [{c.microbatch for c in cells if c.action is Action.FORWARD} for cells in placed]
        most = max(range(len(placed)), key=lambda stage: len(forwards[stage]))
        for stage, cells in enumerate(placed):
            count = len(forwards[most])
            missing = next((i for i in range(count) if i not in forwards[stage]), None)
            if missing is not None:
                raise self.error(
                    list(cells.values())[-1],
                    f"there is no {Cell(stage, Action.FORWARD, missing).words}"
                    + (f", and stage {most} has {count} of them" if stage != most else ""),
                    "every microbatch, from 0 without gaps, once forward and once backward on "
                    "every stage",
                )
            for i in sorted(forwards[stage]):
                self._backward(stage, i, cells)
            for cell, place in cells.items():
                if cell.microbatch not in forwards[stage]:
                    raise self.error(
                        place,
                        f"a {cell.words}, which has no forward there",
                        f"add {Cell(stage, Action.FORWARD, cell.microbatch)} before it, or remove "
                        "the cell",
                    )

    def _backward(self, stage: int, microbatch: int, cells: dict[Cell, Place]) -> None:
        """Either whole or in both of its parts, each after what it needs."""
        forward, whole, first, second = (Cell(stage, one, microbatch) for one in COMPUTES)
        if whole in cells and (first in cells or second in cells):
            part = first if first in cells else second
            raise self.error(
                cells[part],
                f"{part} is a part of {whole}, which is there too, in {cells[whole]}",
                "either the whole backward (B), or its two parts (I and W)",
            )
        needed = (whole,) if whole in cells else (first, second)
        for cell in needed:
            if cell not in cells:
                one = whole if first not in cells and second not in cells else cell
                raise self.error(cells[forward], f"no {one.words} follows", f"add {one} to the row")
        for before, after in ((forward, needed[0]), (needed[0], needed[-1])):
            if cells[after] < cells[before]:
                raise self.error(
                    cells[after],
                    f"{after} comes before {before}, which is in {cells[before]}",
                    f"move {after} behind {before}",
                )

    def in_order(self, placed: Sequence[dict[Cell, Place]]) -> None:
        """Forwards ascend; backwards have one order on all stages, which decides the sums."""
        last = len(placed) - 1
        order = [cell.microbatch for cell in placed[last] if cell.action in TO_INPUTS]
        for stage, cells in enumerate(placed):
            for actions, expected, remedy in (
                (
                    (Action.FORWARD,),
                    sorted(order),
                    "number the microbatches in the order in which they go forward",
                ),
                (
                    TO_INPUTS,
                    order,
                    f"microbatches go backward in the order of stage {last} on every stage: "
                    "gradients arrive in the order in which they are sent",
                ),
                (
                    TO_WEIGHTS,
                    order,
                    "gradients of weights in the order of the other gradients: sums then do not "
                    "depend on the stage",
                ),
            ):
                found = [(cell, place) for cell, place in cells.items() if cell.action in actions]
                for (cell, place), due in zip(found, expected, strict=True):
                    if cell.microbatch != due:
                        what = "forward" if cell.action is Action.FORWARD else "backward"
                        raise self.error(
                            place,
                            f"{cell} comes where stage {stage} is to go {what} with microbatch "
                            f"{due}",
                            remedy,
                        )


class _Walk:
    """Runs all rows together, one unit of time a task, as far as none waits for another."""

    def __init__(self, rows: Sequence[Row]):
        self.rows = rows
        self.at = [0] * len(rows)
        self.slots: list[list[Cell | None]] = [[] for _ in rows]
        stages = {cell.stage for row in rows for cell in row}
        self.last = max(stages)
        self.done: set[Cell] = set()

    def run(self) -> bool:
        """Whether it comes to the end."""
        while any(at < len(row) for at, row in zip(self.at, self.rows, strict=True)):
            now = []
            for rank, (at, row) in enumerate(zip(self.at, self.rows, strict=True)):
                if at < len(row) and self.waits_for(row[at]) is None:
                    now.append(rank)
            if not now:
                return False
            for rank, slots in enumerate(self.slots):
                if self.at[rank] < len(self.rows[rank]):
                    slots.append(self.rows[rank][self.at[rank]] if rank in now else None)
            for rank in now:
                self.done.add(self.rows[rank][self.at[rank]])
                self.at[rank] += 1
        return True

    def waits_for(self, cell: Cell) -> Cell | None:
        """What another stage has to do first."""
        stage, action, microbatch = cell
        if action is Action.FORWARD:
            needed = [Cell(stage - 1, action, microbatch)] if stage else []
        elif action in TO_INPUTS and stage < self.last:
            needed = [Cell(stage + 1, one, microbatch) for one in BACKWARDS[:2]]
        else:
            needed = []
        return None if not needed or self.done.intersection(needed) else needed[0]


def _deadlock(walk: _Walk, rows: Sequence[Sequence[Placed]], where: str) -> DeadlockError:
    """The ranks that wait for each other in a circle."""
    standing = zip(walk.at, rows, strict=True)
    blocked = {rank: row[at] for rank, (at, row) in enumerate(standing) if at < len(row)}
    rank_of = {cell.stage: rank for rank, row in enumerate(rows) for _, cell in row}
    needed: dict[int, Cell] = {}
    rank = min(blocked)
    while rank not in needed:
        cell = walk.waits_for(blocked[rank][1])
        assert cell is not None
        needed[rank] = cell
        rank = rank_of[cell.stage]
    listed = list(needed)
    circle = listed[listed.index(rank) :]
    words = [f"{blocked[one][1]} ({blocked[one][0]}) waits for {needed[one]}" for one in circle]
    return DeadlockError(
        "deadlock: " + ", which comes after ".join([*words, str(blocked[rank][1])]),
        where=f"{where}: {blocked[rank][0]}",
        remedy="move one of these cells, in its row, behind what it holds up",
    )
