"""Forecast and measured training on a GPU: seconds of a step, and memory, beside plain PyTorch.

    python benchmarks/gpu.py [MODEL ...] [--stages 1 4] [--steps 3] [--autocast bfloat16]
                             [--write benchmarks/results/gpu.md] [--json FILE]
    python benchmarks/gpu.py --device cpu --tiny

Every model is planned with costs measured on the device, op by op and then stage by stage, and the
forecast is printed before anything is trained. Then it trains through pdcompile, and in a loop of
plain PyTorch over the same microbatches; both are timed in turns, because hosts that others share
are at times half as quick (medians; "host" where queueing takes as long as computing does).  All
stages are in one process and share one device, one after the other: what is compared with the
measured step is the sum of what all ranks compute, and with the measured peak the most that all
ranks hold together, with the largest workspace of one of them, and without messages, which are not
copied. The peak is what torch gives out to tensors, of which those that were there before do not
count.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median_low as median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # also as `python benchmarks/gpu.py`

import pdcompile  # noqa: E402
from pdcompile.hardware import devices  # noqa: E402
from pdcompile.passes.simulate import simulate  # noqa: E402
from pdcompile.passes.simulate.ledger import held_over_time  # noqa: E402
from pdcompile.plan import MemoryLedger, Plan  # noqa: E402
from pdcompile.units import format_bytes, format_seconds  # noqa: E402

MICROBATCHES = 4
SEARCH_SECONDS = 3.0  # short enough for stages to be timed and planned again
COMPARED_STEPS = 3  # after which weights are compared; they also warm up
TURNS = 5  # of each way to train, whose median counts
QUEUEING = 0.95  # of a turn: a host that queues for longer is what a step waits for
# Gradients that are zero but for rounding (of the bias of an attention's keys) stay small steps.
ADAMW = partial(torch.optim.AdamW, lr=1e-4, eps=1e-6)
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


@dataclass(frozen=True, slots=True)
class Training:
    """A model in train mode, its minibatch by keyword, and its optimizer.

    Without `loss_fn` it returns its loss; with one the minibatch has a ``target`` for it.
    """

    model: nn.Module
    batch: dict[str, Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    loss_fn: Callable[..., Tensor] | None = None


def gpt2(tiny: bool) -> Training:
    """GPT-2: 12 layers of 768, 32 sequences of 512 tokens, AdamW; without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads, vocab, length = (4, 32, 2, 64, 16) if tiny else (12, 768, 12, 50257, 512)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocab, n_positions=length,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(vocab, (8 if tiny else 32, length))
    return Training(GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, ADAMW)


def resnet50(tiny: bool) -> Training:
    """ResNet-50: 256 images of 224 x 224, SGD with momentum."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: dict[str, Any] = {}
    if tiny:
        sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]}
    batch, edge, classes = (8, 32, 10) if tiny else (256, 224, 1000)
    model = ResNetForImageClassification(ResNetConfig(num_labels=classes, **sizes))
    images, labels = torch.randn(batch, 3, edge, edge), torch.randint(classes, (batch,))
    return Training(model, {"pixel_values": images, "labels": labels}, SGD)


def mlp(tiny: bool) -> Training:
    """An MLP: 8 layers of 1024, 256 samples, AdamW."""
    width, batch = (32, 16) if tiny else (1024, 256)
    layers = [part for _ in range(8) for part in (nn.Linear(width, width), nn.ReLU())]
    data = {"input": torch.randn(batch, width), "target": torch.randn(batch, width)}
    return Training(nn.Sequential(*layers[:-1]), data, ADAMW, F.mse_loss)


MODELS: dict[str, Callable[[bool], Training]] = {"gpt2": gpt2, "resnet50": resnet50, "mlp": mlp}


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one way to train: bytes at most, and the weights after some steps."""

    peak_bytes: int | None
    weights: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """Forecast and measurement of one model in so many stages; peaks are None on a CPU."""

    model: str
    stages: int
    forecast_seconds: float
    step_seconds: float
    waits_for: str
    plain_seconds: float
    forecast_bytes: int
    peak_bytes: int | None
    plain_bytes: int | None
    difference: float  # of weights, relative to the largest of a tensor
    compile_seconds: float
    notes: tuple[str, ...]

    def cells(self) -> list[str]:
        """A line of the table."""
        return [
            self.model, str(self.stages), format_seconds(self.forecast_seconds),
            format_seconds(self.step_seconds), _error(self.forecast_seconds, self.step_seconds),
            self.waits_for,
            format_seconds(self.plain_seconds), f"{self.step_seconds / self.plain_seconds:.2f}",
            format_bytes(self.forecast_bytes), _bytes(self.peak_bytes),
            _error(self.forecast_bytes, self.peak_bytes), _bytes(self.plain_bytes),
            f"{self.difference:.1e}",
        ]  # fmt: skip


HEADS = ("model", "stages", "forecast of a step", "measured", "error", "waits for the",
         "plain PyTorch", "ratio",
         "forecast of the peak", "measured", "error", "plain PyTorch",
         f"weights differ after {COMPARED_STEPS} steps by")  # fmt: skip


class Machine:
    """The device that is measured, and what is alive on it."""

    def __init__(self, kind: str) -> None:
        self.kind, self.device = kind, devices.of_kind(kind)
        if devices.is_host(self.device) and kind != devices.HOST.type:
            raise SystemExit("torch finds no GPU here; --device cpu --tiny tries this out on a CPU")
        self.measures = not devices.is_host(self.device)
        self.base = 0

    @property
    def name(self) -> str:
        """Name that its maker gives it."""
        return devices.label(self.device)

    def forget(self) -> None:
        """Free what nobody holds."""
        gc.collect()
        devices.hand_back(self.device)

    def begin(self, model: nn.Module) -> None:
        """Begin to count the peak; of what is there only the model's tensors are in it."""
        if not self.measures:
            return
        tensors = [t for t in (*model.parameters(), *model.buffers()) if t.device == self.device]
        storages = [tensor.untyped_storage() for tensor in tensors]
        own = {storage.data_ptr(): storage.nbytes() for storage in storages}
        devices.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.base = torch.cuda.memory_allocated(self.device) - sum(own.values())

    def peak_bytes(self) -> int | None:
        """The most since `begin`; None on a CPU."""
        if not self.measures:
            return None
        devices.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self.base

    def run(self, model: nn.Module, step: Callable[[], Any], weights: Any) -> Figures:
        """Train some steps, and look at the weights and at the peak."""
        self.begin(model)
        for _ in range(COMPARED_STEPS):
            step()
        seen = {name: one.detach().cpu().clone() for name, one in weights().items()}
        return Figures(self.peak_bytes(), seen)

    def in_turns(self, steps: int, *ways: Callable[[], Any]) -> list[tuple[float, str]]:
        """Measure each way to train in turns: seconds of a step, and what it waits for."""
        for way in ways:  # torch asks for memory
            self._turn(1, way)
        turns = [[self._turn(steps, way) for way in ways] for _ in range(TURNS)]
        return [median(each) for each in zip(*turns, strict=True)]

    def _turn(self, steps: int, way: Callable[[], Any]) -> tuple[float, str]:
        devices.synchronize(self.device)
        began = time.perf_counter()
        for _ in range(steps):
            way()
        queued = time.perf_counter() - began
        devices.synchronize(self.device)
        took = time.perf_counter() - began
        return took / steps, "host" if queued > QUEUEING * took else "GPU"


def region(machine: Machine, autocast: str | None) -> AbstractContextManager[object]:
    """The autocast region of plain PyTorch."""
    if autocast is None:
        return nullcontext()
    return torch.autocast(machine.device.type, dtype=getattr(torch, autocast))


def plain(
    one: Training, machine: Machine, autocast: str | None
) -> tuple[nn.Module, Callable[[], None]]:
    """A copy of the model, and a step of it in plain PyTorch, over the same microbatches."""
    model = deepcopy(one.model).to(machine.device)
    optimizer = one.optimizer(model.parameters())
    batch = {name: data.to(machine.device) for name, data in one.batch.items()}
    names = list(batch)

    def step() -> None:
        optimizer.zero_grad()
        for part in zip(*(batch[n].tensor_split(MICROBATCHES) for n in names), strict=True):
            given = dict(zip(names, part, strict=True))
            with region(machine, autocast):
                if one.loss_fn is None:
                    loss = model(**given).loss
                else:
                    loss = one.loss_fn(model(given["input"]), given["target"])
            (loss / MICROBATCHES).backward()
        optimizer.step()

    return model, step


def ours(
    one: Training, machine: Machine, stages: int, options: argparse.Namespace, console: Console
) -> tuple[Figures, list[tuple[float, str]], Plan, float]:
    """Planned, forecast and then trained by pdcompile, and timed in turns with plain PyTorch; also
    the seconds that it took to compile."""
    # An autocast region is that of the device on which the model is captured.
    there = machine.device if options.autocast else devices.HOST
    model = deepcopy(one.model).to(there)
    began = time.perf_counter()
    pipe = pdcompile.compile(
        model, loss_fn=one.loss_fn, optimizer=one.optimizer, stages=stages,
        cluster=pdcompile.Cluster.local(stages, kind=machine.kind), microbatches=MICROBATCHES,
        costs="measured", autocast=options.autocast, verify="off", outputs="none", progress=False,
        time_limit=SEARCH_SECONDS, refine=options.refine,
    ).prepare(**{name: data.to(there) for name, data in one.batch.items()})  # fmt: skip
    took = time.perf_counter() - began
    plan = pipe.plan
    console.print(
        f"{stages} stages: compiled in {took:.1f} s; forecast {format_seconds(seconds_of(plan))} a "
        f"step, {format_bytes(bytes_of(plan))} at most", highlight=False,
    )  # fmt: skip
    for rank, ledger in enumerate(plan.forecast.ledgers if plan.forecast else ()):
        lines = {part: count for part, count in asdict(ledger).items() if count}
        console.print(f"  rank {rank}: " + ", ".join(
            f"{part.removesuffix('_bytes')} {format_bytes(count)}" for part, count in lines.items()
        ), highlight=False, soft_wrap=True)  # fmt: skip
    for note in plan.notes:
        console.print(f"  note: {note}", highlight=False, soft_wrap=True)
    machine.forget()
    batch = {name: data.to(machine.device) for name, data in one.batch.items()}
    step = partial(pipe.step, **batch)
    try:
        figures = machine.run(model, step, pipe.full_state_dict)
        _, other = plain(one, machine, options.autocast)
        times = machine.in_turns(options.steps, step, other)
    finally:
        pipe.close()
    return figures, times, plan, took


def seconds_of(plan: Plan) -> float:
    """Seconds that all ranks compute in a step, one after the other."""
    forecast = plan.forecast
    assert forecast is not None
    return (1 - forecast.bubble) * len(forecast.ledgers) * forecast.step_seconds


def bytes_of(plan: Plan) -> int:
    """The most that all ranks hold together, which share a device and run one after the other."""
    assert plan.forecast is not None
    if len(plan.forecast.ledgers) == 1:
        return plan.forecast.ledgers[0].total_bytes
    simulation = simulate(plan)
    held = held_over_time(plan, simulation.programs, simulation.passed_seconds)
    workspace = max(max(map(_passing, (one.ledger for one in rank))) for rank in held)
    changes = sorted(
        (one.seconds, number, one.ledger.total_bytes - _passing(one.ledger) - _messages(one.ledger))
        for number, rank in enumerate(held)
        for one in rank
    )
    now, most = [0] * len(held), 0
    for _, number, kept in changes:
        now[number] = kept
        most = max(most, sum(now))
    return most + workspace


def _passing(one: MemoryLedger) -> int:
    """Held while something runs."""
    return max(one.workspace_bytes, one.temporaries_bytes)


def _messages(one: MemoryLedger) -> int:
    """Within a process they are the values themselves."""
    return one.receive_bytes + one.send_bytes


def difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest difference of a number, relative to the largest number of its tensor; NaN where
    one is none."""
    found = [0.0]
    for name, other in b.items():
        theirs = other.cpu().double()
        gap = (a[name].cpu().double() - theirs).abs().max()
        found.append(float(gap / theirs.abs().max().clamp(min=1e-30)))
    return float(torch.tensor(found, dtype=torch.float64).max())


def compare(
    name: str,
    machine: Machine,
    options: argparse.Namespace,
    console: Console,
    failures: list[str],
) -> Iterator[Row]:
    """One model in plain PyTorch, and then in each number of stages."""
    torch.manual_seed(0)
    one = MODELS[name](options.tiny)
    one.model.train()
    console.rule(f"{name}: {(MODELS[name].__doc__ or '').strip()}", align="left")
    copied, step = plain(one, machine, options.autocast)
    eager = machine.run(copied, step, copied.state_dict)
    del copied, step
    console.print(f"plain PyTorch: peak {_bytes(eager.peak_bytes)}", highlight=False)
    for stages in options.stages:
        machine.forget()
        try:
            found, times, plan, took = ours(one, machine, stages, options, console)
        except Exception as error:  # the other numbers of stages are measured all the same
            traceback.print_exc()
            failed = f"{name}, {stages} stages: {type(error).__name__}: {error}"
            failures.append(failed.splitlines()[0])
            continue
        row = Row(
            name, stages, seconds_of(plan), *times[0], times[1][0],
            bytes_of(plan), found.peak_bytes, eager.peak_bytes,
            difference(found.weights, eager.weights), took, plan.notes,
        )  # fmt: skip
        lines = (f"{head}: {cell}" for head, cell in zip(HEADS[2:], row.cells()[2:], strict=True))
        console.print("  " + "; ".join(lines), highlight=False, soft_wrap=True)
        yield row


def table(rows: list[Row]) -> Table:
    made = Table(box=None, header_style="bold")
    for i, head in enumerate(HEADS):
        made.add_column(head, justify="right" if i else "left")
    for row in rows:
        made.add_row(*row.cells())
    return made


def page(rows: list[Row], machine: Machine, failures: list[str]) -> str:
    """The page: what was measured on which machine."""
    lines = [
        "# Forecast and training on a GPU",
        "",
        f"Written by `python benchmarks/gpu.py` on {machine.name}, torch {torch.__version__}.",
        "",
        *(__doc__ or "").split("\n\n", 2)[2].splitlines(),
        "",
        "| " + " | ".join(HEADS) + " |",
        "|---|" + "---:|" * (len(HEADS) - 1),
        *("| " + " | ".join(row.cells()) + " |" for row in rows),
        "",
        *(f"- `{name}`: {(MODELS[name].__doc__ or '').strip()}"
          for name in dict.fromkeys(row.model for row in rows)),
        *(f"- failed: {failure}" for failure in failures),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    machine, console = Machine(options.device), Console(width=None if sys.stdout.isatty() else 200)
    console.print(f"{machine.name}, torch {torch.__version__}", highlight=False)
    rows: list[Row] = []
    failures: list[str] = []
    for name in options.models:
        try:
            for row in compare(name, machine, options, console, failures):
                rows.append(row)
                _write(options, rows, machine, failures)
        except Exception as error:  # of one model: the others are measured all the same
            traceback.print_exc()
            failures.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
            _write(options, rows, machine, failures)
        machine.forget()
    console.print(table(rows))
    if failures:
        raise SystemExit("\n".join(f"failed: {failure}" for failure in failures))


def _write(
    options: argparse.Namespace, rows: list[Row], machine: Machine, failures: list[str]
) -> None:
    if options.write is not None:
        options.write.write_text(page(rows, machine, failures), encoding="utf-8")
    if options.json is not None:
        found = {"device": machine.name, "torch": torch.__version__, "failures": failures,
                 "rows": [asdict(row) for row in rows]}  # fmt: skip
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


def _error(forecast: float, measured: float | None) -> str:
    return f"{100 * (forecast / measured - 1):+.1f} %" if measured else "-"


def _bytes(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 4], help="default 1 4")
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), help="default: float32")
    parser.add_argument("--refine", action=argparse.BooleanOptionalAction, default=True,
                        help="time the planned stages too; a note says how far sums of ops were "
                        "off (default: yes)")  # fmt: skip
    parser.add_argument("--write", type=Path, metavar="FILE", help="write Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return chosen(parser, arguments)


def parser_of(page: str) -> argparse.ArgumentParser:
    """Parser of a program's options: the model, how long and on what; `page`: of the program."""
    parser = argparse.ArgumentParser(description=page.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn (default 3)")
    parser.add_argument("--device", choices=(devices.GPU, devices.HOST.type), default=devices.GPU)
    parser.add_argument("--tiny", action="store_true", help="models that take no time")
    return parser


def chosen(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Models that were asked for, all where none is named."""
    options = parser.parse_args(arguments)
    options.models = options.models or list(MODELS)
    if unknown := [name for name in options.models if name not in MODELS]:
        parser.error(f"{', '.join(unknown)}: models are {', '.join(MODELS)}")
    return options


if __name__ == "__main__":
    main()
