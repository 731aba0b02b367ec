"""How long planning takes and what gap is left, on transformers of growing size.

    python benchmarks/planner.py [--time-limit 20] [--layers 12 48 200] [--stages 2 4 8]

Five items a layer with jittered costs, residual values across every boundary inside a layer, a
tied embedding, 32 microbatches, 100 Gbit/s links.  One core: OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import random
import time

from pdcompile.passes.partition import partition
from pdcompile.problem import (
    Item,
    MemoryRule,
    PartitionProblem,
    SharedParameter,
    StageLimits,
    Traffic,
)

HIDDEN_BYTES = 25_000_000
# name, forward seconds, parameter bytes, saved bytes in units of HIDDEN_BYTES
LAYER = (
    ("norm", 1e-4, 0, 1),
    ("attention", 2e-3, 8_000_000, 3),
    ("add", 5e-5, 0, 0),
    ("mlp", 2.6e-3, 20_000_000, 5),
    ("add2", 5e-5, 0, 0),
)


def transformer(layers: int, num_stages: int, objective: str, seed: int = 0) -> PartitionProblem:
    """Embedding, layers, head and loss; backward takes twice as long as forward."""
    r = random.Random(seed)
    rows = [("wte", 2e-4, 0, 1)]
    rows += [(f"h{i}.{name}", f, p, s) for i in range(layers) for name, f, p, s in LAYER]
    rows += [("head", 6e-3, 0, 2), ("loss", 1e-3, 0, 4)]
    items = []
    for name, seconds, parameters, saved in rows:
        own = seconds * (1 + 0.2 * r.random())
        items.append(
            Item(name, (name,), own, 2 * own, parameters, parameters, saved * HIDDEN_BYTES)
        )
    consumers = {i: [i + 1] for i in range(len(items) - 1)}
    for i in range(layers):
        first = 1 + 5 * i
        consumers[first - 1].append(first + 2)  # around attention
        consumers[first + 2].append(first + 4)  # around the mlp
    traffic = [
        Traffic(items[i].name, i, tuple(to), HIDDEN_BYTES, HIDDEN_BYTES)
        for i, to in consumers.items()
    ]
    depth = [num_stages - 1 - s for s in range(num_stages)]
    flush = objective == "flush"
    return PartitionProblem(
        tuple(items),
        tuple(traffic),
        (StageLimits(bytes_per_second=12.5e9),) * num_stages,
        (SharedParameter("wte.weight", 150_000_000, True, (0, len(items) - 2)),),
        memory=MemoryRule(
            1 if flush else 2, 1, 2.0, tuple(d + 1 if flush else 2 * d + 1 for d in depth)
        ),
        num_microbatches=32,
        objective="flush" if flush else "bottleneck",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48, 200])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args()
    print(f"{'items':>6} {'stages':>6} {'objective':>10} {'seconds':>8} {'gap':>8}  prover")
    for layers in options.layers:
        for num_stages in options.stages:
            for objective in ("bottleneck", "flush"):
                problem = transformer(layers, num_stages, objective)
                begin = time.process_time()
                _, certificate = partition(problem, time_limit=options.time_limit)
                seconds = time.process_time() - begin
                print(
                    f"{len(problem.items):6} {num_stages:6} {objective:>10} {seconds:8.2f} "
                    f"{certificate.gap:8.2%}  {certificate.prover}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
