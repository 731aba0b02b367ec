"""Tables that print row by row while a benchmark runs, and as Markdown afterwards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

Cell = str | int | float | None
ROUNDING = 1e-12  # of a share


@dataclass(slots=True)
class Table:
    """`command` prints this table; `values` are figures that the prose around it quotes."""

    name: str
    title: str
    command: str
    headings: tuple[str, ...]
    widths: tuple[int, ...]  # of the text form; the first column is left-aligned, the rest right
    rows: list[list[str]] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)

    def begin(self) -> Table:
        """Print title and headings."""
        print(f"\n{self.title}\n  $ {self.command}", flush=True)
        print(self._line(self.headings), flush=True)
        return self

    def add(self, *cells: Cell) -> None:
        """Print a row and keep it; a number without a format gets six digits."""
        row = [_text(cell) for cell in cells]
        assert len(row) == len(self.headings), (row, self.headings)
        self.rows.append(row)
        print(self._line(row), flush=True)

    def note(self, **values: float) -> None:
        """Print figures that the prose quotes, and keep them."""
        self.values |= values
        print("  " + ", ".join(f"{k} = {v:.6g}" for k, v in values.items()), flush=True)

    def markdown(self) -> str:
        bars = ["---", *["---:"] * (len(self.headings) - 1)]
        lines = [self.headings, bars, *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def _line(self, cells: Sequence[str]) -> str:
        first, *rest = zip(cells, self.widths, strict=True)
        return f"{first[0]:<{first[1]}}" + "".join(f" {cell:>{width}}" for cell, width in rest)


def save(tables: Sequence[Table], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(table) for table in tables], indent=1), encoding="utf-8")


def load(path: Path) -> list[Table]:
    stored = json.loads(path.read_text(encoding="utf-8"))
    return [
        Table(**row | {"headings": tuple(row["headings"]), "widths": tuple(row["widths"])})
        for row in stored
    ]


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def percent(share: float | None) -> str:
    """``0`` for none but for rounding, which a proof of optimality is."""
    return "–" if share is None else "0" if abs(share) < ROUNDING else f"{100 * share:.2g} %"
