"""Section ``own``: our own problems, transformers of growing size with memory and tied weights.

Five items a layer with jittered costs, residual values across every boundary inside a layer, a
tied embedding, 32 microbatches, 100 Gbit/s links.
"""

from __future__ import annotations

import random
import time

from pdcompile.passes.partition import partition
from pdcompile.problem import (
    Holding,
    Item,
    PartitionProblem,
    SharedParameter,
    StageLimits,
    Traffic,
)
from planning.tables import Table, percent

COMMAND = "python benchmarks/planner.py --only own"
LAYERS, STAGES, TIME_LIMIT = (12, 48, 200), (2, 4, 8), 20.0
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
    in_flight = tuple(d + 1 if flush else 2 * d + 1 for d in depth)
    return PartitionProblem(
        tuple(items),
        tuple(traffic),
        (StageLimits(bytes_per_second=12.5e9),) * num_stages,
        (SharedParameter("wte.weight", 150_000_000, True, (0, len(items) - 2)),),
        in_flight=in_flight,
        holdings=tuple(Holding(1 if flush else 2, saved=n, received=n) for n in in_flight),
        num_microbatches=32,
        objective="flush" if flush else "bottleneck",
    )


def run() -> list[Table]:
    table = Table(
        "own",
        f"Our own problems: transformers, flush schedules and streams, {TIME_LIMIT:.0f} s allowed",
        COMMAND,
        ("schedule", "items", "stages", "objective s", "gap", "CPU s", "prover"),
        (11, 6, 7, 12, 8, 7, 34),
    ).begin()
    slowest = 0.0
    for layers in LAYERS:
        for num_stages in STAGES:
            for objective in ("bottleneck", "flush"):
                problem = transformer(layers, num_stages, objective)
                begin = time.process_time()
                _, certificate = partition(problem, time_limit=TIME_LIMIT)
                seconds = time.process_time() - begin
                slowest = max(slowest, seconds)
                table.add(
                    objective, len(problem.items), num_stages, certificate.objective_seconds,
                    percent(certificate.gap), f"{seconds:.2f}", certificate.prover,
                )  # fmt: skip
    table.note(slowest_seconds=slowest)
    return [table]
