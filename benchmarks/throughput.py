"""Training throughput on two ranks: pdcompile's 1F1B and 2BW beside torch's own pipeline.

    python benchmarks/throughput.py [--steps 20] [--rounds 3]

One GPT with an untied head (torch.distributed.pipelining would untie a tied one), the same
minibatches, gloo on this host, one thread a process.  Rounds alternate between the contestants, so
that a machine whose speed drifts is fair to all; the median round counts.  `torch 1F1B` is
ScheduleOneF1B over stages cut at the same block boundary as pdcompile's 1F1B plan.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import pdcompile

WIDTH, HEADS, LAYERS, LENGTH, VOCAB = 192, 4, 8, 128, 256
BATCH, MICROBATCHES = 16, 8
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        parts = self.qkv(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.view(b, s, HEADS, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, s, WIDTH))
        out: Tensor = x + self.down(F.gelu(self.up(self.ln_2(x))))
        return out


def gpt() -> nn.Sequential:
    """The model as one chain of modules: embedding, blocks, norm, head."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(LAYERS)]
    head = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)]
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, *head)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def minibatch(seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=random)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


Step = Callable[[Tensor, Tensor], None]


def ours(schedule: str) -> tuple[Step, Callable[[], None], pdcompile.Plan]:
    """A step of pdcompile, what ends a round, and the plan."""
    x, y = minibatch(0)
    pipe = pdcompile.compile(
        gpt(), x, example_target=y, loss_fn=loss_fn, optimizer=OPTIMIZER, schedule=schedule,
        microbatches=MICROBATCHES,
    )  # fmt: skip

    def step(x: Tensor, y: Tensor) -> None:
        pipe.step(x, target=y)

    return step, pipe.flush, pipe.plan


def torchs(cut: int) -> tuple[Step, Callable[[], None]]:
    """A step of torch.distributed.pipelining with the chain cut before module `cut`."""
    rank = dist.get_rank()
    model = gpt()
    part = model[:cut] if rank == 0 else model[cut:]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizer = OPTIMIZER(part.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
        optimizer.step()

    return step, lambda: None


def alone() -> tuple[Step, Callable[[], None]]:
    """A step of plain PyTorch with gradient accumulation, on rank 0; rank 1 does nothing."""
    model = gpt()
    optimizer = OPTIMIZER(model.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        if dist.get_rank() != 0:
            return
        optimizer.zero_grad()
        for a, b in zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True):
            (loss_fn(model(a), b) / MICROBATCHES).backward()
        optimizer.step()

    return step, lambda: None


def block_of(plan: pdcompile.Plan) -> int:
    """The module at which stage 1 begins, rounded to a whole one."""
    names = {name.split(".")[0] for name in plan.stages[1].parameters}
    return min(int(name) for name in names)


def worker(steps: int, rounds: int) -> None:
    dist.init_process_group("gloo")
    step_1f1b, end_1f1b, plan = ours("1f1b")
    step_2bw, end_2bw, _ = ours("2bw")
    contestants = {
        "one process": alone(),
        "torch 1F1B": torchs(block_of(plan)),
        "pdcompile 1F1B": (step_1f1b, end_1f1b),
        "pdcompile 2BW": (step_2bw, end_2bw),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):  # the first round warms up
        for name, (step, end) in contestants.items():
            dist.barrier()
            began = time.perf_counter()
            for seed in range(steps):
                step(*minibatch(seed))
            end()
            dist.barrier()
            if number:
                seconds[name].append((time.perf_counter() - began) / steps)
    if dist.get_rank() == 0:
        show({name: statistics.median(times) for name, times in seconds.items()})
    dist.barrier()
    dist.destroy_process_group()


def show(seconds: dict[str, float]) -> None:
    table = Table(title=f"GPT, {LAYERS} blocks of {WIDTH}, {MICROBATCHES} microbatches, 2 ranks")
    for head in ("", "ms a step", "tokens/s", "x one process", "x torch 1F1B"):
        table.add_column(head, justify="right" if head else "left")
    for name, time_ in seconds.items():
        table.add_row(
            name,
            f"{time_ * 1e3:.0f}",
            f"{BATCH * LENGTH / time_:,.0f}",
            f"{seconds['one process'] / time_:.2f}",
            f"{seconds['torch 1F1B'] / time_:.2f}",
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="minibatches a round (default 10)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default 3)")
    given = parser.parse_args()
    if "RANK" in os.environ:
        worker(given.steps, given.rounds)
        return 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [__file__, f"--steps={given.steps}", f"--rounds={given.rounds}"]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
