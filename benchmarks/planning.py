"""How long planning takes and how far its answer is from the proven bound.

    make bench ARGS="--items 1000 --stages 64"

Layer chains with skips and random costs, as a transformer's ops have; no torch, no machine needed.
"""

from __future__ import annotations

import argparse
import random
import time

from rich.console import Console
from rich.table import Table

from pdcompile.passes.partition import partition
from pdcompile.problem import Item, PartitionProblem, StageLimits, Traffic
from pdcompile.units import format_seconds

SIZES = ((50, 4), (200, 8), (1000, 16), (1000, 64))


def problem(num_items: int, num_stages: int, seed: int = 0) -> PartitionProblem:
    """A chain of items, every fourth with a skip over three, on equal stages."""
    draw = random.Random(seed)
    items = tuple(
        Item(f"op_{i}", (f"op_{i}",), forward, 2 * forward, 1_000, 1_000, 1_000)
        for i in range(num_items)
        for forward in [draw.lognormvariate(-9, 1)]
    )
    traffic = tuple(
        Traffic(
            f"op_{i}", i, tuple(j for j in (i + 1, i + 4 * (i % 4 == 0)) if i < j < num_items),
            draw.randint(10_000, 1_000_000), 10_000,
        )
        for i in range(num_items - 1)
    )  # fmt: skip
    return PartitionProblem(items, traffic, (StageLimits(bytes_per_second=12.5e9),) * num_stages)


def main() -> None:
    parser = argparse.ArgumentParser(description="time the planner")
    parser.add_argument("--items", type=int)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds (default 30)")
    given = parser.parse_args()
    table = Table("items", "stages", "seconds", "objective", "gap", "by", box=None)
    for num_items, num_stages in [(given.items, given.stages)] if given.items else SIZES:
        began = time.perf_counter()
        _, proof = partition(problem(num_items, num_stages), time_limit=given.time_limit)
        seconds = time.perf_counter() - began
        table.add_row(
            str(num_items), str(num_stages), f"{seconds:.2f}",
            format_seconds(proof.objective_seconds), f"{100 * proof.gap:.2g} %", proof.prover,
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
