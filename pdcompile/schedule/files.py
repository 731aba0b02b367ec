"""Schedules as files that a person edits: CSV as torch.distributed.pipelining has it, and JSON.

CSV: one row a rank, one cell a unit of time, empty where the rank idles::

    0F0,0F1,,0B0,0B1
    ,1F0,1B0,1F1,1B1

JSON: the same with a name, and a text for each rank, in which ``.`` stands for an idle unit::

    {
      "schedule": "mine",
      "ranks": [
        "0F0 0F1 .   0B0 .   0B1",
        ".   1F0 1B0 1F1 1B1"
      ]
    }
"""

from __future__ import annotations

import csv
import io
import json
import re
from os import PathLike
from pathlib import Path
from typing import Any

from pdcompile.errors import PdcompileError, ScheduleError
from pdcompile.files import read_limited
from pdcompile.jsonio import loads
from pdcompile.schedule.written import Written, parse, read_rows

SUFFIXES = (".csv", ".json")


def read(path: str | PathLike[str]) -> Written:
    """Read a file by its suffix; a CSV's name is that of its file.

    Raises:
        ScheduleError: it cannot be read, or is no schedule; with row and column, from 1.
        DeadlockError: its ranks wait for each other.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ScheduleError(
            f"a schedule is read from {' or '.join(SUFFIXES)}, not from {path.suffix or path.name}",
            where=str(path),
            remedy="name the file for what is in it",
        )
    try:
        text = read_limited(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(
            f"cannot read the schedule: {getattr(error, 'strerror', None) or error}",
            where=str(path),
            remedy="the path of a CSV or JSON file, which `pdcompile schedule NAME -o FILE` writes",
        ) from error
    reads = from_csv if path.suffix.lower() == ".csv" else from_json
    return reads(text, str(path), _name(path.stem))


def is_plan(path: Path) -> bool:
    """Is it the file of a plan, which has stages, and not of a schedule alone?"""
    try:
        data = loads(read_limited(path), where=str(path))
    except (OSError, PdcompileError):
        return False  # who reads it says what is wrong
    return isinstance(data, dict) and "stages" in data


def named(schedule: Any) -> Any:
    """A schedule's name as it is; for the path of a file the tasks in it (`registry.kind_of`).

    Raises:
        ScheduleError: they are none of a schedule: see `read`.
    """
    text = isinstance(schedule, str)
    if isinstance(schedule, PathLike) or (text and schedule.lower().endswith(SUFFIXES)):
        return str(read(schedule))
    if text and ":" in schedule:
        parse(schedule, "schedule")
    return schedule


def from_csv(text: str, where: str, name: str) -> Written:
    """See `read`."""
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ScheduleError(
            f"the file is not CSV: {error}", where=where, remedy="one row a rank, such as 0F0,0B0"
        ) from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    return read_rows(name, rows, where)


def from_json(text: str, where: str, name: str) -> Written:
    """See `read`; the name is the file's where it has none of its own."""
    wanted = "give an object of 'ranks', as `pdcompile schedule PLAN -o mine.json` writes it"
    data = loads(text, where=where, error=ScheduleError, remedy=wanted)
    ranks = data.get("ranks") if isinstance(data, dict) else None
    if not isinstance(ranks, list) or set(data) - {"schedule", "ranks"}:
        raise _no_schedule("it is not an object of 'ranks', with or without 'schedule'", where)
    own = data.get("schedule", name)
    if not isinstance(own, str) or own != _name(own):
        raise _no_schedule("'schedule' is not a name of letters, digits, '.', '_' and '-'", where)
    return read_rows(own, [_cells(row, n, where) for n, row in enumerate(ranks, 1)], where)


def to_csv(schedule: Written) -> str:
    """As torch.distributed.pipelining reads it."""
    rows = (",".join(str(cell or "") for cell in row) for row in schedule.slots())
    return "".join(f"{row}\n" for row in rows)


def to_json(schedule: Written) -> str:
    """In columns, for the eye."""
    rows = [[str(cell or ".") for cell in row] for row in schedule.slots()]
    width = max(len(cell) for row in rows for cell in row)
    texts = [" ".join(cell.ljust(width) for cell in row).rstrip() for row in rows]
    listed = ",\n".join(f"    {json.dumps(text)}" for text in texts)
    return f'{{\n  "schedule": {json.dumps(schedule.name)},\n  "ranks": [\n{listed}\n  ]\n}}\n'


def write(schedule: Written, path: str | PathLike[str]) -> str:
    """The text of a file by its suffix.  Raises ScheduleError for another one."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ScheduleError(
            f"a schedule is written to {' or '.join(SUFFIXES)}, not to {suffix or path}",
            where=str(path),
            remedy="for example mine.csv",
        )
    return to_csv(schedule) if suffix == ".csv" else to_json(schedule)


def _cells(row: Any, number: int, where: str) -> list[str]:
    """Of a text with spaces between them, or of a list."""
    if isinstance(row, str):
        return row.split()
    if isinstance(row, list) and all(isinstance(cell, str) for cell in row):
        return row
    raise _no_schedule("a rank is a text of cells, such as '0F0 0B0'", f"{where}: row {number}")


def _no_schedule(message: str, where: str) -> ScheduleError:
    return ScheduleError(
        message,
        where=where,
        remedy='{"schedule": "mine", "ranks": ["0F0 0B0", "1F0 1B0"]}: one text a rank',
    )


def _name(text: str) -> str:
    """For programs and reports: without what a name cannot have."""
    return re.sub(r"[^\w.-]+", "-", text) or "written"
