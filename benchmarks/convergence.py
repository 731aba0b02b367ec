"""Does training with old weights converge?  Loss against samples, and against forecast time.

    python benchmarks/convergence.py [--seeds 5] [--first 0] [--only bytes digits] [--write FILE]

`bytes`: a small GPT predicts the next byte of the standard library's source.  `digits`: a deep MLP
on scikit-learn's digits.  Both are cut into four stages, trained for real by the pipeline in one
process, and drawn against the seconds that the plan forecasts for four devices; data parallelism
is one stage on four.  All see the same samples in the same order; the held-out loss is of samples
that no one trains on.  Under `stash` every microbatch is a minibatch: four times as many updates,
on a quarter of the samples each, with half the learning rate (the square-root rule).
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, repeat
from pathlib import Path
from statistics import mean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # also as `python benchmarks/convergence.py`

import pdcompile  # noqa: E402
from benchmarks.models import Block  # noqa: E402
from pdcompile.cluster import Cluster  # noqa: E402
from pdcompile.schedule.registry import KINDS  # noqa: E402

STAGES, MICROBATCHES, POINTS = 4, 4, 10
CONTEXT, WIDTH, VOCAB = 48, 64, 256
HELD_OUT, EVALUATED = 512, 128  # samples, and how many of them at one time
Batch = tuple[Tensor, Tensor]
READING = "## What these tables say"  # under this heading a person writes; it is kept


class BytesModel(nn.Module):
    """Bytes (b, s) -> logits of the next ones (b, s, 256).

    The parameters of its blocks are all matrices, as Muon wants them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 4, matrices=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bytes(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def digits_model() -> nn.Module:
    """Images of 8 x 8 points (b, 64) -> logits (b, 10)."""
    widths = [64, *[96] * 7]
    layers = [
        part for a, b in pairwise(widths) for part in (nn.Linear(a, b, bias=False), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10, bias=False))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over all predictions."""
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


@cache
def library() -> Tensor:
    """The source of the standard library, as bytes; files in order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def bytes_batch(count: int, generator: torch.Generator, *, held_out: bool) -> Batch:
    """Rows from anywhere in the first nine tenths of the text; held out: from the last one."""
    text = library()
    border = len(text) * 9 // 10
    low, high = (border, len(text) - CONTEXT - 1) if held_out else (0, border - CONTEXT - 1)
    starts = torch.randint(low, high, (count, 1), generator=generator)
    rows = text[starts + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, 1:]


@cache
def digits() -> Batch:
    """All images, scaled to [0, 1], and what they show, in an order that no class stands out in."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(found.data).float()[order] / 16, torch.tensor(found.target)[order]


def digits_batch(count: int, generator: torch.Generator, *, held_out: bool) -> Batch:
    """Samples of the first 1,400 images; held out: of the others."""
    images, labels = digits()
    low, high = (1_400, len(labels)) if held_out else (0, 1_400)
    chosen = torch.randint(low, high, (count,), generator=generator)
    return images[chosen], labels[chosen]


@dataclass(frozen=True, slots=True)
class Task:
    """A model, its samples, and how long to train it."""

    model: Callable[[], nn.Module]
    batch: Callable[..., Batch]
    batch_size: int
    steps: int


TASKS = {
    "bytes": Task(BytesModel, bytes_batch, 32, 300),
    "digits": Task(digits_model, digits_batch, 64, 300),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Muon": torch.optim.Muon,
}
RATES = {"AdamW": 2e-3, "Muon": 2e-2}


@dataclass(frozen=True, slots=True)
class Run:
    """One way to train."""

    name: str
    schedule: str
    optimizer: str = "AdamW"
    replicas: int = 1


RUNS = (
    Run("data-parallel", "1f1b", replicas=STAGES),
    Run("1f1b", "1f1b"),
    Run("2bw", "2bw"),
    Run("stash", "stash"),
    Run("1f1b, Muon", "1f1b", "Muon"),
    Run("2bw, Muon", "2bw", "Muon"),
)


@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out loss after so many minibatches, and the forecast seconds that one takes."""

    seconds: float
    steps: tuple[int, ...]
    losses: tuple[float, ...]


def train(task: str, run: Run, seed: int) -> Curve:
    """One training; losses are looked at `POINTS` times, at equal numbers of samples."""
    torch.set_num_threads(1)
    job = TASKS[task]
    torch.manual_seed(seed)
    model, each = job.model(), KINDS[run.schedule].updates_each
    size = job.batch_size // MICROBATCHES if each else job.batch_size
    samples = torch.Generator().manual_seed(1_000 + seed)
    rate = RATES[run.optimizer] / (2 if each else 1)
    pipe = pdcompile.compile(
        model, job.batch(size, samples, held_out=False)[0], loss_fn=cross_entropy,
        example_target=job.batch(size, samples, held_out=False)[1],
        optimizer=partial(OPTIMIZERS[run.optimizer], lr=rate), schedule=run.schedule,
        stages=STAGES // run.replicas, replicas=run.replicas, cluster=Cluster.local(STAGES),
        microbatches=1 if each else MICROBATCHES, costs="estimated", verify="off", progress=False,
    )  # fmt: skip
    held_out = job.batch(HELD_OUT, torch.Generator().manual_seed(0), held_out=True)
    steps, losses = [], []
    samples.manual_seed(2_000 + seed)
    with pipe:
        for step in range(1, job.steps + 1):
            whole = job.batch(job.batch_size, samples, held_out=False)
            for x, y in zip(*(part.split(size) for part in whole), strict=True):
                pipe.step(x, target=y)
            if step % (job.steps // POINTS) == 0:
                pipe.flush()
                steps.append(step)
                parts = zip(*(part.split(EVALUATED) for part in held_out), strict=True)
                losses.append(mean(float(pipe.eval_step(x, target=y).loss) for x, y in parts))
        assert pipe.plan.forecast is not None
        seconds = pipe.plan.forecast.step_seconds * (MICROBATCHES if each else 1)
    return Curve(seconds, tuple(steps), tuple(losses))


def averaged(curves: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation over seeds, at each point."""
    at = list(zip(*(curve.losses for curve in curves), strict=True))
    return [mean(one) for one in at], [stdev(one) if len(one) > 1 else 0.0 for one in at]


def table(task: str, found: dict[str, list[Curve]]) -> str:
    """Final losses, and the time to reach what 1f1b ends with, as far as it is reached."""
    goal, _ = averaged(found["1f1b"])
    base = found["1f1b"][0].seconds * found["1f1b"][0].steps[-1]
    lines = [
        f"| {task} | loss at the end | spread | beside 1f1b | beside 1f1b of its optimizer "
        "| time a sample | until 1f1b's loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, curves in found.items():
        losses, spread = averaged(curves)
        optimizer = name.partition(",")[2]
        own, _ = averaged(found["1f1b" + (f",{optimizer}" if optimizer else "")])
        rate = curves[0].seconds / found["1f1b"][0].seconds
        reached = next((i for i, one in enumerate(losses) if one <= goal[-1]), None)
        when = (
            "–" if reached is None else f"{curves[0].seconds * curves[0].steps[reached] / base:.2f}"
        )
        lines.append(
            f"| {name} | {losses[-1]:.3f} | {spread[-1]:.3f} | {losses[-1] - goal[-1]:+.3f} "
            f"| {losses[-1] - own[-1]:+.3f} | {rate:.2f} | {when} |"
        )
    return "\n".join(lines)


def draw(found: dict[str, dict[str, list[Curve]]], path: Path) -> None:
    """Loss against samples and against forecast seconds, a row a task; bands are the spread."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(len(found), 2, figsize=(11, 4 * len(found)), squeeze=False)
    for row, (task, runs) in zip(grid, found.items(), strict=True):
        for index, (name, curves) in enumerate(runs.items()):
            losses, spread = averaged(curves)
            steps = curves[0].steps
            times = [step * curves[0].seconds for step in steps]
            for axis, x in zip(row, (steps, times), strict=True):
                style = "--" if "Muon" in name else "-"
                axis.plot(x, losses, style, color=f"C{index}", label=name)
                low = [a - b for a, b in zip(losses, spread, strict=True)]
                high = [a + b for a, b in zip(losses, spread, strict=True)]
                axis.fill_between(x, low, high, color=f"C{index}", alpha=0.15)
        row[0].set(
            xlabel=f"minibatches of {TASKS[task].batch_size} samples", ylabel="held-out loss"
        )
        row[1].set(xlabel="forecast seconds on four devices")
        row[0].set_title(task)
        row[1].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def measured(
    task: str, seeds: Sequence[int], jobs: int, chosen: Collection[str]
) -> dict[str, list[Curve]]:
    """The curves of all runs of a task, by name."""
    cases = [(run, seed) for run in RUNS if run.name in chosen for seed in seeds]
    runs, numbers = zip(*cases, strict=True)
    found: dict[str, list[Curve]] = {run.name: [] for run, _ in cases}
    with ProcessPoolExecutor(jobs) as pool:
        curves = pool.map(train, repeat(task), runs, numbers)
        shown = track(curves, f"{task}: trainings", total=len(cases), console=Console(stderr=True))
        for run, curve in zip(runs, shown, strict=True):
            found[run.name].append(curve)
    return found


def page(found: dict[str, dict[str, list[Curve]]], seeds: int, picture: str, before: str) -> str:
    """The page, as Markdown; what a person wrote into the one before it is kept."""
    tables = "\n\n".join(table(task, runs) for task, runs in found.items())
    how = str(__doc__).split("\n\n", 2)[2].strip()
    parts = (
        "# Convergence",
        "Written by `python benchmarks/convergence.py --write benchmarks/results/convergence.md`, "
        f"with {seeds} seeds.",
        how,
        f"![losses]({picture})",
        tables,
        "Spread: standard deviation over seeds.  Time: forecast, 1f1b's is 1.",
        READING + before.partition(READING)[2].rstrip(),
    )
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--seeds", default=5, help="trainings of each kind (default 5)", **options)
    parser.add_argument("--first", default=0, help="the first seed (default 0)", **options)
    parser.add_argument("--jobs", default=2, help="trainings at one time (default 2)", **options)
    names = [run.name for run in RUNS]
    parser.add_argument("--runs", nargs="+", choices=names, default=names, metavar="RUN")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--write", type=Path, help="page to write, with its plot beside it")
    args = parser.parse_args(argv)
    seeds = range(args.first, args.first + args.seeds)
    found = {task: measured(task, seeds, args.jobs, args.runs) for task in args.only}
    path = args.write or ROOT / "benchmarks" / "results" / "convergence.md"
    before = path.read_text() if path.exists() else ""
    text = page(found, args.seeds, path.with_suffix(".svg").name, before)
    if args.write:
        args.write.write_text(text)
        draw(found, args.write.with_suffix(".svg"))
    print(text)


if __name__ == "__main__":
    main()
