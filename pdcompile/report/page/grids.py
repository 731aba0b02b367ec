"""Tables of the terminal as tables of a page."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from pdcompile.report.labels import Heading
from pdcompile.report.page.page_data import Grid


def grid(table: Table, note: str = "") -> Grid:
    """The cells of a table as plain texts; columns that are set to the right hold numbers."""
    return Grid(
        tuple(_plain(column.header) for column in table.columns),
        tuple(column.justify == "right" for column in table.columns),
        tuple(zip(*([_plain(cell) for cell in c.cells] for c in table.columns), strict=True)),
        note,
    )


def _plain(cell: Any) -> str:
    return cell.word if isinstance(cell, Heading) else str(cell)
