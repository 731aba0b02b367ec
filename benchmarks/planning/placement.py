"""Section ``placement``: the published device-placement graphs, each in a fresh process."""

from __future__ import annotations

from planning import fresh
from planning.published import PLACEMENT, REFERENCE
from planning.tables import Table, percent

COMMAND = "python benchmarks/planner.py --only placement"


def run() -> list[Table]:
    table = Table(
        "placement",
        "Device placement: contiguous optimum, files of the NeurIPS 2020 paper",
        COMMAND,
        ("graph", "nodes", "objective", "published", "gap", "CPU s", "MB", "published s"),
        (36, 6, 11, 11, 6, 7, 6, 12),
    ).begin()
    plain, solver = fresh.startup()
    total, slowest, worst = 0.0, 0.0, 0.0
    folder = REFERENCE / "device_placement"
    for path in sorted(folder.rglob("*.json")):
        name = str(path.relative_to(folder).with_suffix(""))
        found = fresh.plan("--import", "device-placement", str(path))
        objective = found.answer["objective"]
        optimum, seconds = PLACEMENT.get(name, (None, None))
        nodes = sum(len(stage["members"]) for stage in found.answer["stages"])
        if optimum is not None:
            worst = max(worst, objective / optimum - 1)
        total += found.cpu_seconds
        slowest = max(slowest, found.cpu_seconds)
        table.add(
            name, nodes, f"{objective:.6f}", "–" if optimum is None else f"{optimum:.6f}",
            percent(found.answer["gap"]), f"{found.cpu_seconds:.2f}", found.peak_bytes // 10**6,
            None if seconds is None else f"{seconds:g}",
        )  # fmt: skip
    table.note(
        startup_seconds=plain, startup_with_solver_seconds=solver, total_seconds=total,
        slowest_seconds=slowest, worst_relative_difference=worst,
    )  # fmt: skip
    return [table]
