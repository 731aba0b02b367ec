"""Section ``piper``: BERT-32 on 8 to 512 devices, in every row of the published table."""

from __future__ import annotations

from planning import fresh
from planning.published import PIPER, PIPER_SECONDS, REFERENCE
from planning.tables import Table, percent

COMMAND = "python benchmarks/planner.py --only piper"


def run() -> list[Table]:
    table = Table(
        "piper",
        "Piper's BERT-32, 1,920 microbatches, 25 GiB/s: seconds per sample",
        COMMAND,
        ("devices", "GiB", "ours", "Piper", "ours/Piper", "2BW", "gap", "stages", "CPU s", "MB"),
        (8, 4, 14, 14, 11, 13, 8, 7, 7, 6),
    ).begin()
    path = str(REFERENCE / "piper" / "bert32a100.json")
    worst, slowest = 0.0, 0.0
    for (devices, memory), (piper, equal) in PIPER.items():
        found = fresh.plan(
            "--import", "piper", path, "--devices", str(devices), "--memory", f"{memory}GiB",
            "--batch", "1920", "--bandwidth", "25GiB/s",
        )  # fmt: skip
        objective = found.answer["objective"]
        worst = max(worst, objective / piper)
        slowest = max(slowest, found.cpu_seconds)
        table.add(
            devices, memory, f"{objective:.9f}", f"{piper:.9f}", f"{objective / piper:.6f}",
            "infeasible" if equal is None else f"{equal:.9f}", percent(found.answer["gap"]),
            len(found.answer["stages"]), f"{found.cpu_seconds:.2f}", found.peak_bytes // 10**6,
        )  # fmt: skip
    table.note(
        worst_ratio=worst, slowest_seconds=slowest, pipers_seconds_8=PIPER_SECONDS[0],
        pipers_seconds_512=PIPER_SECONDS[1],
    )  # fmt: skip
    return [table]
