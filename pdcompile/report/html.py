"""A plan as one HTML file: no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from pdcompile.plan import MemoryLedger, Plan
from pdcompile.report.plan_table import (
    LEDGER_LINES,
    certificate_line,
    forecast_line,
    headline,
    limits,
    stage_rows,
)
from pdcompile.report.svg import Panel, draw
from pdcompile.report.timeline import Event
from pdcompile.schedule.registry import name_of
from pdcompile.units import format_bytes

LEDGER_FILLS = (
    "#3b6fb6", "#5f9ea0", "#8c6bb1", "#4f8ff7", "#2f9e5f", "#93d6ae", "#d08a13", "#e6c35c",
    "#9aa5b1", "#c9d1d9",
)  # fmt: skip

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1040px;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}
th,td{padding:.3rem .6rem;border-bottom:1px solid #e2e5e9;text-align:right;vertical-align:top}
th{font-weight:600;color:#555}.text{text-align:left}
.over{color:#b00020;font-weight:600}svg{max-width:100%;height:auto}
.key{display:inline-block;width:.8rem;height:.8rem;margin:0 .3rem 0 1rem;vertical-align:-1px}
"""


def page(plan: Plan, events: Iterable[Event], *, title: str = "pdcompile plan") -> str:
    """Stages, timeline, memory and certificate of a plan; a complete HTML document."""
    stages = stage_rows(plan)
    sections = [
        f"<h1>{escape(title)}</h1>",
        _paragraph(str(headline(plan))),
        _paragraph(str(certificate_line(plan))),
        _paragraph(str(forecast_line(plan))) if plan.forecast else "",
        "<h2>Timeline</h2>",
        draw([Panel(name_of(plan.training.schedule), events)]),
        "<h2>Stages</h2>",
        _table([*stages[0]], [[*row.values()] for row in stages], texts=(2,)),
        "<h2>Memory</h2>" + _memory(plan) if plan.forecast else "",
        "<h2>Notes</h2>" + "".join(map(_paragraph, plan.notes)) if plan.notes else "",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body></html>\n"
    )


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        shown = (
            f"<{tag}{' class=text' if i in texts else ''}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )
        return f"<tr>{''.join(shown)}</tr>"

    body = "\n".join(cells("td", row) for row in rows)
    return f"<table><thead>{cells('th', head)}</thead><tbody>\n{body}\n</tbody></table>"


def _memory(plan: Plan) -> str:
    """A stacked bar a rank, with its limit as a line, and the figures below."""
    assert plan.forecast is not None
    limit_of = limits(plan)
    ledgers = plan.forecast.ledgers
    known = [limit for rank in range(len(ledgers)) if (limit := limit_of.get(rank))]
    scale = max([ledger.total_bytes for ledger in ledgers] + known) or 1
    bars = "".join(
        _bar(rank, ledger, limit_of.get(rank), scale) for rank, ledger in enumerate(ledgers)
    )
    height = 26 * len(ledgers) + 8
    keys = "".join(
        f'<span class="key" style="background:{fill}"></span>{label}'
        for (_, label), fill in zip(LEDGER_LINES, LEDGER_FILLS, strict=True)
    )
    head = ("rank", *(label for _, label in LEDGER_LINES), "total", "limit")
    rows = [
        (
            str(rank),
            *(format_bytes(getattr(ledger, name)) for name, _ in LEDGER_LINES),
            format_bytes(ledger.total_bytes),
            "none" if (limit := limit_of.get(rank)) is None else format_bytes(limit),
        )
        for rank, ledger in enumerate(ledgers)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {height}" width="1000" '
        f'height="{height}" role="img">{bars}</svg><p>{keys}</p>' + _table(head, rows)
    )


def _bar(rank: int, ledger: MemoryLedger, limit: int | None, scale: int) -> str:
    y, x = 26 * rank + 4, 64.0
    parts = [f'<text x="56" y="{y + 15}" text-anchor="end" font-size="12">rank {rank}</text>']
    for (name, label), fill in zip(LEDGER_LINES, LEDGER_FILLS, strict=True):
        count = getattr(ledger, name)
        width = 920 * count / scale
        hover = escape(f"{label}: {format_bytes(count)}")
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="20" fill="{fill}">'
            f"<title>{hover}</title></rect>"
        )
        x += width
    if limit is not None:
        at = 64 + 920 * limit / scale
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y - 3}" y2="{y + 23}" stroke="#b00020" '
            f'stroke-width="2"><title>limit: {format_bytes(limit)}</title></line>'
        )
    return "".join(parts)
