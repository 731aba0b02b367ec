"""benchmarks/results/planner.md: page.md with its tables, and the figures that its prose quotes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from planning.tables import Table

TEMPLATE = Path(__file__).parent / "page.md"
# [[name]] is a table with its command, [[name.value:.2f]] a figure that it noted.
_MARK = re.compile(r"\[\[(\w+)(?:\.(\w+):([^\]]*))?\]\]")


def render(tables: Sequence[Table], page: str = "") -> str:
    """The page; sections of tables that are not given stay as they are in the `page` that was.

    Raises:
        KeyError: the page that was has no such section, or a table no such figure.
    """
    known = {table.name: table for table in tables}
    before = {_title(section): section for section in _sections(page)}

    def filled(match: re.Match[str]) -> str:
        table = known[match[1]]
        if match[2]:
            return format(table.values[match[2]], match[3])
        return f"    {table.command}\n\n{table.markdown()}"

    found = []
    for section in _sections(TEMPLATE.read_text(encoding="utf-8")):
        missing = {match[1] for match in _MARK.finditer(section)} - set(known)
        found.append(before[_title(section)] if missing else _MARK.sub(filled, section))
    return "".join(found)


def _sections(page: str) -> list[str]:
    return re.split(r"(?m)^(?=## )", page)


def _title(section: str) -> str:
    return section.partition("\n")[0]
