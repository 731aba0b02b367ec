"""Plans for other people's runtimes: files, and what to know of them.

Each target is one row of `KINDS`, with a function from a `Subject` to an `Exported`.  What a target
would get wrong is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
        refused: what a plan alone tells, beside what all targets refuse.
        trains: the generated stages go with the files, which compare them with the model's values.
    """

    make: Callable[[Subject], Exported]
    schedules: tuple[str, ...] = ()
    refused: Callable[[Plan], Iterable[ConfigError]] = lambda _: ()
    trains: bool = False


KINDS: dict[str, ExportTarget] = {
    "torch-pipelining": ExportTarget(
        torch_pipelining.torch_pipelining, known_to_torch(), torch_pipelining.refused_plans, True
    ),
    "torchtitan": ExportTarget(configurations.torchtitan, known_to_torch()),
    "megatron": ExportTarget(configurations.megatron, alternating()),
    "accelerate": ExportTarget(configurations.accelerate),
}


def check_plan(plan: Plan, to: str) -> None:
    """Raise ConfigError where a plan alone tells that a target cannot express it."""
    for error in _refused_plans(plan, to):
        raise error


def _refused_plans(plan: Plan, to: str) -> Iterator[ConfigError]:
    target, training = KINDS[to], plan.training
    counts = {stage.replicas for stage in plan.stages}
    if target.schedules and training.schedule not in target.schedules:
        yield refused(
            to,
            f"{to} has no schedule {name_of(training.schedule)!r}",
            f"plan with schedule {' or '.join(target.schedules)}",
        )
    yield from target.refused(plan)
    if len(counts) > 1:
        yield refused(
            to,
            f"stages have {sorted(counts)} replicas, and those of {to} all have equally many",
            "plan with replicas='equal' or a number",
        )
    if target.schedules and training.batch_size % (training.num_microbatches * max(counts)):
        yield refused(
            to,
            f"{training.batch_size} samples in {training.num_microbatches} microbatches on "
            f"{max(counts)} replicas are not of one size",
            "plan with a number of microbatches that divides the minibatch, and that the "
            "replicas divide",
        )
