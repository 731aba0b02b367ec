"""Random small problems on which everybody must agree: provers alone, together, brute force.

    python benchmarks/sweep.py --count 10000 [--family skips,memory] [--seed 0]

Prints problems, infeasible ones and disagreements of every family, with the first seeds that
disagree, and exits 1 on any.  Problem i of a family depends on `seed + i` alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks.published

from random_problems import placement, placement_provers, straight

from tests.helpers import counted_layouts


@dataclass(slots=True)
class Count:
    """Counts of one family."""

    problems: int = 0
    infeasible: int = 0
    seconds: float = 0.0  # CPU
    differences: list[str] = field(default_factory=list)


FAMILIES: dict[str, Callable[[int], tuple[bool, str]]] = {
    # name: seed → (feasible, difference in words or "")
    **straight.FAMILIES,
    **placement.FAMILIES,
    **placement_provers.FAMILIES,
    "layouts": counted_layouts.difference,  # of parts, and replicas, cuts and updates in each
}


def sweep(families: list[str], count: int, seed: int) -> dict[str, Count]:
    """Problems of the families in turn, `count` in all; prints a line a family."""
    found = {}
    for k, name in enumerate(families):
        found[name] = tally = Count()
        begin = time.process_time()
        for i in range(len(range(k, count, len(families)))):  # as even as it goes
            feasible, difference = FAMILIES[name](seed + i)
            tally.problems += 1
            tally.infeasible += not feasible
            if difference:
                tally.differences.append(f"seed {seed + i}: {difference}")
        tally.seconds = time.process_time() - begin
        print(
            f"{name:14} {tally.problems:9} {tally.infeasible:11} {len(tally.differences):14} "
            f"{tally.seconds:8.0f}",
            flush=True,
        )
        for text in tally.differences[:5]:
            print(f"    {text}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000, help="problems in all")
    parser.add_argument("--family", default=",".join(FAMILIES), help="names, with commas")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    families = options.family.split(",")
    if unknown := sorted(set(families) - FAMILIES.keys()):
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    print(f"{'family':14} {'problems':>9} {'infeasible':>11} {'disagreements':>14} {'CPU s':>8}")
    found = sweep(families, options.count, options.seed)
    wrong = sum(len(one.differences) for one in found.values())
    total = sum(one.problems for one in found.values())
    print(f"{total} problems, {wrong} disagreements")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
