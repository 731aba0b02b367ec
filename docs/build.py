"""`make docs`: draw the pictures of the pages, each schedule as it is simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pdcompile import Plan
from pdcompile.passes.schedules.alone import chain
from pdcompile.passes.simulate import drained
from pdcompile.report.picture import save
from pdcompile.report.svg import Panel

HERE = Path(__file__).parent
STAGES, MICROBATCHES, STEPS = 4, 8, 3
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
        panels = [
            Panel(title, drained(equal_work(schedule, stages, microbatches), steps))
            for schedule, stages, microbatches, steps, title in rows
        ]
        path = folder / f"{name}.svg"
        path.parent.mkdir(exist_ok=True)
        save(panels, path)
        found.append(path)
    return found


def main() -> None:
    for path in draw(HERE):
        print(f"written: {path}")


if __name__ == "__main__":
    main()
