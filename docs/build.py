"""`make docs`: draw the pictures of the pages, each schedule as it is simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from pdcompile import Plan
from pdcompile.passes.schedules.alone import chain
from pdcompile.passes.simulate import simulate_drained
from pdcompile.report.palette import IDLE, INK, WORK
from pdcompile.report.timeline import LETTERS, Bar, bars, duration, idle, numbered
from pdcompile.units import format_seconds

mpl.rcParams |= {"svg.hashsalt": "pdcompile", "svg.fonttype": "none"}  # equal texts, and as text

HERE = Path(__file__).parent
STAGES, MICROBATCHES, STEPS = 4, 8, 3
RANKS = STAGES  # which hold two stages each where there are twice as many
UPDATE = 0.3  # seconds
PICTURES: dict[str, tuple[tuple[str, int, int, int, str], ...]] = {
    # file: schedule, stages, microbatches, minibatches, title
    "timeline": (
        ("1f1b", STAGES, MICROBATCHES, STEPS, "1F1B: drains at every update"),
        ("2bw", STAGES, MICROBATCHES, STEPS, "2BW: never drains, weights one minibatch old"),
    ),
    "pictures/flush": (
        ("gpipe", STAGES, MICROBATCHES, 1, "gpipe"),
        ("1f1b", STAGES, MICROBATCHES, 1, "1f1b"),
        ("interleaved", 2 * STAGES, MICROBATCHES, 1, "interleaved, two stages a rank"),
        ("zb-h1", STAGES, MICROBATCHES, 1, "zb-h1"),
        ("zb-v", 2 * STAGES, MICROBATCHES, 1, "zb-v, two stages a rank"),
    ),
    "pictures/streams": (
        ("2bw", STAGES, MICROBATCHES, 2, "2bw, two minibatches of eight microbatches"),
        ("stash", STAGES, 1, 2 * MICROBATCHES, "stash, sixteen minibatches of one microbatch"),
        ("vsync", STAGES, 1, 2 * MICROBATCHES, "vsync, the same"),
    ),
}


def equal_work(schedule: str, stages: int, microbatches: int) -> Plan:
    """Ranks with 1 s of forward and 2 s of backward a microbatch, over all of their stages."""
    plan, share = chain(schedule, stages, microbatches, STAGES), STAGES / stages
    return replace(
        plan,
        stages=tuple(
            replace(
                stage,
                forward_seconds=share * stage.forward_seconds,
                backward_seconds=share * stage.backward_seconds,
                update_seconds=UPDATE * share,
            )
            for stage in plan.stages
        ),
    )


def draw(folder: Path) -> list[Path]:
    """Draws all pictures; returns their paths."""
    found = []
    for name, rows in PICTURES.items():
        panels = {
            title: bars(
                simulate_drained(equal_work(schedule, stages, microbatches), steps).timeline
            )
            for schedule, stages, microbatches, steps, title in rows
        }
        path = folder / f"{name}.svg"
        path.parent.mkdir(exist_ok=True)
        save(panels, path)
        found.append(path)
    return found


def save(panels: Mapping[str, Sequence[Bar]], path: Path) -> None:
    """Draws timelines by title, one below the other on one time axis."""
    longest = max(map(duration, panels.values()))
    height = sum(0.27 * RANKS + 0.35 for _ in panels) + 0.65
    figure, axes = plt.subplots(len(panels), 1, sharex=True, squeeze=False, figsize=(11, height))
    for axis, (title, shown) in zip(axes[:, 0], panels.items(), strict=True):
        summary = f"{format_seconds(duration(shown))}, {100 * idle(shown):.0f} % idle"
        axis.set_title(f"{title}: {summary}", loc="left", fontsize=10, fontweight="bold")
        for rank in range(RANKS):
            row = [bar for bar in shown if bar.rank == rank]
            axis.broken_barh(
                [(bar.start, bar.end - bar.start) for bar in row],
                (rank - 0.46, 0.92),
                facecolors=[WORK[bar.kind][bar.minibatch % 2] for bar in row],
                edgecolor="white",
                linewidth=0.5,
            )
        for bar in shown:
            label, length = str(bar.number), bar.end - bar.start
            if bar.number >= 0 and length / longest * 150 >= len(label):
                axis.text(bar.start + length / 2, bar.rank, label, ha="center", va="center",
                          fontsize=7, color=INK)  # fmt: skip
        axis.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)], fontsize=8)
        axis.tick_params(length=0)
        axis.set(xlim=(0, longest), ylim=(RANKS - 0.5, -0.5), facecolor=IDLE)
        axis.spines[:].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(8))
    axis.xaxis.set_major_formatter(EngFormatter("s"))
    axis.tick_params(labelsize=8)
    drawn = [bar for shown in panels.values() for bar in shown]
    shades = "; dark and light: even and odd minibatches" * (len({b.minibatch for b in drawn}) > 1)
    note = f"number: {numbered(drawn)}{shades}; grey: idle"
    present = {bar.kind for bar in drawn}
    keys = [Patch(color=WORK[k][0], label=k) for k in LETTERS if k in present]
    figure.tight_layout(rect=(0, 0.3 / height, 1, 1), h_pad=0.5)
    figure.legend(handles=keys, title=note, title_fontsize=8, fontsize=8, ncols=len(keys),
                  loc="lower left", frameon=False, alignment="left")  # fmt: skip
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    for path in draw(HERE):
        print(f"written: {path}")


if __name__ == "__main__":
    main()
