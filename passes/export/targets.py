"""The targets of export, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from pdcompile.errors import ConfigError
from pdcompile.passes.export.configurations import (
    accelerate,
    megatron,
    refuse_tied_ends,
    torchtitan,
    without_lines,
)
from pdcompile.passes.export.subject import Exported, Subject
from pdcompile.passes.export.torch_pipelining import refused_plans, torch_pipelining
from pdcompile.plan import Plan
from pdcompile.schedule.registry import alternating, known_to_torch, name_of


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """Who runs a plan, and in which orders; `schedules` empty: none, as it does not pipeline.

    `refused`: what a plan alone tells.  `compares`: with the values of the model.  `check_model`
    raises what plan and model tell before the model is captured.
    """

    make: Callable[[Subject], Exported]
    schedules: tuple[str, ...] = ()
    refused: Callable[[Plan], Iterable[ConfigError]] = lambda _: ()
    compares: bool = False
    check_model: Callable[[Plan, nn.Module], None] = lambda *_: None


KINDS: dict[str, ExportTarget] = {
    "torch-pipelining": ExportTarget(torch_pipelining, known_to_torch(), refused_plans, True),
    "torchtitan": ExportTarget(
        torchtitan, known_to_torch(), without_lines("torchtitan"), check_model=refuse_tied_ends
    ),
    "megatron": ExportTarget(megatron, alternating(), without_lines("megatron")),
    "accelerate": ExportTarget(accelerate, refused=without_lines("accelerate")),
}


def check_plan(plan: Plan, to: str) -> None:
    """Raise ConfigError where a plan alone tells that a target cannot express it."""
    known = KINDS[to].schedules
    if known and plan.training.schedule not in known:
        raise ConfigError(
            f"{to} has no schedule {name_of(plan.training.schedule)!r}",
            where=f"--to {to}",
            remedy=f"plan with schedule {' or '.join(known)}",
        )
    for error in KINDS[to].refused(plan):
        raise error
