"""docs/planner.md: page.md with its tables and the figures that its prose quotes filled in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from planning.tables import Table

TEMPLATE = Path(__file__).parent / "page.md"
# [[name]] is a table with its command, [[name.value:.2f]] a figure that it noted.
_MARK = re.compile(r"\[\[(\w+)(?:\.(\w+):([^\]]*))?\]\]")


def render(tables: Sequence[Table]) -> str:
    """The page.

    Raises:
        KeyError: the template names a table or a figure that there is none of.
    """
    known = {table.name: table for table in tables}

    def filled(match: re.Match[str]) -> str:
        table = known[match[1]]
        if match[2]:
            return format(table.values[match[2]], match[3])
        return f"    {table.command}\n\n{table.markdown()}"

    return _MARK.sub(filled, TEMPLATE.read_text(encoding="utf-8"))
