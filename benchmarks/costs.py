"""Predicted against measured stage times: how far sums of op costs are from the truth.

    python -m benchmarks.costs [--stages 4] [--threads 1]

For each model the graph is cut into stages of equal predicted time; every stage then runs
forward and backward on the values that it would receive, and the medians are compared with the
sums of its ops' measured and estimated costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from pdcompile.batch import FlatCall, example_call, resolve_batch
from pdcompile.graph import Op, OpGraph
from pdcompile.graph_module import Lookup, run_op
from pdcompile.passes.profile import profile
from pdcompile.passes.trace import capture
from tests.helpers import models

RUNS = 15
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "gpt, 4 layers of 256": (lambda: models.gpt(width=256, heads=8, vocab=1024, context=64), 4),
    "mlp, 8 layers of 1024": (lambda: models.mlp(layers=8, width=1024), 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = Table("model", "stage", "ops", "run (ms)", "measured ops", "error", "estimated ops")
    for name, (build, b) in MODELS.items():
        for row in compare(build(), b, options.stages):
            table.add_row(name, *row)
    Console().print(table)


def compare(model: nn.Module, b: int, num_stages: int) -> list[list[str]]:
    inputs, target = models.batch_for(model, 2 * b)
    flat = example_call(model, inputs, target)
    layout = resolve_batch(flat)
    graph = capture(model, flat, layout, models.loss_for(model), microbatch_size=b).train
    measured = profile(graph, model, microbatch_size=b, costs="measured")
    estimated = profile(graph, model, microbatch_size=b, costs="estimated")
    rows = []
    env = _values(graph, example_call(model, *models.batch_for(model, b)), model, b)
    for stage, ops in enumerate(_cut(measured, num_stages)):
        names = {op.name for op in ops}
        truth = _run(ops, graph, env, Lookup(model, b))
        sums = [
            sum(seconds(op) for op in source.ops if op.name in names)
            for source in (measured, estimated)
        ]
        rows.append(
            [str(stage), str(len(ops)), f"{truth * 1e3:.2f}", f"{sums[0] * 1e3:.2f}",
             f"{(sums[0] / truth - 1) * 100:+.1f} %", f"{sums[1] * 1e3:.2f}"]
        )  # fmt: skip
    return rows


def seconds(op: Op) -> float:
    assert op.cost is not None
    return op.cost.forward_seconds + op.cost.backward_seconds


def _cut(graph: OpGraph, num_stages: int) -> list[list[Op]]:
    """Runs of ops with about the same predicted time."""
    total = sum(seconds(op) for op in graph.ops)
    stages: list[list[Op]] = [[] for _ in range(num_stages)]
    passed = 0.0
    for op in graph.ops:
        stages[min(int(passed / total * num_stages), num_stages - 1)].append(op)
        passed += seconds(op)
    return [stage for stage in stages if stage]


def _values(graph: OpGraph, flat: FlatCall, model: nn.Module, b: int) -> dict[str, Any]:
    env: dict[str, Any] = {given.name: flat.leaves[given.path] for given in graph.inputs}
    for op in graph.ops:
        env[op.name] = run_op(op, env, Lookup(model, b))
    return env


def _run(ops: Sequence[Op], graph: OpGraph, env: dict[str, Any], lookup: Lookup) -> float:
    """Median seconds of forward and backward of some ops, on detached values from before."""
    made = {op.name for op in ops}
    needed = {name for op in ops for name in op.inputs if name not in made}
    later = [
        name for name in made
        if graph.values[name].needs_gradient
        and (name == graph.loss or set(graph.values[name].consumers) - made)
    ]  # fmt: skip
    times = []
    for _ in range(RUNS + 2):
        given = {name: _leaf(env[name], graph.values[name].needs_gradient) for name in needed}
        values: dict[str, Any] = dict(given)
        began = perf_counter()
        for op in ops:
            values[op.name] = run_op(op, values, lookup)
        roots = [values[name] for name in later]
        forward = perf_counter()
        gradients = [torch.ones_like(root) for root in roots]
        start = perf_counter()
        torch.autograd.backward(roots, gradients)
        times.append(perf_counter() - start + forward - began)
    return median(times[2:])


def _leaf(value: Any, trainable: bool) -> Any:
    return value.detach().requires_grad_(trainable) if isinstance(value, Tensor) else value


if __name__ == "__main__":
    main()
