"""Schedules: how long the proof takes as the pipeline deepens, and the bubbles that are left.

    python benchmarks/schedules.py

Seconds are this machine's CPU time; a proof walks some ten programs of a stream.
Bubbles are simulated with F = 1 and B = 2 per stage.
"""

from __future__ import annotations

import argparse
import math
import time

from pdcompile.cluster import Level
from pdcompile.passes.check import check
from pdcompile.passes.schedules import make_stream, warmup
from pdcompile.passes.simulate import Links, simulate
from pdcompile.plan import Certificate, Edge, Plan, StagePlan, Training
from pdcompile.schedule.registry import KINDS

DEPTHS = ((4, 64), (16, 256), (64, 1024))
TRANSFERS = (0.0, 0.25, 0.75, 1.5)


def chain(
    name: str, num_stages: int, count: int, extra: int = 0, clip: float | None = None
) -> Plan:
    """A plan of equal stages, one value of one byte between neighbours."""
    count = 1 if KINDS[name].updates_each else count
    return Plan(
        fingerprint="",
        stages=tuple(
            StagePlan(s, (), (), forward_seconds=1.0, backward_seconds=2.0)
            for s in range(num_stages)
        ),
        edges=tuple(Edge(f"x{s}", s, (s + 1,), 1, True) for s in range(num_stages - 1)),
        tied=(),
        training=Training(
            name,
            count,
            count,
            warmup(name, num_stages, count, extra=extra),
            max_grad_norm=clip,
        ),
        cluster="",
        certificate=Certificate(0.0, 0.0, "feasible", "none", 0.0, "benchmark"),
    )


def equal_links(seconds_per_byte: float) -> Links:
    level = Level("wire", 2, 1 / seconds_per_byte if seconds_per_byte else math.inf)
    return lambda _a, _b: level


def proofs() -> None:
    print(
        f"{'schedule':>8} {'stages':>6} {'m':>5} {'instructions':>12} {'write s':>8} {'prove s':>8}"
    )
    for num_stages, count in DEPTHS:
        for name in KINDS:
            plan = chain(name, num_stages, count)
            begin = time.process_time()
            m = plan.training.num_microbatches
            program, _ = make_stream(plan).step(m)
            written = time.process_time() - begin
            begin = time.process_time()
            check(plan)
            proved = time.process_time() - begin
            print(
                f"{name:>8} {num_stages:>6} {m:>5} {sum(map(len, program.columns)):>12,} "
                f"{written:>8.2f} {proved:>8.2f}"
            )


def bubbles(num_stages: int = 4, count: int = 8) -> None:
    print(f"\nseconds a microbatch, {num_stages} stages, {count} microbatches (3 is full speed)")
    rows = (
        ("gpipe", 0, None),
        ("1f1b", 0, None),
        ("1f1b", 1, None),
        ("zb-h1", 0, None),
        ("zb-h1", 1, None),
        ("2bw", 0, None),
        ("2bw", 1, None),
        ("2bw", 1, 1.0),
        ("stash", 0, None),
        ("stash", 1, None),
        ("vsync", 1, 1.0),
    )
    header = " ".join(f"X={transfer:<6}" for transfer in TRANSFERS)
    print(f"{'schedule':>8} {'warm-up':>14} {'clip':>5}  {header}")
    for name, extra, clip in rows:
        plan = chain(name, num_stages, count, extra, clip)
        cells = []
        for transfer in TRANSFERS:
            found = simulate(plan, links=equal_links(transfer)).forecast
            cells.append(f"{found.step_seconds / plan.training.num_microbatches:<8.3f}")
        depths = " ".join(map(str, plan.training.warmup))
        print(f"{name:>8} {depths:>14} {'yes' if clip else 'no':>5}  {' '.join(cells)}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    proofs()
    bubbles()
