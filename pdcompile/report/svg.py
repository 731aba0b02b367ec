"""Timelines as SVG: no library, no script, a tooltip on every bar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from pdcompile.report.labels import time_ticks
from pdcompile.report.palette import IDLE, INK, WORK
from pdcompile.report.timeline import (
    KIND_NAMES,
    Bar,
    Event,
    Kind,
    bars,
    duration,
    idle,
    numbered,
)
from pdcompile.units import format_seconds

WIDTH, MARGIN, ROW, GAP = 1000, 64, 26, 6


@dataclass(frozen=True, slots=True)
class Panel:
    """One timeline of a picture; panels share the time axis, so that lengths compare."""

    title: str
    events: Iterable[Event]


def draw(panels: Sequence[Panel]) -> str:
    """A standalone SVG document of the panels, one below the other on one time axis."""
    content = [(panel.title, bars(panel.events)) for panel in panels]
    total = max((duration(shown) for _, shown in content), default=0.0)
    parts: list[str] = []
    y = 12
    for title, shown in content:
        parts.append(_text(MARGIN, y + 12, f"{title}: {_summary(shown)}", "title"))
        y += 22
        for rank in sorted({bar.rank for bar in shown}):
            row = [bar for bar in shown if bar.rank == rank]
            parts.append(_text(MARGIN - 8, y + 17, f"rank {rank}", "rank"))
            length = _x(duration(shown), total) - MARGIN
            parts.append(
                f'<rect class="idle" x="{MARGIN}" y="{y}" width="{length:.1f}" height="{ROW - 2}"/>'
            )
            parts.extend(_bar(bar, y, total) for bar in row)
            y += ROW
        y += GAP + 6
    parts.append(_axis(y, total))
    y += 26
    parts.append(_legend(y, [bar for _, shown in content for bar in shown]))
    height = y + 44
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">\n<style>{_STYLE}</style>\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}"
    ".title{font-size:13px;font-weight:600}.rank{text-anchor:end;fill:#555}"
    f".label{{font-size:10px;text-anchor:middle;fill:{INK};pointer-events:none}}"
    f".idle{{fill:{IDLE}}}.tick{{text-anchor:middle;fill:#555}}"
    ".bar{stroke:#fff;stroke-width:.8}"
)


def _summary(shown: Sequence[Bar]) -> str:
    return f"{format_seconds(duration(shown))}, {100 * idle(shown):.0f} % idle"


def _x(seconds: float, total: float) -> float:
    return MARGIN + (WIDTH - MARGIN - 32) * (seconds / total if total else 0.0)


def _text(x: float, y: float, content: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(content)}</text>'


def _bar(bar: Bar, y: int, total: float) -> str:
    left, right = _x(bar.start, total), _x(bar.end, total)
    odd = bar.minibatch % 2
    hover = f"{bar.describe()}: {format_seconds(bar.end - bar.start)}"
    hover += f" from {format_seconds(bar.start)}"
    drawn = (
        f'<rect class="bar" x="{left:.2f}" y="{y}" width="{max(right - left, 0.3):.2f}" '
        f'height="{ROW - 2}" fill="{WORK[bar.kind][odd]}"><title>{escape(hover)}</title></rect>'
    )
    label = str(bar.number) if bar.number >= 0 else ""
    if label and right - left >= 6 * len(label) + 3:
        drawn += _text((left + right) / 2, y + 16, label, "label")
    return drawn


def _axis(y: int, total: float) -> str:
    return "".join(_text(_x(t, total), y + 4, label, "tick") for t, label in time_ticks(total, 8))


def kinds_in(shown: Iterable[Bar]) -> list[Kind]:
    """What a legend explains: what is there."""
    present = {bar.kind for bar in shown}
    return [kind for kind in KIND_NAMES if kind in present]


def _legend(y: int, shown: Sequence[Bar]) -> str:
    """One line of colours, and one that says what numbers and shades mean, as far as they occur."""
    x, parts = MARGIN, []
    for kind in kinds_in(shown):
        fills = WORK[kind]
        parts.append(f'<rect x="{x}" y="{y - 6}" width="14" height="12" fill="{fills[0]}"/>')
        parts.append(f'<rect x="{x + 14}" y="{y - 6}" width="14" height="12" fill="{fills[1]}"/>')
        parts.append(_text(x + 34, y + 4, KIND_NAMES[kind], "key"))
        x += 110 if len(KIND_NAMES[kind]) < 10 else 165
    shades = len({bar.minibatch for bar in shown}) > 1
    note = "; dark and light: even and odd minibatches" if shades else ""
    parts.append(_text(MARGIN, y + 24, f"number: {numbered(shown)}{note}; grey: idle", "key"))
    return "".join(parts)
