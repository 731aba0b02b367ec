"""Section ``scale``: synthetic graphs as they and the number of devices grow."""

from __future__ import annotations

import tempfile
from pathlib import Path

import graphs

from planning import fresh
from planning.tables import Table, percent

COMMAND = "python benchmarks/planner.py --only scale"
# family, ops, devices, training graph, seconds allowed
CASES = (
    ("transformer", 1_000, 8, False, 15),
    ("transformer", 1_000, 64, False, 15),
    ("transformer", 1_000, 64, True, 15),
    ("residual", 1_000, 64, False, 15),
    ("series-parallel", 1_000, 64, False, 15),
    ("experts", 1_000, 64, False, 15),
    ("transformer", 10_000, 8, False, 60),
    ("residual", 10_000, 8, False, 60),
    ("series-parallel", 10_000, 8, False, 60),
    ("experts", 10_000, 8, False, 60),
    ("transformer", 10_000, 64, False, 60),
    ("residual", 10_000, 64, False, 60),
    ("series-parallel", 10_000, 64, False, 60),
    ("experts", 10_000, 64, False, 60),
    ("transformer", 10_000, 512, False, 60),
    ("transformer", 100_000, 64, False, 300),
    ("transformer", 100_000, 4_096, False, 300),
)


def run() -> list[Table]:
    table = Table(
        "scale",
        "Synthetic graphs of 1,000 to 100,000 ops on 8 to 4,096 devices",
        COMMAND,
        ("graph", "ops", "devices", "objective", "gap", "allowed s", "wall s", "CPU s", "MB"),
        (22, 8, 8, 11, 8, 10, 7, 7, 6),
    ).begin()
    most_bytes = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.json"
        for family, ops, devices, training, seconds in CASES:
            draw = graphs.FAMILIES[family](ops, 0)
            graphs.write(graphs.problem(draw, devices, training=training), path)
            found = fresh.plan(
                "--import", "device-placement", str(path), "--time-limit", str(seconds)
            )
            most_bytes = max(most_bytes, found.peak_bytes)
            table.add(
                f"{family}{', training' * training}", f"{ops * (1 + training):,}", f"{devices:,}",
                found.answer["objective"], percent(found.answer["gap"]), seconds,
                f"{found.answer['seconds']:.1f}", f"{found.cpu_seconds:.1f}",
                found.peak_bytes // 10**6,
            )  # fmt: skip
    table.note(most_gigabytes=most_bytes / 1e9)
    return [table]
