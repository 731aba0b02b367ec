"""``pdcompile run``: train a target, in one process or under torchrun."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from pdcompile.cli.options import Flags, Target, verb
from pdcompile.cli.output import Result, is_first_rank, stdout, under_torchrun, write_text
from pdcompile.options.row import Flag, option
from pdcompile.pass_runner import Listener


@dataclass(frozen=True, slots=True)
class Saves:
    """Options of checkpoints: when and where to save, and one to begin with."""

    save: Path | None = option(
        None,
        "Save a checkpoint into FOLDER after the last step.",
        flag=Flag("FOLDER", type=Path),
        panel="Checkpoints",
    )
    save_every: int | None = option(
        None,
        "Save after every n-th step too.",
        flag=Flag("N", type=int, least=1),
        panel="Checkpoints",
    )
    keep: int = option(
        2,
        "Checkpoints that stay in FOLDER, the last ones.",
        flag=Flag("K", type=int, least=1),
        panel="Checkpoints",
    )
    resume: bool = option(
        False,
        "Go on from the last checkpoint in FOLDER, and begin where there is none. Minibatches that "
        "are over are drawn and left out.",
        flag=Flag(type=bool),
        panel="Checkpoints",
    )

    @property
    def folder(self) -> Path | None:
        """Folder of checkpoints; None: none are asked for."""
        asked = self.save_every is not None or self.resume
        return self.save or (Path("checkpoints") if asked else None)

    def due(self, step: int, last: int) -> bool:
        """True where a checkpoint is due after a step."""
        every = self.save_every
        return self.folder is not None and (step == last or bool(every and not (step + 1) % every))


@verb()
def run(
    target: Target,
    flags: Flags,
    saves: Saves,
    steps: Annotated[
        int,
        typer.Option(min=1, help="Minibatches to train on, with --resume those before included."),
    ] = 20,
    every: Annotated[
        int, typer.Option(min=1, help="Report the loss of every n-th step (looking costs time).")
    ] = 10,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the timeline of the last 8 minibatches, as simulate --trace writes the "
            "forecast's, for https://ui.perfetto.dev (.json).",
        ),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Measure costs anew, and keep none of them.")
    ] = False,
) -> Result | None:
    """Train TARGET as a pipeline.

    One process runs all stages in turn (for debugging); torchrun runs one stage a process.

    Examples:

      pdcompile run examples/gpt.py:build --cluster local:2 --steps 20

      torchrun --nproc-per-node=2 -m pdcompile run examples/gpt.py:build --schedule 2bw

      torchrun --nproc-per-node=8 -m pdcompile run llama.py:build --weights folder/

      torchrun --nproc-per-node=2 -m pdcompile run gpt.py:build --save-every 100 --resume

    Checkpoints are in ./checkpoints unless --save names another folder.
    """
    from pdcompile import driver, files
    from pdcompile.eager.randomness import preserved_rng
    from pdcompile.options.option_checks import check_target
    from pdcompile.report import chrome
    from pdcompile.report.progress import compiling
    from pdcompile.units import format_count
    from pdcompile.workload import load_target

    flags.check()
    if no_cache:
        os.environ[files.VARIABLE] = "off"
    workload = load_target(target)
    more = flags.given() | {"weights": flags.said.get("weights") or workload.weights}
    more |= {"resume": saves.folder} if saves.resume else {}
    options = flags.to_options(workload, command_target=target, **more)
    inputs, expected = workload.example()
    if options.loss_fn is None:  # said now, not when all is planned
        with preserved_rng():
            check_target(options, next(workload.stream())[1])
    pipe = driver.pipeline(workload.model, options)
    args, kwargs = call_of(inputs)
    pipe.prepare(*args, target=expected, **kwargs)
    if is_first_rank():
        stdout().print(pipe.explain())
    first = pipe.position.minibatches
    minibatches = islice(zip(range(steps), workload.stream(), strict=False), first, None)
    with pipe, compiling(lines=False, title="training") as listener:
        if trace is not None:
            pipe.record()
        done = trained(pipe, minibatches, steps, every, saves, listener)
        pipe.flush()
        seconds = time.perf_counter() - done.began
        if trace is not None:
            events = pipe.recorded()
            if is_first_rank():
                write_text(trace, json.dumps(chrome.trace(events, pipe.plan.fingerprint)))
    if not is_first_rank():
        return None
    forecast = pipe.plan.forecast
    return report(
        {
            "status": "done",
            "steps": steps,
            **({"resumed_at": first} if saves.resume else {}),
            "losses": done.losses,
            "seconds": seconds,
            **{f"{what}_per_second": count / seconds for what, count in done.items.items()},
            "step_seconds": step_seconds(done.ended),
            "forecast_step_seconds": None if forecast is None else forecast.step_seconds,
            **({} if saves.folder is None else {"checkpoint": done.checkpoint}),
            **({} if trace is None else {"trace": str(trace)}),
        },
        ", ".join(
            f"{format_count(count / seconds)} {what}/s" for what, count in done.items.items()
        ),
    )


@dataclass
class Trained:
    """Results of a run: losses by step, when each call ended, items by their kind."""

    began: float
    losses: dict[int, float] = field(default_factory=dict)
    ended: list[float] = field(default_factory=list)
    items: Counter[str] = field(default_factory=lambda: Counter(samples=0))
    checkpoint: str | None = None


def trained(
    pipe: Any,
    minibatches: Iterable[tuple[int, tuple[Any, Any]]],
    steps: int,
    every: int,
    saves: Saves,
    listener: Listener,
) -> Trained:
    """Train on minibatches, each with the number of its step; looks at every n-th loss.

    Raises:
        PdcompileError: an op cannot take a minibatch.
    """
    from pdcompile.runtime.failure.first_cause import raised_by_op

    found, left = Trained(time.perf_counter()), max(steps - pipe.position.minibatches, 0)
    listener.steps(0, left, "")
    for step, (inputs, expected) in minibatches:
        args, kwargs = call_of(inputs)
        try:
            result = pipe.step_call(args, kwargs, expected)
        except Exception as error:
            refused = raised_by_op(error)
            if refused is None:
                raise
            raise refused from error
        found.items.update(items_of(args, kwargs, pipe.plan.training.batch_size))
        if step % every == 0 or step == steps - 1 or not found.losses:
            found.losses[step] = float(result.loss)
        if saves.due(step, steps - 1):
            found.checkpoint = str(pipe.save(saves.folder, keep=saves.keep))
        found.ended.append(time.perf_counter())
        loss = found.losses[max(found.losses)]
        listener.steps(len(found.ended), left, f"loss {loss:.4f}")
    return found


def report(document: Mapping[str, Any], throughput: str) -> Result:
    """Result of a run."""
    from pdcompile.hardware.host import cores
    from pdcompile.report.labels import counted
    from pdcompile.units import format_seconds

    shown = [f"step {step:>6}  loss {loss:.6f}" for step, loss in document["losses"].items()]
    ran = document["steps"] - document.get("resumed_at", 0)
    done = f"the run was finished: {counted(document['steps'], 'step')} are done, as --steps says"
    took = f"{counted(ran, 'step')} in {document['seconds']:.1f} s: {throughput}"
    shown.append(took if ran else done)
    if document.get("checkpoint"):
        shown.append(f"saved as {document['checkpoint']}")
    if document.get("trace"):
        shown.append(f"timeline written to {document['trace']}")
    measured, forecast = document["step_seconds"], document["forecast_step_seconds"]
    if measured and forecast and under_torchrun():
        shown.append(
            f"{format_seconds(measured)} a step in the second half; the forecast was "
            f"{format_seconds(forecast)} ({100 * forecast / measured:.0f} % of it)"
        )
        if (here := int(os.environ.get("LOCAL_WORLD_SIZE", 1))) > cores():
            shown.append(f"note: {here} ranks share {cores()} cores here, and wait for each other")
        elif (load := os.getloadavg()[0]) > max(cores(), here + 1):  # it counts the ranks too
            shown.append(f"note: this host does other work too (load {load:.1f}, {cores()} cores)")
    return Result(document, shown)


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


def items_of(args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int) -> dict[str, int]:
    """Samples, and tokens where the first input is a matrix of integers."""
    from torch import Tensor

    firsts = [x for x in (*args, *kwargs.values())[:1] if isinstance(x, Tensor) and x.ndim == 2]
    tokens = [("tokens", x.numel()) for x in firsts if not x.is_floating_point()]
    return {"samples": batch_size, **dict(tokens)}
