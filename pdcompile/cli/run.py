"""``pdcompile run``: train a target, in one process or under torchrun."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from pdcompile.cli.app import app
from pdcompile.cli.options import AsJson, Flags, GivenSources, Target, takes_flags
from pdcompile.errors import ConfigError


@app.command()
@takes_flags
def run(
    target: Target,
    flags: Flags,
    given: GivenSources,
    steps: Annotated[int, typer.Option(min=1, help="Minibatches to train on.")] = 20,
    every: Annotated[
        int, typer.Option(min=1, help="Report the loss of every n-th step (looking costs time).")
    ] = 10,
    weights: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="For a model on the meta device: a .safetensors file, an index or a folder of "
            "such files; may be given several times. Each process reads its own stage.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train TARGET as a pipeline.

    One process runs all stages in turn (for debugging); torchrun runs one stage a process.

    Examples:

      pdcompile run examples/gpt.py:build --cluster local:2 --steps 20

      torchrun --nproc-per-node=2 -m pdcompile run examples/gpt.py:build --schedule 2bw

      torchrun --nproc-per-node=8 -m pdcompile run llama.py:build --weights folder/
    """
    from pdcompile import driver
    from pdcompile.cli.output import is_first_rank, stdout
    from pdcompile.workload import load_target

    flags.check()
    workload = load_target(target)
    files = given.to_options()
    options = flags.to_options(workload, weights=weights or workload.weights, **files)
    inputs, expected = workload.example()
    pipe = driver.pipeline(workload.model, options)
    args, kwargs = call_of(inputs)
    pipe.prepare(*args, target=expected, **kwargs)
    if is_first_rank() and not as_json:
        stdout().print(pipe.explain(), markup=False)

    losses: dict[int, float] = {}
    ended: list[float] = []  # calls, by when
    items, what = 0, "samples"
    began = time.perf_counter()
    with pipe, training_progress(steps) as advance:
        for step, (inputs, expected) in zip(range(steps), workload.stream(), strict=False):
            args, kwargs = call_of(inputs)
            result = pipe.step_call(args, kwargs, expected)
            count, what = items_of(args, kwargs, pipe.plan.training.batch_size)
            items += count
            if result.loss is None:
                raise ConfigError(
                    "the workload has no loss to train on",
                    where=target,
                    remedy="give Workload(..., loss_fn=...), or return the loss from forward",
                )
            if step % every == 0 or step == steps - 1:
                losses[step] = float(result.loss)
            ended.append(time.perf_counter())
            advance(f"loss {losses[max(losses)]:.4f}")
        pipe.flush()
        seconds = time.perf_counter() - began
    if not is_first_rank():
        return
    forecast = pipe.plan.forecast
    report(
        {
            "status": "done",
            "steps": steps,
            "losses": losses,
            "seconds": seconds,
            f"{what}_per_second": items / seconds,
            "step_seconds": step_seconds(ended),
            "forecast_step_seconds": None if forecast is None else forecast.step_seconds,
        },
        f"{items / seconds:,.0f} {what}/s",
        as_json=as_json,
    )


def report(document: Mapping[str, Any], throughput: str, *, as_json: bool) -> None:
    """Print what came of a run."""
    from pdcompile.cli.output import emit_json, stdout, under_torchrun
    from pdcompile.units import format_seconds

    if as_json:
        emit_json(dict(document))
        return
    for step, loss in document["losses"].items():
        stdout().print(f"step {step:>6}  loss {loss:.6f}")
    stdout().print(f"{document['steps']} steps in {document['seconds']:.1f} s: {throughput}")
    measured, forecast = document["step_seconds"], document["forecast_step_seconds"]
    if measured and forecast and under_torchrun():
        stdout().print(
            f"{format_seconds(measured)} a step in the second half; the forecast was "
            f"{format_seconds(forecast)} ({100 * forecast / measured:.0f} % of it)"
        )


def step_seconds(ended: Sequence[float]) -> float | None:
    """Mean seconds of the later half of some calls, by when each ended; None of fewer than four:
    the first ones fill the pipeline, and set up what they need."""
    half = len(ended) // 2
    return None if half <= 1 else (ended[-1] - ended[half - 1]) / (len(ended) - half)


def call_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of forward, from inputs as a workload gives them."""
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def items_of(args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int) -> tuple[int, str]:
    """The count and unit of throughput: tokens where the first input is a matrix of integers."""
    from torch import Tensor

    first = next(iter((*args, *kwargs.values())), None)
    if isinstance(first, Tensor) and first.ndim == 2 and not first.is_floating_point():
        return first.numel(), "tokens"
    return batch_size, "samples"


@contextmanager
def training_progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on rank 0's terminal; yields ``advance(text)``; silent elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    from pdcompile.cli.output import is_first_rank, stderr

    console = stderr()
    if not (console.is_terminal and is_first_rank()):
        yield lambda text: None
        return
    columns = (
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), Remaining(),
        TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=steps)
        yield lambda text: bar.update(task, advance=1, description=text)
