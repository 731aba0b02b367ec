"""The targets of export, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pdcompile.errors import ConfigError
from pdcompile.passes.export.configurations import (
    accelerate,
    megatron,
    torchtitan,
)
from pdcompile.passes.export.subject import Exported, Subject
from pdcompile.passes.export.torch_pipelining import refused_plans, torch_pipelining
from pdcompile.plan import Plan
from pdcompile.schedule.registry import alternating, known_to_torch, name_of


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """Who runs a plan, and in which orders; `schedules` empty: none, as it does not pipeline.

    `refused`: what a plan alone tells.  `compares`: with the values of the model.
    """

    make: Callable[[Subject], Exported]
    schedules: tuple[str, ...] = ()
    refused: Callable[[Plan], Iterable[ConfigError]] = lambda _: ()
    compares: bool = False


KINDS: dict[str, ExportTarget] = {
    "torch-pipelining": ExportTarget(torch_pipelining, known_to_torch(), refused_plans, True),
    "torchtitan": ExportTarget(torchtitan, known_to_torch()),
    "megatron": ExportTarget(megatron, alternating()),
    "accelerate": ExportTarget(accelerate),
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
