"""Predicted against measured stage times, the forecast written down before the measurement.

    python benchmarks/costs.py [MODEL ...] [--calibrate 3] [--stages 4] [--json] [--write FILE]

For each model: its ops are timed one by one; it is cut into `--calibrate` stages, which are timed,
and the costs of the ops are rescaled by that (`passes.refine`).  Then it is cut into `--stages`
stages, others than before; their times are forecast, the forecast is written to a file, and only
then they are timed.  What is compared is read back from the file.

A stage is its generated source, forward and backward of one microbatch on real values, one thread,
in CPU seconds of that thread, the least median of five rounds.  Other programs on the machine still
slow it down, through caches and shared cores, now more and now less: the stages of the calibration
are timed again in turns with those of the forecast; the ratio is printed as the machine's drift.
Errors are given as they are, and without the drift.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # also as `python benchmarks/costs.py`

from benchmarks.models import MODELS, Sample, sample  # noqa: E402
from pdcompile.batch import FlatCall, example_call, resolve_batch  # noqa: E402
from pdcompile.cluster import Cluster  # noqa: E402
from pdcompile.files import VARIABLE  # noqa: E402
from pdcompile.ir.graph import Capture, OpGraph  # noqa: E402
from pdcompile.passes import codegen  # noqa: E402
from pdcompile.passes.planning.refine import compared, rescale, rescaled  # noqa: E402
from pdcompile.passes.profile.cache import processor  # noqa: E402
from pdcompile.passes.profile.stage_times import StageTimes, measure_stages  # noqa: E402
from pdcompile.passes.trace import capture  # noqa: E402
from pdcompile.plan import Plan  # noqa: E402
from tests.helpers.costed import profile  # noqa: E402
from tests.helpers.planned import planned  # noqa: E402

FORECAST = Path("out") / "costs_forecast.jsonl"
MICROBATCHES = 16  # of the plans; a stage is timed on one of them
COUNTED_SECONDS = 5e-3  # shorter stages are listed, and not in the figures at the end
ROUNDS = 5  # of timing a cut; of their medians the least counts
TIMING_SECONDS = 0.4  # for all stages of a cut in a round


@dataclass(frozen=True, slots=True)
class Row:
    """One stage: milliseconds of forward and backward of one microbatch."""

    model: str
    stage: int
    ops: int
    sum_ms: float  # of the op times as measured one by one
    forecast_ms: float  # after calibration with the stages of another cut
    measured_ms: float
    drift: float  # of the machine since the calibration: time now / time then

    @property
    def raw_error(self) -> float:
        """Error of the calibrated forecast, as a fraction of what was measured."""
        return self.forecast_ms / self.measured_ms - 1

    @property
    def error(self) -> float:
        """The same had the machine stayed as fast as it was at the calibration."""
        return self.forecast_ms * self.drift / self.measured_ms - 1

    @property
    def sum_error(self) -> float:
        """Error of the plain sum."""
        return self.sum_ms / self.measured_ms - 1

    @property
    def counts(self) -> bool:
        """Whether it is long enough to be in the figures."""
        return self.measured_ms >= 1e3 * COUNTED_SECONDS


class Subject:
    """One model, captured and with measured ops."""

    def __init__(self, made: Sample) -> None:
        self.model = made.model
        self.flat: FlatCall = example_call(made.model, made.inputs, made.target)
        layout = resolve_batch(self.flat)
        self.size = layout.size
        self.captured: Capture = capture(
            made.model, self.flat, layout, made.loss_fn, microbatch_size=layout.size
        )
        self.graph: OpGraph = profile(self.captured.train, made.model, microbatch_size=layout.size)

    def plan(self, graph: OpGraph, num_stages: int) -> Plan:
        """The planner's own cut: stages as equal as the graph allows."""
        return planned(
            graph,
            Cluster.local(num_stages),
            schedule="2bw",
            microbatches=MICROBATCHES,
            batch_size=MICROBATCHES * self.size,
        )

    def timed(self, *plans: Plan) -> list[list[float]]:
        """Seconds of every stage of some plans, which take turns: the least of all rounds."""
        sources = [codegen.generate(self.captured, plan) for plan in plans]
        found: list[list[list[float]]] = [[] for _ in plans]
        for _ in range(ROUNDS):
            for plan, source, rounds in zip(plans, sources, found, strict=True):
                times = measure_stages(
                    self.captured.train, plan, source, self.model, self.flat.leaves,
                    microbatch_size=self.size, budget_seconds=TIMING_SECONDS,
                )  # fmt: skip
                rounds.append([one.seconds for one in times])
        return [[min(stage) for stage in zip(*rounds, strict=True)] for rounds in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--calibrate", type=int, default=3, metavar="K", help="stages timed first")
    parser.add_argument("--stages", type=int, default=4, metavar="K", help="stages forecast")
    parser.add_argument("--forecast", type=Path, default=FORECAST, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", type=Path, metavar="FILE", help="as benchmarks/results/costs.md")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    if options.calibrate == options.stages:
        parser.error("the forecast has to be of another cut than the calibration")
    os.environ[VARIABLE] = "off"  # nothing that was measured before
    torch.set_num_threads(1)
    options.forecast.parent.mkdir(parents=True, exist_ok=True)
    options.forecast.write_text("", encoding="utf-8")
    rows: list[Row] = []
    for name in options.models or MODELS:
        rows += compare(name, options.calibrate, options.stages, options.forecast)
        print(f"{name}: {one_line(rows, name)}", file=sys.stderr, flush=True)
    report(rows, options)


def compare(name: str, calibrating: int, num_stages: int, file: Path) -> list[Row]:
    """Calibrate with one cut, write the forecast of another to the file, and measure that."""
    subject = Subject(sample(name))
    first = subject.plan(subject.graph, calibrating)
    known = [stage.ops for stage in first.stages]
    (before,) = subject.timed(first)
    scale = rescale(subject.graph, known, [StageTimes(0.0, seconds) for seconds in before])
    graph = rescaled(subject.graph, scale.of)
    plan = subject.plan(graph, num_stages)
    cut = [stage.ops for stage in plan.stages]
    nothing = [StageTimes(0.0, 0.0)] * num_stages
    sums = compared(subject.graph, cut, nothing).predicted_seconds
    forecast = compared(graph, cut, nothing).predicted_seconds
    with file.open("a", encoding="utf-8") as lines:
        line = {"model": name, "sum_ms": _ms(sums), "forecast_ms": _ms(forecast)}
        lines.write(json.dumps(line) + "\n")
    times, after = subject.timed(plan, first)
    measured, drift = _ms(times), sum(after) / sum(before)
    written = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
    return [
        Row(
            name,
            k,
            len(cut[k]),
            written["sum_ms"][k],
            written["forecast_ms"][k],
            measured[k],
            drift,
        )
        for k in range(num_stages)
    ]


def report(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """The table, or JSON, or a page."""
    if options.json:
        document = {"rows": [asdict(row) for row in rows], "summary": summary(rows)}
        print(json.dumps(document, indent=2))
    else:
        Console().print(table(rows))
        print(sentence(rows))
    if options.write:
        options.write.write_text(page(rows, options), encoding="utf-8")


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Errors in percent of the measured time, over the stages that count."""
    counted = [row for row in rows if row.counts]
    errors = [100 * abs(row.error) for row in counted]
    raw = [100 * abs(row.raw_error) for row in counted]
    sums = [100 * abs(row.sum_error) for row in counted]
    return {
        "models": len({row.model for row in counted}),
        "stages": len(counted),
        "median_error_percent": round(median(errors), 2) if errors else 0.0,
        "max_error_percent": round(max(errors, default=0.0), 2),
        "median_error_with_drift_percent": round(median(raw), 2) if raw else 0.0,
        "max_error_with_drift_percent": round(max(raw, default=0.0), 2),
        "uncalibrated_median_error_percent": round(median(sums), 2) if sums else 0.0,
        "uncalibrated_max_error_percent": round(max(sums, default=0.0), 2),
    }


def sentence(rows: Sequence[Row]) -> str:
    """The summary in words."""
    found = summary(rows)
    return (
        f"{found['stages']:.0f} stages of {found['models']:.0f} models: median error "
        f"{found['median_error_percent']:.1f} %, largest {found['max_error_percent']:.1f} % "
        f"(with the machine's drift between calibration and measurement: "
        f"{found['median_error_with_drift_percent']:.1f} % and "
        f"{found['max_error_with_drift_percent']:.1f} %); "
        f"sums of op times without calibration: "
        f"{found['uncalibrated_median_error_percent']:.1f} % and "
        f"{found['uncalibrated_max_error_percent']:.1f} %"
    )


def one_line(rows: Sequence[Row], name: str) -> str:
    """One model's errors, stage by stage."""
    return " ".join(f"{100 * row.error:+.1f} %" for row in rows if row.model == name)


def cells(row: Row) -> list[str]:
    """A line of the table."""
    return [
        row.model, str(row.stage), str(row.ops), f"{row.sum_ms:.1f}", f"{row.forecast_ms:.1f}",
        f"{row.measured_ms:.1f}", f"{100 * row.sum_error:+.1f}", f"{100 * (row.drift - 1):+.1f}",
        f"{100 * row.raw_error:+.1f}", f"{100 * row.error:+.1f}",
    ]  # fmt: skip


HEADS = ("model", "stage", "ops", "sum of ops, ms", "forecast, ms", "measured, ms",
         "error of sum, %", "drift, %", "error, %", "error without drift, %")  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    made = Table(box=None, header_style="bold")
    for i, head in enumerate(HEADS):
        made.add_column(head, justify="right" if i else "left")
    for row in rows:
        made.add_row(*cells(row))
    return made


def page(rows: Sequence[Row], options: argparse.Namespace) -> str:
    """benchmarks/results/costs.md."""
    lines = [
        "# Forecast and measured stage times",
        "",
        "Made by `python benchmarks/costs.py --write benchmarks/results/costs.md` "
        f"(torch {torch.__version__}, {processor()}, one thread).",
        "",
        f"Each model was cut into {options.calibrate} stages, which were timed and calibrated the "
        f"costs of its ops; the times of another cut, into {options.stages} stages, were then "
        "written to a file and measured afterwards. Times are CPU milliseconds of the thread, "
        "the least median of five rounds, forward and backward of one microbatch. Other programs "
        "share caches and cores with it, so the calibration's stages were timed again in turns "
        "with the forecast's: what they had become slower or faster by is the drift, and the last "
        "column is without it.",
        "",
        f"**{sentence(rows)}.** Stages below {1e3 * COUNTED_SECONDS:.0f} ms are not counted.",
        "",
        "| " + " | ".join(HEADS) + " |",
        "|---|" + "---:|" * (len(HEADS) - 1),
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
        "",
        "The models, in `benchmarks/models.py`:",
        "",
        *(
            f"- `{name}`: {(MODELS[name].__doc__ or '').strip()}"
            for name in dict.fromkeys(row.model for row in rows)
        ),
        "",
    ]
    return "\n".join(lines)


def _ms(seconds: Sequence[float]) -> list[float]:
    return [1e3 * one for one in seconds]


if __name__ == "__main__":
    main()
