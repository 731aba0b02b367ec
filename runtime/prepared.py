"""Prepared: everything that the passes hand to the runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from pdcompile.batch import BatchLayout
from pdcompile.errors import ConfigError
from pdcompile.ir.graph import Capture
from pdcompile.ir.stage_interface import StageInterface
from pdcompile.passes.schedules import Stream
from pdcompile.plan import Edge, Plan


@dataclass(frozen=True, slots=True)
class Prepared:
    """A planned, generated and proved pipeline, the same on every rank.

    `stage_classes[s]` is the class of stage s, from a module of its own namespace (the runtime
    puts its `draw` there); `eval_edges` are the values that cross stages in evaluation.
    `in_process`: all ranks run in this process.  `explain` and `dump` are made by who knows the
    passes.
    """

    capture: Capture
    plan: Plan
    interfaces: tuple[StageInterface, ...]
    stage_classes: tuple[type[nn.Module], ...]
    eval_edges: tuple[Edge, ...]
    stream: Stream
    layout: BatchLayout  # of the minibatch that was captured
    in_process: bool
    explain: Callable[[], str]
    dump: Callable[[str], None]

    @property
    def num_versions(self) -> int:
        """How many versions of its weights every stage holds."""
        return self.stream.spec.kind.versions

    @property
    def stages_of_rank(self) -> dict[int, tuple[int, ...]]:
        """The stages of each rank.  Raises ConfigError for a plan with replicas."""
        for stage in self.plan.stages:
            if stage.replicas != 1:
                raise ConfigError(
                    f"stage {stage.index} has {stage.replicas} replicas, which are planned and "
                    "simulated but do not run yet",
                    where=f"plan: stages[{stage.index}].replicas",
                    remedy="plan with one replica a stage",
                )
        return dict(sorted(self.stream.spec.holders))
