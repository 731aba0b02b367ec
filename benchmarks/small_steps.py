"""Forecasts of small models beside their steps, which are Python for the most part.

    python benchmarks/small_steps.py

The README's first example and a smaller model, on two ranks of this host and in one process.
Beside what a step takes stands the CPU time of the busiest rank's own thread, which other work
on the host cannot lengthen so much: a quiet step takes that, and the filling of the pipeline.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import quantiles

import torch
import torch.distributed as dist
from torch import nn

sys.path[0] = str(Path(__file__).resolve().parents[1])
import pdcompile  # noqa: E402
from pdcompile.passes.costs.machines import calibrate  # noqa: E402

WARM, STEPS, WINDOW = 20, 400, 10
WIDE = (8, 64, False)  # layers, width, activations between them: the README's
NARROW = (4, 32, True)
ON_RANKS = ((WIDE, "1f1b", 4), (NARROW, "1f1b", 4), (NARROW, "2bw", 8))


def model_of(layers: int, width: int, activated: bool) -> nn.Module:
    each = [[nn.Linear(width, width), *[nn.ReLU()] * activated] for _ in range(layers)]
    return nn.Sequential(*(one for pair in each for one in pair))


def measured(form: tuple[int, int, bool], schedule: str, m: int, stages: int = 0) -> None:
    torch.manual_seed(0)
    pipe = pdcompile.compile(
        model_of(*form), loss_fn=nn.functional.mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3), microbatches=m, schedule=schedule,
        cluster=pdcompile.Cluster.local(stages) if stages else "auto", progress=False,
    )  # fmt: skip
    data, took, busy = torch.randn(32, form[1]), [], []
    with pipe:
        for _ in range(WARM + STEPS):
            began, own = time.perf_counter(), time.thread_time()
            float(pipe.step(data, target=data.flip(1)).loss)
            took.append(time.perf_counter() - began)
            busy.append(time.thread_time() - own)
    windows = [sum(took[i : i + WINDOW]) / WINDOW for i in range(WARM, len(took), WINDOW)]
    found = torch.tensor([min(windows), quantiles(busy[WARM:], n=10)[0]], dtype=torch.float64)
    if not stages:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    if stages or dist.get_rank() == 0:
        assert pipe.plan.forecast is not None
        figures = [1e3 * x for x in (pipe.plan.forecast.step_seconds, *found.tolist())]
        where = f"one process, {stages} stages" if stages else "two ranks"
        print(
            f"{form[0]} layers of {form[1]}, {schedule}, {m} microbatches, {where}: forecast "
            "{:.2f} ms, best steps {:.2f} ms, CPU of a rank {:.2f} ms".format(*figures)
        )


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        measured(NARROW, "1f1b", 4, stages=2)
        print(f"smallest call of torch: {1e6 * calibrate().call_seconds:.1f} us", flush=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", __file__]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, check=False).returncode
    dist.init_process_group("gloo")
    for one in ON_RANKS:
        measured(*one)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
