"""Timelines as picture files: SVG by ourselves, PNG and PDF by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdcompile.errors import ConfigError
from pdcompile.report.labels import time_ticks
from pdcompile.report.palette import IDLE, INK, WORK
from pdcompile.report.svg import Panel, draw, kinds_in
from pdcompile.report.timeline import KIND_NAMES, bars, duration, idle
from pdcompile.units import format_seconds

FORMATS = (".svg", ".png", ".pdf")


def save(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels into `path`; its suffix chooses the format.

    Raises:
        ConfigError: another suffix, or matplotlib is missing for PNG and PDF.
        OSError: the file cannot be written.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(
            f"'{path.suffix}' is not a picture format", where=str(path), remedy=" or ".join(FORMATS)
        )
    if path.suffix == ".svg":
        path.write_text(draw(panels), encoding="utf-8")
    else:
        _matplotlib(panels, path)


def _matplotlib(panels: Sequence[Panel], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(
            f"a {path.suffix} picture needs matplotlib, which is not installed",
            where=str(path),
            remedy="pip install matplotlib, or write an .svg, which needs nothing",
        ) from error
    content = [(panel.title, bars(panel.events)) for panel in panels]
    sizes = [len({bar.rank for bar in shown}) for _, shown in content]
    longest = max((duration(shown) for _, shown in content), default=0.0) or 1.0
    ticks = time_ticks(longest, 10)
    figure = Figure(figsize=(11, 1.2 + sum(0.35 * size + 0.7 for size in sizes)), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        len(content), 1, sharex=True, squeeze=False, height_ratios=[size + 1 for size in sizes]
    )[:, 0]
    for axis, (title, shown) in zip(axes, content, strict=True):
        summary = f"{format_seconds(duration(shown))}, {100 * idle(shown):.0f} % idle"
        axis.set_title(f"{title}: {summary}", loc="left", fontsize=10)
        ranks = sorted({bar.rank for bar in shown})
        for bar in shown:
            axis.barh(
                ranks.index(bar.rank),
                (bar.end - bar.start),
                left=bar.start,
                height=0.9,
                color=WORK[bar.kind][bar.minibatch % 2],
                edgecolor="white",
                linewidth=0.4,
            )
            label = str(bar.number) if bar.number >= 0 else ""
            if label and (bar.end - bar.start) / longest * 130 >= len(label):
                axis.text(
                    (bar.start + bar.end) / 2,
                    ranks.index(bar.rank),
                    label,
                    ha="center",
                    va="center",
                    fontsize=7,
                    color=INK,
                )
        axis.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks], fontsize=8)
        axis.invert_yaxis()
        axis.set_facecolor(IDLE)
        axis.spines[:].set_visible(False)
    axes[-1].set_xlim(0, longest)
    axes[-1].set_xticks(*zip(*ticks, strict=True), fontsize=8)
    axes[-1].set_xlabel("dark and light: even and odd minibatches", fontsize=8)
    kinds = kinds_in(bar for _, shown in content for bar in shown)
    keys = [Patch(color=WORK[kind][0], label=KIND_NAMES[kind]) for kind in kinds]
    figure.legend(handles=keys, loc="lower right", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path)
