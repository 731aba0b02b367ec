"""Forecast and measured memory of every rank, and seconds of a step, with a GPU for each process.

    torchrun --nproc-per-node=2 benchmarks/gpu_ranks.py [MODEL ...] [--schedule 1f1b] [--steps 3]
    PDCOMPILE_SHARE_GPUS=1 torchrun --nproc-per-node=2 benchmarks/gpu_ranks.py
    torchrun --nproc-per-node=2 benchmarks/gpu_ranks.py --device cpu --tiny

Models and what counts as a peak are those of `benchmarks/gpu.py`.  Where processes share a GPU,
each waits for the others' kernels: seconds then say nothing, and memory is what each would need of
its own.
"""

from __future__ import annotations

import argparse
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # also as `python benchmarks/gpu_ranks.py`

import pdcompile  # noqa: E402
from benchmarks.gpu import (  # noqa: E402
    MICROBATCHES,
    MODELS,
    SEARCH_SECONDS,
    Machine,
    chosen,
    parser_of,
)
from pdcompile.hardware import devices  # noqa: E402
from pdcompile.passes.probe.links import gathered  # noqa: E402
from pdcompile.units import format_bytes, format_seconds  # noqa: E402


def trained(name: str, machine: Machine, options: argparse.Namespace) -> list[list[str]]:
    """A row of the table for each rank, on rank 0."""
    torch.manual_seed(0)
    one = MODELS[name](options.tiny)
    model = deepcopy(one.model).train()
    pipe = pdcompile.compile(
        model, loss_fn=one.loss_fn, optimizer=one.optimizer, stages=dist.get_world_size(),
        cluster=pdcompile.Cluster.auto().each(kind=machine.kind), schedule=options.schedule,
        microbatches=MICROBATCHES, costs="measured", verify="off", outputs="none", progress=False,
        time_limit=SEARCH_SECONDS,
    ).prepare(**one.batch)  # fmt: skip
    machine.forget()
    batch = {key: data.to(machine.device) for key, data in one.batch.items()}
    step = partial(pipe.step, **batch)
    figures = machine.run(model, step, pipe.state_dict)
    ((own, _),) = machine.in_turns(options.steps, step)
    pipe.close()
    forecast = pipe.plan.forecast
    assert forecast is not None
    rows = []
    for rank, (seconds, peak) in enumerate(gathered((own, figures.peak_bytes))):
        planned = forecast.ledgers[rank].total_bytes
        shown, error = ("-", "-") if peak is None else _against(planned, peak)
        rows.append([name, str(rank), format_bytes(planned), shown, error,
                     format_seconds(forecast.step_seconds), format_seconds(seconds)])  # fmt: skip
    return rows


def _against(planned: int, peak: int) -> tuple[str, str]:
    return format_bytes(peak), f"{100 * (planned / peak - 1):+.1f} %"


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--schedule", default="1f1b", help="default 1f1b")
    options = chosen(parser, arguments)
    dist.init_process_group("gloo")
    device = devices.of_process(dist.get_node_local_rank(), 1)
    machine = Machine(options.device)
    table: Any = Table(box=None, header_style="bold")
    for head in ("model", "rank", "forecast of the peak", "measured", "error",
                 "forecast of a step", "measured"):  # fmt: skip
        table.add_column(head, justify="left" if head == "model" else "right")
    for name in options.models:
        for row in trained(name, machine, options):
            table.add_row(*row)
    if dist.get_rank() == 0:
        console = Console(width=None if sys.stdout.isatty() else 160)
        shared = "shared, " if devices.shares() else ""
        console.print(
            f"{dist.get_world_size()} ranks on {machine.name} ({shared}{device}), "
            f"torch {torch.__version__}, {options.schedule}", highlight=False,
        )  # fmt: skip
        console.print(table)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
