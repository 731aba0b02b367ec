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
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # also as `python benchmarks/heavy_head.py`

import pdcompile  # noqa: E402
from benchmarks.parts_forecast import Emulated, launched  # noqa: E402
from benchmarks.side_by_side.waiting import sleep_precisely  # noqa: E402
from examples.gpt import GPT, loss_fn  # noqa: E402
from pdcompile.passes.costs import timing  # noqa: E402

MICROBATCHES, STEPS = 12, 5
CASES: list[dict[str, Any]] = [{"schedule": name} for name in ("gpipe", "1f1b", "zb-h1")]
CASES += [{"schedule": "round", "stages": stages} for stages in (4, 5)]


def measure(case: dict[str, Any], cluster: str, rate: float) -> None:
    """One rank of a case; the first one prints its bubble, and seconds of a step by the forecast
    and measured."""
    timing.thread_time = time.perf_counter  # type: ignore[assignment]  # waits count
    sleep_precisely()
    torch.manual_seed(0)
    model, ids = GPT(2, 16, 2, 16), torch.randint(256, (2 * MICROBATCHES, 16))
    with Emulated(rate), pdcompile.compile(
        model, ids, example_target=ids, loss_fn=loss_fn, microbatches=MICROBATCHES,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-3), cluster=cluster, verify="off",
        progress=False, **case,
    ) as pipe:  # fmt: skip
        seconds = []
        for _ in range(2 + STEPS):
            began = time.perf_counter()
            pipe.step(ids, target=ids).loss.item()
            seconds.append(time.perf_counter() - began)
        if int(os.environ["RANK"]) == 0:
            found = pipe.plan.forecast
            assert found is not None
            print("STEP", found.bubble, found.step_seconds, median(seconds[2:]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, default=3, help="ranks that wait (default 3)")
    parser.add_argument("--rate", type=float, default=1e7, help="FLOP/s of a device (default 1e7)")
    parser.add_argument("--only", default="", help="cases whose text has this")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measure(json.loads(options.rank[0]), options.rank[1], options.rate)
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
            idle, *seconds = map(float, line.split()[1:])
            print(f"| {named} | {100 * idle:.1f} % | {seconds[0]:.3f} s | {seconds[1]:.3f} s |")


if __name__ == "__main__":
    main()
