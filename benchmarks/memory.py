"""Predicted against measured memory of every stage, and how much of it has a closed form.

    python benchmarks/memory.py [--stages 3] [--only gpt2 t5] [--no-symbolic] [--no-ranks]
                                [--write FILE]

Every model is captured and planned; the forecast of each stage is written down, and only then
does the generated stage run, forward and backward of one microbatch, while live untyped storages
are counted, each once.  Parameters, buffers and what a stage receives are left out.
Then whole ranks are trained on two processes (`benchmarks.whole_ranks`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # also as `python benchmarks/memory.py`

from benchmarks import whole_ranks  # noqa: E402
from benchmarks.models import MODELS, Sample, sample  # noqa: E402
from pdcompile.batch import BatchLayout, FlatCall, example_call, resolve_batch  # noqa: E402
from pdcompile.driver import make_plan  # noqa: E402
from pdcompile.ir.graph import Capture, OpCost  # noqa: E402
from pdcompile.options import Options  # noqa: E402
from pdcompile.options.configuration import configure  # noqa: E402
from pdcompile.pass_runner import PassRunner  # noqa: E402
from pdcompile.passes.costs import Resident, estimate, forecast  # noqa: E402
from pdcompile.passes.costs.symbolic import symbolic_costs  # noqa: E402
from pdcompile.passes.stages.boundaries import as_planned, stage_of_ops  # noqa: E402
from pdcompile.passes.trace import capture  # noqa: E402
from pdcompile.plan import Plan  # noqa: E402
from pdcompile.planner import Planner  # noqa: E402
from pdcompile.units import format_bytes  # noqa: E402
from tests.helpers.live_stages import Measured, measured  # noqa: E402

MICROBATCHES = 4

HEADER = """# Memory: forecast and measurement

Written by `python benchmarks/memory.py --write benchmarks/results/memory.md`.

## One microbatch on one stage

Without parameters, buffers and received values.

- **resident**: alive when the forward has returned, results among it.
- **first peak**: the most that is alive during forward and backward of the first microbatch,
  gradients of parameters among it.
- **next peak**: the same of a later microbatch, beside the gradients that are there already.
- **planner**: error of the next peak in the planner's model, which adds up saved bytes of ops and
  the largest transient of one of them.  It searches with that, and checks what it has found
  against the forecast.

Measured on real tensors as untyped storages that ops returned and that are alive, each counted
once; the stages are the generated ones, on a CPU.  On both sides a kernel has, while it runs,
what `passes/costs/cpu_kernels.py` knows of: copies of a convolution's operands, and more.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One stage of one model."""

    model: str
    stage: int
    ops: int
    predicted: Resident
    added_up: int
    measured: Measured

    @property
    def errors(self) -> tuple[float, float, float, float]:
        """Errors of resident, first and next peak, and of the next peak as the planner adds up."""
        mine, truth = self.predicted, self.measured
        return (
            _error(mine.saved_bytes, truth.resident),
            _error(mine.first_peak_bytes or 0, truth.first_peak),
            _error(mine.saved_bytes + mine.workspace_bytes, truth.next_peak),
            _error(self.added_up, truth.next_peak),
        )

    def cells(self) -> list[str]:
        mine, truth, errors = self.predicted, self.measured, self.errors
        pairs = (
            (mine.saved_bytes, truth.resident),
            (mine.first_peak_bytes or 0, truth.first_peak),
            (mine.saved_bytes + mine.workspace_bytes, truth.next_peak),
        )
        shown = [
            text
            for (forecast_bytes, real), error in zip(pairs, errors, strict=False)
            for text in (format_bytes(forecast_bytes), format_bytes(real), f"{error:+.2%}")
        ]
        return [self.model, str(self.stage), str(self.ops), *shown, f"{errors[3]:+.1%}"]


COLUMNS = (
    "model", "stage", "ops", "resident", "measured", "error", "first peak", "measured", "error",
    "next peak", "measured", "error", "planner",
)  # fmt: skip


def _error(predicted: int, truth: int) -> float:
    return 0.0 if predicted == truth else predicted / max(truth, 1) - 1


def compare(name: str, num_stages: int) -> list[Row]:
    """Forecast of all stages first, then their measurement."""
    one = sample(name)
    flat, layout = _call(one)
    captured, plan = _planned(one, flat, layout, num_stages)
    graph, b = captured.train, layout.size
    placed = stage_of_ops(graph, plan)
    stage_of = [placed[op.name] for op in graph.ops]
    predicted = forecast(graph, stage_of, num_stages, b)
    added_up = _added_up(estimate(graph, microbatch_size=b), stage_of, num_stages)
    truth = measured(one.model, flat, captured, plan)
    return [
        Row(name, s, stage_of.count(s), predicted[s], added_up[s], truth[s])
        for s in range(num_stages)
    ]


def _added_up(costs: Sequence[OpCost], stage_of: Sequence[int], num_stages: int) -> list[int]:
    """Saved bytes of all ops of a stage and the largest transient of one."""
    found = []
    for s in range(num_stages):
        own = [cost for cost, stage in zip(costs, stage_of, strict=True) if stage == s]
        workspace = max((cost.workspace_bytes for cost in own), default=0)
        found.append(sum(cost.saved_bytes for cost in own) + workspace)
    return found


def _call(one: Sample) -> tuple[FlatCall, BatchLayout]:
    flat = example_call(one.model, one.inputs, one.target)
    return flat, resolve_batch(flat)


def _planned(
    one: Sample, flat: FlatCall, layout: BatchLayout, num_stages: int
) -> tuple[Capture, Plan]:
    options = Options(
        loss_fn=one.loss_fn, optimizer=None, stages=num_stages, microbatches=MICROBATCHES,
        costs="estimated", time_limit=0,
    )  # fmt: skip
    # Several microbatches of the sample's size: with one alone stages would not have to balance.
    chosen = configure(options, batch_size=MICROBATCHES * layout.size, splits=True, num_ranks=None)
    captured = capture(one.model, flat, layout, one.loss_fn, microbatch_size=layout.size)
    step = PassRunner()
    planner = Planner(one.model, captured, options, chosen, step.listener)
    plan = make_plan(planner, lambda _: flat, step)
    return as_planned(captured, plan), plan


def closed_form(name: str) -> list[str]:
    """Model, symbols, bytes in closed form, and the sums."""
    one = sample(name)
    costs = symbolic_costs(one.model, one.inputs, example_target=one.target, loss_fn=one.loss_fn)
    return [
        name, ", ".join(costs.symbols), f"{costs.symbolic_share:.2%}", str(costs.flops),
        str(costs.saved_bytes), costs.without,
    ]  # fmt: skip


RANKS_HEADER = f"""## Whole ranks

The total of a rank's ledger beside the most that the rank held: training on
{whole_ranks.RANKS} processes, {whole_ranks.MICROBATCHES} microbatches, counted is every byte that
torch's CPU allocator has given out since before the model was built, without the caller's inputs.
Unlike above, that includes all that kernels allocate for themselves, of which the forecast knows
what convolutions, batch norm, upsampling and some losses take.  For GPUs it has cuBLAS's workspace
instead, and what convolutions take on the GPU that is there when it is made.
`clip`: the gradient's norm is clipped.  `outputs`: which ranks get the outputs of training; the
loop assigns each step's result, so that two are alive."""
RANK_COLUMNS = (
    "model", "optimizer", "schedule", "clip", "outputs", "rank", "forecast", "peak", "error",
)  # fmt: skip

FORMS_HEADER = """## Closed forms

b is the microbatch size, s the sequence length; of what has no closed form the number of the
example is in the sums, as is what oneDNN keeps of an LSTM: whole pages."""
FORMS = ("model", "symbols", "bytes in closed form", "FLOPs of the forward", "saved bytes", "no s")


def summary(rows: Sequence[Row]) -> list[str]:
    """One line for each kind of error."""
    names = ("resident", "first peak", "next peak", "next peak as the planner adds up")
    lines = []
    for i, name in enumerate(names):
        errors = [abs(row.errors[i]) for row in rows]
        lines.append(f"{name}: median error {median(errors):.2%}, largest {max(errors):.2%}")
    return lines


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--no-symbolic", action="store_true")
    parser.add_argument("--no-ranks", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=200)
    rows: list[Row] = []
    for name in options.only:
        found = compare(name, options.stages)
        rows += found
        for row in found:
            console.print(" ".join(row.cells()), soft_wrap=True, highlight=False)
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*row.cells())
    console.print(table)
    console.print("\n".join(summary(rows)))
    parts = [HEADER, markdown(COLUMNS, [row.cells() for row in rows]), _listed(summary(rows))]
    _write(options.write, parts)
    if not options.no_ranks:
        parts += _ranks(console)
        _write(options.write, parts)
    if options.no_symbolic:
        return
    forms: list[list[str]] = []
    for name in options.only:
        forms.append(closed_form(name))
        console.print(" ".join(forms[-1]), soft_wrap=True, highlight=False)
        _write(options.write, [*parts, FORMS_HEADER, markdown(FORMS, forms)])


def _ranks(console: Console) -> list[str]:
    """The rows of whole ranks, printed, and as parts of the page."""
    rows = whole_ranks.measured()
    cells = [
        [
            row.case.model, row.case.optimizer, row.case.how, "yes" if row.case.clip else "",
            row.case.outputs, str(row.rank), format_bytes(row.forecast), format_bytes(row.peak),
            f"{row.error:+.2%}",
        ]
        for row in rows
    ]  # fmt: skip
    table = Table(*RANK_COLUMNS)
    for line in cells:
        table.add_row(*line)
    console.print(table)
    errors = [abs(row.error) for row in rows]
    said = f"whole ranks: median error {median(errors):.2%}, largest {max(errors):.2%}"
    console.print(said)
    return [RANKS_HEADER, markdown(RANK_COLUMNS, cells), _listed([said])]


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _write(path: Path | None, parts: Sequence[str]) -> None:
    if path is not None:
        path.write_text("\n\n".join(part.strip() for part in parts) + "\n")


if __name__ == "__main__":
    main()
