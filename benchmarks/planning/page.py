"""docs/planner.md: the method, and every table with the command that prints it."""

from __future__ import annotations

from collections.abc import Sequence

from planning.tables import Table


def render(tables: Sequence[Table]) -> str:
    """The page; figures in its prose are quoted from the tables."""
    return "\n".join(
        f"## {table.title}\n\n    {table.command}\n\n{table.markdown()}\n" for table in tables
    )
