"""Compiled stages beside a plain loop over the same microbatches of the compiled model.

    python -m benchmarks.compiled_stages [--models gpt2,unet] [--backend inductor] [--rounds 20]

Four stages in one process under 1f1b, four microbatches a step, AdamW.  Each of four contestants
(plain loop and pipeline, each eager and compiled) takes a step in turn; the figures are medians of
seconds a step, and the ratio of the pipeline to the loop of its kind.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # also as `python benchmarks/compiled_stages.py`

import pdcompile
from benchmarks import models

MICROBATCHES, STAGES = 4, 4
Step = Callable[[], object]


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def pieces(sample: models.Sample) -> list[tuple[dict[str, Any], tuple[Any, ...], Any]]:
    """Keyword and positional arguments, and the target, of each microbatch."""

    def of(value: Tensor | None) -> Sequence[Tensor | None]:
        return [None] * MICROBATCHES if value is None else value.chunk(MICROBATCHES)

    targets = of(sample.target)
    if isinstance(sample.inputs, dict):
        split = {name: of(one) for name, one in sample.inputs.items()}
        return [({k: v[i] for k, v in split.items()}, (), targets[i]) for i in range(MICROBATCHES)]
    return [({}, (x,), targets[i]) for i, x in enumerate(of(sample.inputs))]


def loop(model: nn.Module, sample: models.Sample, backend: str | None) -> Step:
    """A step of plain PyTorch: gradients of all microbatches, then the update."""
    updates, parts = optimizer(model.parameters()), pieces(sample)
    if backend is not None:
        model.compile(backend=backend, dynamic=False)

    def step() -> None:
        updates.zero_grad()
        for kwargs, args, target in parts:
            out = model(*args, **kwargs)
            loss = out.loss if sample.loss_fn is None else sample.loss_fn(out, target)
            (loss / MICROBATCHES).backward()
        updates.step()

    return step


def pipeline(model: nn.Module, sample: models.Sample, backend: str | None) -> Step:
    """A step of the pipeline on the whole minibatch."""
    pipe = pdcompile.compile(
        model, sample.inputs, example_target=sample.target, loss_fn=sample.loss_fn,
        optimizer=optimizer, cluster=pdcompile.Cluster.local(STAGES), microbatches=MICROBATCHES,
        schedule="1f1b", costs="estimated", verify="off", progress=False, stage_compiler=backend,
    )  # fmt: skip
    kwargs = sample.inputs if isinstance(sample.inputs, dict) else {}
    args = () if kwargs else (sample.inputs,)
    return lambda: float(pipe.step(*args, target=sample.target, **kwargs).loss or 0)


def seconds(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median seconds of each, taken in turn; a first round compiles and is not counted."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for count in range(rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if count >= 2:
                found[name].append(time.perf_counter() - start)
    return {name: statistics.median(every) for name, every in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default="gpt2,unet")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    given = parser.parse_args()
    print("| model | plain loop | pipeline | ratio | compiled loop | compiled pipeline | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name in given.models.split(","):
        torch.manual_seed(0)
        sample = getattr(models, name)(given.batch)
        kinds = {"eager": None, "compiled": given.backend}
        steps = {
            f"{kind} {what.__name__}": what(copy.deepcopy(sample.model), sample, backend)
            for kind, backend in kinds.items()
            for what in (loop, pipeline)
        }
        found = [*seconds(steps, given.rounds).values()]
        cells = [name]
        for eager, piped in (found[:2], found[2:]):
            cells += [f"{1000 * eager:.1f} ms", f"{1000 * piped:.1f} ms", f"{piped / eager:.2f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
