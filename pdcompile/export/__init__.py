"""Plans without our runtime: what `pdcompile export` does, as a function."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pdcompile import driver
from pdcompile.batch import example_call
from pdcompile.errors import ConfigError, errors_as
from pdcompile.files import capture_beside, is_path, write_whole
from pdcompile.options import Options
from pdcompile.passes.export import Exported, Refusal, Subject, configurations
from pdcompile.passes.export.model_parts import stages_of_parts
from pdcompile.passes.export.torch_pipelining import torch_pipelining, unlike_torch, unlike_torchs
from pdcompile.plan import Plan
from pdcompile.schedule.registry import alternating, name_of, names
from pdcompile.user_functions import is_file
from pdcompile.workload import load_target


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """Maker of a target's files, and what the target would get wrong, of a model or any.

    Args:
        schedules: that it has; empty: any, as it does not pipeline.
        trains: the generated stages go with the files, which compare them with the model's values.
    """

    make: Callable[[Subject], Exported]
    of_model: Callable[[Subject], Iterable[Refusal]] = lambda _: ()
    of_plan: Callable[[Plan], Iterable[Refusal]] = lambda _: ()
    schedules: tuple[str, ...] = ()
    trains: bool = False


_IN_TORCH = names(lambda kind: kind.in_torch != "")
TARGETS: dict[str, ExportTarget] = {
    "torch-pipelining": ExportTarget(
        torch_pipelining, unlike_torch, unlike_torchs, _IN_TORCH, trains=True
    ),
    "torchtitan": ExportTarget(
        configurations.torchtitan, configurations.unlike_torchtitan, schedules=_IN_TORCH
    ),
    "megatron": ExportTarget(
        configurations.megatron, configurations.unlike_megatrons, schedules=alternating()
    ),
    "accelerate": ExportTarget(configurations.accelerate, configurations.unlike_accelerate),
}


@dataclass(frozen=True, slots=True)
class Export:
    """Files that were written, and notes for their reader."""

    folder: Path
    files: tuple[str, ...]
    notes: tuple[str, ...]


def export(
    plan: Plan | str | os.PathLike[str],
    target: str,
    *,
    to: str,
    folder: str | os.PathLike[str],
    progress: bool = False,
) -> Export:
    """Write a plan in the form of another runtime; ``pdcompile export --help`` says more.

    Args:
        plan: a plan or the path of one, made for this model.
        target: ``file.py:function`` or ``package.module:function`` that returns the workload.
        to: "torch-pipelining" (stages and a script that trains and compares them), "torchtitan",
            "megatron" or "accelerate" (the lines of their configuration).
        folder: where the files go; others in it are left alone.

    Raises:
        ConfigError: the target of `to` cannot express the plan or the model; says what.
        PdcompileError: as `pdcompile.compile` where plan, model or folder are wrong.
    """
    where = str(plan) if not isinstance(plan, Plan) else "plan"
    given = _accepted(plan, to, folder)
    workload, kind = load_target(target), TARGETS[to]
    if kind.trains and any(p.is_meta for p in workload.model.parameters()):
        message = "the model is on the meta device, and the script compares it with plain PyTorch"
        remedy = "plan and export a model that has values; a smaller one of the same class will do"
        _refuse(to, [(message, remedy)])
    inputs, expected = workload.example()
    call = example_call(workload.model, inputs, expected)
    beside = None if isinstance(plan, Plan) else capture_beside(Path(plan))
    result = driver.build(
        workload.model, call,
        Options.given(dict(workload.options) | {
            "loss_fn": workload.loss_fn, "plan": given, "plan_file": where, "progress": progress,
            "weights": workload.weights, "capture_file": beside,
        }),
    )  # fmt: skip
    subject = Subject(
        result.capture, result.plan, result.sources, imported(target, Path(folder)),
        workload.model, call,
    )  # fmt: skip
    stages_of_parts(subject.capture.train, subject.plan)
    _refuse(to, kind.of_model(subject))
    made, notes = kind.make(subject)
    if kind.trains:
        result.dump(str(folder), workload.model)
    with errors_as(
        ConfigError, "cannot write to the folder", folder, "name a folder that you may write to"
    ):
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, text in made.items():
            write_whole(Path(folder) / name, text.encode())
    written = {*made, *(result.sources.files if kind.trains else ())}
    return Export(Path(folder), tuple(sorted(written)), tuple(notes))


def _accepted(plan: Plan | str | os.PathLike[str], to: str, folder: Any) -> Plan:
    """The plan.  Raises ConfigError where that, the target and the folder cannot be, whatever the
    model is."""
    given = plan if isinstance(plan, Plan) else Plan.load(plan)
    if to not in TARGETS:
        remedy = f"one of {', '.join(TARGETS)}"
        raise ConfigError(f"there is no target {to!r}", where="to", remedy=remedy)
    if not is_path(folder):
        raise ConfigError(f"{folder!r} is no path", where="folder", remedy="name a folder")
    _refuse(to, chain(_schedule(given, to), TARGETS[to].of_plan(given), _samples(given, to)))
    return given


def _refuse(to: str, found: Iterable[Refusal]) -> None:
    """Raise ConfigError for the first thing that a target would get wrong."""
    for message, remedy in found:
        raise ConfigError(message, where=f"--to {to}", remedy=remedy)


def _schedule(plan: Plan, to: str) -> Iterator[Refusal]:
    known, name = TARGETS[to].schedules, plan.training.schedule
    if plan.training.parts != 1:
        message = f"stages of {plan.parts_in_words}: {to} would divide the model its own way"
        yield message, "plan with parts=1 (--parts 1), and give the other runtime its own option"
    if known and name not in known:
        yield f"{to} has no schedule {name_of(name)!r}", f"plan with schedule {' or '.join(known)}"


def _samples(plan: Plan, to: str) -> Iterator[Refusal]:
    counts = {stage.replicas for stage in plan.stages}
    if len(counts) > 1:
        message = f"stages have {sorted(counts)} replicas, and those of {to} all have equally many"
        yield message, "plan with replicas='equal' or a number"
    if plan.patterned:
        message = f"replicas take unlike shares of a minibatch, and those of {to} equal ones"
        yield message, "plan for devices of one speed"
    size, m = plan.training.batch_size, plan.training.num_microbatches
    if TARGETS[to].schedules and size % (m * max(counts)):
        message = f"{size} samples in {m} microbatches on {max(counts)} replicas are not of one "
        remedy = "plan with a number of microbatches that divides the minibatch, and that the "
        yield f"{message}size", f"{remedy}replicas divide"


def imported(target: str, folder: Path) -> str:
    """The target as a script in a folder imports it."""
    place, colon, function = target.rpartition(":")
    if not is_file(place):
        return target
    relative = os.path.relpath(Path(place).resolve(), folder.resolve())
    return f"{Path(relative).as_posix()}{colon}{function}"
