"""Share of Python in an instruction, schedule by schedule: tiny stages, a core for each rank.

    python -m torch.distributed.run --standalone --nproc-per-node=2 \
        -m benchmarks.side_by_side.python_share

`python benchmarks/runtime.py --python` starts that.  See `shares` for what is counted.
"""

from __future__ import annotations

import os
from functools import partial
from statistics import mean, median

import torch
import torch.distributed as dist
import torch.distributed.nn  # while there is no group, or defaults of its functions would keep it

import pdcompile
from benchmarks.models import mlp_chain
from benchmarks.side_by_side.shares import each_python_seconds
from pdcompile.schedule.registry import KINDS, allowed

WARM, STEPS, WIDTH, MICROBATCHES = 5, 60, 64, 8


def share(schedule: str) -> tuple[float, float]:
    """Seconds of an instruction on the rank where they are most: from the least of each place in
    the program, which other work on the host lengthens least, and the median of the steps."""
    torch.manual_seed(0)
    kind, ranks = KINDS[schedule], dist.get_world_size()
    one = mlp_chain(32, layers=8, width=WIDTH)
    pipe = pdcompile.compile(
        one.model, loss_fn=one.loss_fn, optimizer=partial(torch.optim.SGD, lr=1e-3),
        schedule=schedule, stages=ranks * kind.usual, costs="estimated", verify="off",
        microbatches=1 if kind.updates_each else MICROBATCHES, outputs="none", progress=False,
        refine=False,
    )  # fmt: skip
    with pipe:
        step = partial(pipe.step, one.inputs, target=one.target)
        for _ in range(WARM):
            step()
        found = []
        for _ in range(STEPS):
            dist.barrier()
            found.append(each_python_seconds(pipe, step))
    least_of_each = map(min, zip(*found, strict=True))
    own = torch.tensor([mean(least_of_each), median(map(mean, found))], dtype=torch.float64)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    least, middle = own.tolist()
    return least, middle


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, cores = dist.get_world_size(), len(os.sched_getaffinity(0))
    if ranks > cores:
        raise SystemExit(f"{ranks} ranks would share {cores} cores: give each one of its own")
    for schedule in allowed("any"):
        before = os.getloadavg()[0]
        least, middle = share(schedule)
        if dist.get_rank() == 0:
            figures = f"{1e6 * least:5.1f} us an instruction, in the middle {1e6 * middle:5.1f}"
            print(f"{schedule:12} {figures} ({ranks} ranks, load {before:.1f})", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
