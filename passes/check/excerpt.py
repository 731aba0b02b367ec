"""The rank × step excerpt of a program that an error shows, with "<-- here"."""

from __future__ import annotations

from collections.abc import Mapping

from pdcompile.schedule import Schedule

RADIUS = 3
MAX_RANKS = 4
HERE = " <-- here"


def excerpt(schedule: Schedule, marks: Mapping[int, int]) -> str:
    """The instructions around `marks` (rank → index in its column), one column a rank."""
    ranks = sorted(marks)[:MAX_RANKS]
    cells = []
    for rank in ranks:
        column, mark = schedule.columns[rank], marks[rank]
        cell = [f"rank {rank}"]
        for index in range(mark - RADIUS, mark + RADIUS + 1):
            text = f"{index}: {column[index]}" if 0 <= index < len(column) else ""
            cell.append(text + HERE if index == mark else text)
        cells.append(cell)
    widths = [max(map(len, cell)) for cell in cells]
    rows = zip(*cells, strict=True)
    lines = [
        "  " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        for row in rows
    ]
    if len(marks) > MAX_RANKS:
        lines.append(f"  … and {len(marks) - MAX_RANKS} more ranks")
    return "\n".join(line.rstrip() for line in lines)
