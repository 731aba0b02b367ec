"""The main job on real input: `make demo`.

Two processes train a byte-level GPT on the source text of Python's standard library, as a pipeline
under a memory limit that neither device could hold the whole model in: once with 1F1B, once with
2BW.  Afterwards plain PyTorch repeats both in one process, and every loss and every final weight
has to be equal, bit for bit.  Results lie in out/demo.

With --gpus the processes have a GPU each (PDCOMPILE_SHARE_GPUS=1: they share one), over NCCL, and
plain PyTorch has one too.  Torch is told to use deterministic kernels.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

# As many threads a process as torchrun gives; different counts round differently.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products on GPUs

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import pdcompile

sys.path.insert(0, str(Path(__file__).parent))
import gpt

RANKS = 2
MICROBATCHES = 8
MEMORY = {"cpu": "32 MB", "cuda": "100 MB"}  # cuBLAS takes up to 64 MiB of a GPU
SCHEDULES = ("1f1b", "2bw")
WARM_UP = 2  # first steps, which throughput leaves out
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="minibatches a schedule (default 40)")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="default out/demo")
    parser.add_argument(
        "--gpus", dest="kind", action="store_const", const="cuda", default="cpu",
        help="a GPU for each process",
    )  # fmt: skip
    given = parser.parse_args()
    if given.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}")
    torch.use_deterministic_algorithms(given.kind != "cpu")
    run = worker if "RANK" in os.environ else launch
    return run(given.steps, given.out, given.kind)


# -- in each of the two ranks ---------------------------------------------------------------------


def worker(steps: int, out: Path, kind: str) -> int:
    first = os.environ["RANK"] == "0"
    cluster = pdcompile.Cluster.auto()
    cluster = replace(cluster, devices=(pdcompile.Device(kind),) * len(cluster.devices))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    for schedule in SCHEDULES:
        workload = gpt.build()
        with pdcompile.compile(
            workload.model,
            loss_fn=workload.loss_fn,
            optimizer=OPTIMIZER,
            schedule=schedule,
            microbatches=MICROBATCHES,
            cluster=cluster,
            memory=MEMORY[kind],
        ) as pipe:
            pipe.prepare(workload.example_inputs, target=workload.example_target())
            if first:
                console.print(f"\n{pipe.explain()}\n", markup=False)
                pipe.dump(str(out / schedule))
            losses, seconds = train(pipe, workload, steps, schedule, console, visible=first)
            state = pipe.full_state_dict()
            plan = pipe.plan
        if first:
            report = {
                "losses": [loss.hex() for loss in losses],
                "weights": digest(state),
                "seconds": seconds,
                "bubble": plan.forecast.bubble,
                "sent_bytes": sum(plan.forecast.sent_bytes),
            }
            (out / f"{schedule}.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
    return 0


def train(
    trainer: Any,
    workload: pdcompile.Workload,
    steps: int,
    title: str,
    console: Console,
    *,
    visible: bool,
    device: str = "cpu",
) -> tuple[list[float], float]:
    """Every loss, and the seconds of the steps after the warm-up (the last drain included)."""
    results = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not visible) as bar:
        task = bar.add_task(title, total=steps)
        for i, (inputs, target) in zip(range(steps), workload.stream(), strict=False):
            if i == WARM_UP:
                float(results[-1].loss)
                began = time.perf_counter()
            results.append(trainer.step(inputs.to(device), target=target.to(device)))
            if i % 10 == 0:
                # Looking at a loss waits for it, so only now and then.
                bar.update(task, description=f"{title}  loss {float(results[-1].loss):.3f}")
            bar.advance(task)
        trainer.flush()
        losses = [float(result.loss) for result in results]
        bar.update(task, description=f"{title}  loss {losses[-1]:.3f}")
    return losses, time.perf_counter() - began


def digest(state: Mapping[str, torch.Tensor]) -> str:
    """One number for all weights: equal only when every bit is."""
    total = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.ndim else b"")
    return total.hexdigest()


# -- in the process that was started --------------------------------------------------------------


def launch(steps: int, out: Path, kind: str) -> int:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    workload = gpt.build()
    count = sum(parameter.numel() for parameter in workload.model.parameters())
    console.print(
        f"A GPT of {count:,} parameters on {len(gpt.corpus()):,} bytes of Python's own source; "
        f"{RANKS} ranks of {MEMORY[kind]} each, {'gloo' if kind == 'cpu' else 'NCCL'}."
    )
    out.mkdir(parents=True, exist_ok=True)
    for schedule in SCHEDULES:
        (out / f"{schedule}.json").unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
        __file__, "--steps", str(steps), "--out", str(out), *(["--gpus"] if kind != "cpu" else []),
    ]  # fmt: skip
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        console.print(f"[bold red]FAIL[/]: torchrun ended with exit code {done.returncode}")
        return 1

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for name in (
        "",
        "loss, first → last",
        "against plain PyTorch",
        "tokens/s",
        "idle",
        "sent/step",
    ):
        table.add_column(name, justify="left" if not name or name[0] in "la" else "right")
    tokens = workload.example_inputs.numel()
    for threads in (1, os.cpu_count() or 1):
        rate = tokens / eager_seconds(threads, kind)
        table.add_row(f"one process, {threads} thread{'s' * (threads > 1)}", "", "", f"{rate:,.0f}")
    torch.set_num_threads(1)
    equal = True
    for schedule in SCHEDULES:
        ran = json.loads((out / f"{schedule}.json").read_text(encoding="utf-8"))
        losses, weights = reference(schedule, steps, console, kind, out)
        verdict, same = compare(ran, losses, weights)
        equal &= same
        found = [float.fromhex(loss) for loss in ran["losses"]]
        table.add_row(
            f"{schedule}, {RANKS} ranks",
            f"{found[0]:.4f} → {found[-1]:.4f}",
            verdict,
            f"{tokens * (steps - WARM_UP) / ran['seconds']:,.0f}",
            f"{100 * ran['bubble']:.0f} %",
            f"{ran['sent_bytes'] / 1e6:.2f} MB",
        )
    console.print()
    console.print(table)
    console.print(
        "idle and sent are the plan's forecast; 2bw is compared with the reference whose updates "
        "use gradients of weights one minibatch old"
    )
    for schedule in SCHEDULES:
        console.print(f"generated stages: {out / schedule}/", soft_wrap=True)
    if equal:
        console.print(
            "[bold green]PASS[/]: every loss and every weight equals plain PyTorch, bit for bit"
        )
        return 0
    console.print("[bold red]FAIL[/]: the pipeline computed something else than plain PyTorch")
    return 1


def reference(
    schedule: str, steps: int, console: Console, kind: str, out: Path
) -> tuple[list[float], str]:
    """The same training in one process, in plain PyTorch.

    Embedding and head are one weight on two stages, which sum their gradients once an update: the
    plan says which stage uses it where, and the gradients of the two uses are accumulated apart.
    """
    workload = gpt.build()
    workload.model.to(kind)
    with pdcompile.reference(
        workload.model,
        loss_fn=workload.loss_fn,
        optimizer=OPTIMIZER,
        schedule=schedule,
        microbatches=MICROBATCHES,
        plan=pdcompile.Plan.from_json((out / schedule / "plan.json").read_text(encoding="utf-8")),
    ) as plain:
        title = f"{schedule} in plain PyTorch"
        losses, _ = train(plain, workload, steps, title, console, visible=True, device=kind)
        return losses, digest(plain.full_state_dict())


def compare(ran: dict[str, Any], losses: list[float], weights: str) -> tuple[str, bool]:
    for i, (mine, expected) in enumerate(zip(ran["losses"], losses, strict=True)):
        if mine != expected.hex():
            return f"[red]step {i}: {float.fromhex(mine)!r}, not {expected!r}[/]", False
    if ran["weights"] != weights:
        return "[red]losses equal, final weights differ[/]", False
    return "equal, bit for bit", True


def eager_seconds(threads: int, kind: str, steps: int = 5) -> float:
    """Seconds of one ordinary training step on the whole minibatch, without pdcompile."""
    torch.set_num_threads(threads)
    workload = gpt.build()
    optimizer = OPTIMIZER(workload.model.to(kind).parameters())
    for i, (inputs, target) in zip(range(steps + 1), workload.stream(), strict=False):
        if i == 1:
            began = time.perf_counter()
        optimizer.zero_grad()
        loss = gpt.loss_fn(workload.model(inputs.to(kind)), target.to(kind))
        loss.backward()
        optimizer.step()
        loss.item()  # has been computed
    return (time.perf_counter() - began) / steps


if __name__ == "__main__":
    sys.exit(main())
