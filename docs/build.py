"""`make docs`: draw docs/timeline.svg, the same plan with 1F1B and with 2BW, as simulated."""

from __future__ import annotations

from pathlib import Path

from pdcompile import Certificate, Cluster, Plan
from pdcompile.passes.schedules import warmup
from pdcompile.passes.simulate import drained
from pdcompile.plan import Edge, StagePlan, Training
from pdcompile.report.picture import save
from pdcompile.report.svg import Panel

STAGES, MICROBATCHES, STEPS = 4, 8, 3


def plan(schedule: str) -> Plan:
    """Equal stages, backward twice forward, links fast enough to hide."""
    last = STAGES - 1
    return Plan(
        fingerprint="0" * 64,
        stages=tuple(
            StagePlan(s, (f"block_{s}",), (f"blocks.{s}.weight",), 1, (s,), 1e-3, 2e-3)
            for s in range(STAGES)
        ),
        edges=tuple(Edge(f"block_{s}", s, (s + 1,), 1_000, True, ("b",)) for s in range(last)),
        tied=(),
        training=Training(
            schedule, MICROBATCHES, MICROBATCHES, warmup(schedule, STAGES, MICROBATCHES)
        ),
        cluster=Cluster.local(STAGES).to_toml(),
        certificate=Certificate(0.0, 0.0, "feasible", "drawn by hand", 0.0, "a picture"),
    )


def main() -> None:
    panels = [
        Panel(title, drained(plan(schedule), STEPS, step_seconds=0.3e-3))
        for schedule, title in (
            ("1f1b", "1F1B: drains at every update"),
            ("2bw", "2BW: never drains, weights one minibatch old"),
        )
    ]
    path = Path(__file__).parent / "timeline.svg"
    save(panels, path)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
