"""Dispatched stages beside stages with a rank of their own, where one layer takes half of the time.

    python benchmarks/heavy_head.py [--ranks 3] [--rate 1e7] [--only round]

Every product of matrices waits as long as a device of `--rate` FLOP/s takes, as in
`parts_forecast.py`; all else is computed, and sent over gloo.  The order of the forecasts should be
that of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parents[1]))  # also as `python benchmarks/heavy_head.py`

from benchmarks.parts_forecast import launched, measure
from examples.gpt import GPT
from pdcompile.passes.schedules.alone import chain
from pdcompile.passes.simulate import simulate

CASES: list[dict[str, Any]] = [{"schedule": name} for name in ("gpipe", "1f1b", "zb-h1")]
CASES += [{"schedule": "round", "stages": stages} for stages in (4, 5)]
CASES += [{"schedule": name, "stages": 5, "updates": "home"} for name in ("round", "round-2bw")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, default=3, help="ranks that wait (default 3)")
    parser.add_argument("--rate", type=float, default=1e7, help="FLOP/s of a device (default 1e7)")
    parser.add_argument("--only", default="", help="cases whose text has this")
    parser.add_argument("--cuts", action="store_true", help="by the clock alone, of any stages")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cuts:
        cuts(options.ranks)
        return
    if options.rank is not None:
        case = {"microbatches": 12, **json.loads(options.rank[0])}
        measure(case, options.rank[1], options.rate, lambda: GPT(2, 16, 2, 16), length=16)
        return
    with tempfile.TemporaryDirectory() as folder:
        cluster = f"{folder}/cluster.toml"
        launched("-m", "pdcompile", "probe", "-o", cluster, ranks=options.ranks)
        print("| case | idle by forecast | forecast | measured |\n|---|---:|---:|---:|")
        for case in CASES:
            named = ", ".join(f"{name}={value}" for name, value in case.items())
            if options.only not in named:
                continue
            text = launched(str(Path(__file__)), "--rate", str(options.rate),
                            "--rank", json.dumps(case), cluster, ranks=options.ranks)  # fmt: skip
            line = next(line for line in text.splitlines() if line.startswith("STEP"))
            *seconds, idle = map(float, line.split()[1:])
            print(f"| {named} | {100 * idle:.1f} % | {seconds[0]:.3f} s | {seconds[1]:.3f} s |")


def cuts(ranks: int) -> None:
    """Idle time by the number of stages with equal cuts of both passes, half of the work being in
    the last one: that is the most that cuts of the backward of its own could gain."""
    print(f"| stages on {ranks} ranks | microbatches | idle, and so at most gained |")
    print("|---:|---:|---:|")
    for stages in range(2, 8):
        for count in (4 * ranks, 4 * ranks + 1):
            plan = chain("round", stages, count, ranks)
            own = [1.0] * (stages - 1) + [stages - 1.0]
            timed = zip(plan.stages, own, strict=True)
            made = (replace(s, forward_seconds=x, backward_seconds=2 * x) for s, x in timed)
            found = simulate(replace(plan, stages=tuple(made)), timeline=False).forecast
            print(f"| {stages} | {count} | {100 * found.bubble:.1f} % |")


if __name__ == "__main__":
    main()
