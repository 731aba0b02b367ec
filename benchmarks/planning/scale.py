"""Section ``scale``: synthetic graphs as they and the number of devices grow."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from planning import fresh
from planning.published import REFERENCE
from planning.tables import Table, percent

COMMAND = "python benchmarks/planner.py --only scale"
GRAPHS = Path(__file__).parents[1] / "graphs.py"  # in a process of its own: it grows
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


# hosts x devices in a host: PipeDream's space, stages replicated inside and across hosts
CLUSTERS = ("1x8", "8x8", "64x8", "512x8")


def run() -> list[Table]:
    return [_graphs(), _workers()]


def _workers() -> Table:
    table = Table(
        "scale_workers",
        "PipeDream's space on up to 4,096 workers (30 GB/s inside a host, 25 Gbit/s between)",
        COMMAND,
        ("network", "cluster", "objective s", "gap", "stages", "CPU s", "MB"),
        (9, 8, 12, 8, 7, 7, 6),
    ).begin()
    for network in ("vgg16", "resnet50", "gnmt"):
        for cluster in CLUSTERS:
            found = fresh.plan(
                "--import", "pipedream", str(REFERENCE / "pipedream" / f"{network}.txt"),
                "--cluster", cluster, "--bandwidth", "30GB/s,25Gbit/s", "--time-limit", "60",
            )  # fmt: skip
            table.add(
                network, cluster, found.answer["objective"], percent(found.answer["gap"]),
                len(found.answer["stages"]), f"{found.cpu_seconds:.1f}",
                found.peak_bytes // 10**6,
            )  # fmt: skip
    return table


def _graphs() -> Table:
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
            command = [sys.executable, GRAPHS, family, str(ops), "--devices", str(devices)]
            subprocess.run([*command, "-o", path, *["--training"] * training], check=True)
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
    return table
