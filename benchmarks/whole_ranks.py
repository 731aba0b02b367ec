"""The ledger of whole ranks against what two real processes hold.

    torchrun --nproc-per-node=2 -m benchmarks.whole_ranks FOLDER

`benchmarks.memory` starts that and shows the rows.  Each case is planned, and its ledger written
down, before the first step.  Counted is every byte that torch's CPU allocator has given out since
before the model was built and not got back: weights, versions, gradients, optimizer state,
activations, messages, and what kernels need inside; of memory that ranks have together this one's
share, as the kernel counts it (Pss).  The caller's inputs are taken away.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # also as `python benchmarks/whole_ranks.py`

import pdcompile  # noqa: E402
from benchmarks.side_by_side.counters import peak_memory  # noqa: E402
from pdcompile.options.values import SPLITS  # noqa: E402
from pdcompile.schedule import written  # noqa: E402
from pdcompile.schedule.registry import KINDS, ScheduleKind, kind_of  # noqa: E402
from tests.helpers import models, torch_schedules  # noqa: E402

RANKS, MICROBATCHES, CALLS = 2, 8, 5
DETAILED = ("1f1b", "2bw")
OF_TORCH = tuple(
    name
    for name in torch_schedules.CLASSES
    if name in ("ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble", "ScheduleDualPipeV")
)  # what has no row among ours

DENSE_SPLITS = tuple(one for one in SPLITS if "experts" not in one)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, foreach=False),
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "SGD momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
}


class Residual(nn.Module):
    """Images (b, 3, 32, 32) -> logits (b, 10): convolutions with batch norm, and skips."""

    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(_block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def _block(width: int) -> nn.Module:
    def conv() -> nn.Module:
        return nn.Conv2d(width, width, 3, padding=1, bias=False)

    norm = nn.BatchNorm2d
    return nn.Sequential(conv(), norm(width), nn.ReLU(), conv(), norm(width))


def gpt(*, tied: bool) -> tuple[nn.Module, Tensor, Tensor, Any]:
    """A small GPT: tied, activations weigh most; untied, with a large vocabulary, weights do."""
    vocab, context = (512, 32) if tied else (4096, 8)
    model = models.gpt(tied=tied, dropout=0.1, layers=4, width=128, vocab=vocab, context=context)
    return model, *models.batch_for(model, 32), models.token_loss


def convnet() -> tuple[nn.Module, Tensor, Tensor, Any]:
    """The residual network."""
    return Residual(), torch.randn(32, 3, 32, 32), torch.randint(10, (32,)), F.cross_entropy


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor, Any]]] = {
    "GPT": partial(gpt, tied=False),
    "GPT, tied": partial(gpt, tied=True),
    "residual, batch norm": convnet,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One way to train one model."""

    model: str
    optimizer: str
    schedule: str
    clip: bool = False
    outputs: str = "none"
    recompute: bool = False
    replicas: int = 1
    split: str = ""  # of a stage between the ranks
    updates: str = "every"
    compiler: str = ""  # of the stages

    @property
    def how(self) -> str:
        """The schedule, and what the stages do besides."""
        parts = [self.schedule]
        parts += ["recomputing"] if self.recompute else []
        parts += [f"{self.replicas} replicas"] if self.replicas > 1 else []
        parts += [f"compiled by {self.compiler}"] if self.compiler else []
        parts += ["updates at homes"] if self.updates == "home" else []
        parts += [f"{RANKS} parts by {self.split}"] if self.split else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank of a case: bytes of its ledger, and the most that it held from the first call."""

    case: Case
    rank: int
    forecast: int
    peak: int

    @property
    def error(self) -> float:
        return self.forecast / self.peak - 1


def cases() -> Iterator[Case]:
    """Every schedule; of two of them every optimizer, clipping, kept outputs, and the rest."""
    for model in ("GPT", "GPT, tied"):
        for split in DENSE_SPLITS[1:]:
            yield Case(model, "AdamW", "1f1b", split=split, clip=split == "width")
    for model in MODELS:
        for schedule, kind in KINDS.items():
            refused = not kind.trains or (model == "GPT, tied" and not kind.one_age)
            if schedule not in DETAILED and not refused:
                yield Case(model, "AdamW", schedule)
                yield Case(model, "SGD", schedule)
        for kind in (one for one in KINDS.values() if one.dispatched and model == "GPT"):
            yield Case(model, "AdamW", kind.name, updates="home")
        for schedule in OF_TORCH:
            yield Case(model, "SGD", schedule)
        for schedule in DETAILED:
            for optimizer in OPTIMIZERS:
                yield Case(model, optimizer, schedule)
            yield Case(model, "AdamW", schedule, clip=True)
            yield Case(model, "SGD", schedule, clip=True)
            yield Case(model, "AdamW", schedule, outputs="last")
            yield Case(model, "AdamW", schedule, recompute=True)
            yield Case(model, "AdamW", schedule, compiler="inductor")
            for updates in ("every", "home"):
                yield Case(model, "AdamW", schedule, replicas=RANKS, updates=updates)


def measure(case: Case) -> RankRow:
    """Plan, write down the ledger, then train."""
    torch.manual_seed(0)
    schedule, kind = _schedule(case.schedule)
    with peak_memory() as (peak, training):
        before = _shared()
        model, inputs, target, loss_fn = MODELS[case.model]()
        pipe = pdcompile.compile(
            model, loss_fn=loss_fn, optimizer=OPTIMIZERS[case.optimizer],
            microbatches=1 if kind.updates_each else MICROBATCHES,
            schedule=schedule, costs="measured" if case.compiler else "estimated", verify="off",
            stage_compiler=case.compiler or None,
            max_grad_norm=1.0 if case.clip else None, outputs=case.outputs, progress=False,
            recompute=case.recompute, replicas=case.replicas, updates=case.updates,
            parts=RANKS if case.split else 1, split=case.split or "auto",
            stages=_stages(case, kind),
        )  # fmt: skip
        with pipe:
            pipe.prepare(inputs, target=target)
            rank = int(os.environ["RANK"])
            assert pipe.plan.forecast is not None
            ledger = pipe.plan.forecast.ledgers[rank // pipe.plan.training.parts]
            forecast = ledger.total_bytes
            del model
            with training():
                for _ in range(CALLS):
                    result = pipe.step(inputs, target=target)
            pipe.flush()
            del result
            shared = _shared() - before
    given = sum(one.untyped_storage().nbytes() for one in (inputs, target))
    return RankRow(case, rank, forecast, peak.num_bytes + shared - given)


def _shared() -> int:
    """This process's share of memory that ranks have mapped, without all of what it has mapped,
    which the allocator has counted."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split()
        ours = "memfd:pdcompile" in line if "-" in name else ours
        if ours and name in ("Pss:", "Size:"):
            found += 1024 * int(words[0]) * (1 if name == "Pss:" else -1)
    return found


def _stages(case: Case, kind: ScheduleKind) -> int | None:
    if case.split:
        return 1
    if kind.dispatched:  # all of them on every rank
        return RANKS + 1
    return RANKS // case.replicas * kind.usual if case.schedule in KINDS else None


def _schedule(name: str) -> tuple[str, ScheduleKind]:
    """One of ours by its name, one of torch's as text."""
    if name in KINDS:
        return name, KINDS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = torch_schedules.dump(name, RANKS, MICROBATCHES, Path(folder, f"{name}.csv"))
        assert path is not None
        text = written.named(path)
    return text, kind_of(text)


def measured() -> list[RankRow]:
    """All cases on two processes of this machine, by torchrun; rows in order of case and rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", "-m", "benchmarks.whole_ranks", folder]
        subprocess.run(command, check=True, cwd=ROOT)
        of_rank = [
            [_row(line) for line in Path(folder, f"{rank}.jsonl").read_text().splitlines()]
            for rank in range(RANKS)
        ]
    return [row for rows in zip(*of_rank, strict=True) for row in rows]


def _row(line: str) -> RankRow:
    found = json.loads(line)
    return RankRow(**{**found, "case": Case(**found["case"])})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where every rank writes its rows")
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    file = folder / f"{os.environ['RANK']}.jsonl"
    with file.open("w") as out:
        for case in cases():
            row = measure(case)
            print(json.dumps(asdict(row)), file=out, flush=True)
            print(f"{row.case} rank {row.rank}: {row.error:+.2%}", flush=True)


if __name__ == "__main__":
    main()
