"""Plans for other people's runtimes: files, and what to know of them.

Each target is one row of `KINDS`, with a function from a `Subject` to an `Exported`.  What a target
would get wrong is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pdcompile.errors import ConfigError
from pdcompile.passes.export import configurations, torch_pipelining
from pdcompile.passes.export.subject import Exported, Subject, refused
from pdcompile.plan import Plan
from pdcompile.schedule.registry import alternating, known_to_torch, name_of


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """The files of a target, raising ConfigError where it cannot express a plan or model.

    Args:
        schedules: that it has; empty: any, as it does not pipeline.
        refused: what a plan alone tells.
        compares: with the values of the model.
    """

    make: Callable[[Subject], Exported]
    schedules: tuple[str, ...]
    refused: Callable[[Plan], Iterable[ConfigError]]
    compares: bool = False


KINDS: dict[str, ExportTarget] = {
    "torch-pipelining": ExportTarget(
        torch_pipelining.torch_pipelining, known_to_torch(), torch_pipelining.refused_plans, True
    ),
    "torchtitan": ExportTarget(
        configurations.torchtitan, known_to_torch(), configurations.refused_plans("torchtitan")
    ),
    "megatron": ExportTarget(
        configurations.megatron, alternating(), configurations.refused_plans("megatron")
    ),
    "accelerate": ExportTarget(
        configurations.accelerate, (), configurations.refused_plans("accelerate", pipelines=False)
    ),
}


def check_plan(plan: Plan, to: str) -> None:
    """Raise ConfigError where a plan alone tells that a target cannot express it."""
    known = KINDS[to].schedules
    if known and plan.training.schedule not in known:
        raise refused(
            to,
            f"{to} has no schedule {name_of(plan.training.schedule)!r}",
            f"plan with schedule {' or '.join(known)}",
        )
    for error in KINDS[to].refused(plan):
        raise error
