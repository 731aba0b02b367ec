"""Section ``random``: small random problems on which all provers and brute force must agree."""

from __future__ import annotations

import sweep

from planning.tables import Table

COUNT = 10_000
COMMAND = "python benchmarks/planner.py --only random"


def run() -> list[Table]:
    table = Table(
        "random",
        f"{COUNT:,} random small problems: each prover alone, all together, brute force",
        COMMAND,
        ("family", "problems", "infeasible", "disagreements", "CPU s"),
        (14, 9, 11, 14, 8),
    ).begin()
    total = wrong = 0
    for name, found in sweep.sweep(list(sweep.FAMILIES), COUNT, 0).items():
        total += found.problems
        wrong += len(found.differences)
        table.add(
            name, found.problems, found.infeasible, len(found.differences), f"{found.seconds:.0f}"
        )
    table.note(problems=total, disagreements=wrong)
    return [table]
