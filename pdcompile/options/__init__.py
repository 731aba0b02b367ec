"""Options: the arguments of `pdcompile.compile`, validated once, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pdcompile.clusters import cluster_of
from pdcompile.options.table import (
    ROWS,
    FailureOptions,
    GivenOptions,
    MachineOptions,
    SearchOptions,
    TrainingOptions,
)
from pdcompile.problem.constraints import Split, SplitAxis
from pdcompile.schedule.registry import find
from pdcompile.schedule.written import named

# What people look for among the options, and where it is.
NOT_OPTIONS = {
    "lr": "it is the optimizer's: optimizer=partial(torch.optim.AdamW, lr=3e-4)",
    "batches": "the loop is yours: pipe.step(inputs, target=target) takes one minibatch a call",
    "batch_size": "it is that of the minibatch: example_inputs is a whole one",
}
# Options without a use where nothing is trained, and what they then are.
OF_UPDATES = {
    "optimizer": None, "max_grad_norm": None, "grad_scaler": None, "recompute": False,
    "updates": "every", "linear_lr_scaling": False,
}  # fmt: skip


class Held(NamedTuple):
    """Place of a tensor of a model that an earlier pipeline has split over ranks.

    `stages` of that pipeline hold it, the first is its owner; `ranks` are those of each stage, of
    which each is so many `parts`.
    """

    stages: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    group: Any
    parts: int = 1

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks that update it."""
        return self.ranks[self.stages[0]]

    @property
    def holders(self) -> frozenset[int]:
        """The ranks that have its values."""
        return frozenset(rank for stage in self.stages for rank in self.ranks[stage])


@dataclass(frozen=True)
class Options(TrainingOptions, MachineOptions, SearchOptions, GivenOptions, FailureOptions):
    """Everything that a user asks for, validated once, the same on every rank.

    Fields of its own are no options: `microbatch_counts` and `extra_warmup` are of `pdcompile plan`
    alone, whose plans may use more than the runtime can do.  `said`: options that a plan does not
    replace, as the user gave them (see `of_plan`).
    """

    microbatch_counts: tuple[int, ...] | None = None  # to choose from; None: around the usual
    extra_warmup: tuple[int, ...] = (0, 1)  # see `SearchSpace`
    capture_file: Path | None = None  # beside a plan: read where that is given, else written
    plan_file: str = "plan"  # where a plan that was read comes from
    command_target: str = "TARGET"  # of the command line, for commands that remedies name
    alone: bool = False  # one process runs what is made: it keeps outputs that nobody names
    said: frozenset[str] = frozenset()
    held: Mapping[str, Held] = field(default_factory=dict)  # by tensor, of a model that was split

    def __post_init__(self) -> None:
        """Raises ScheduleError: a file cannot be read, or is no schedule.  ClusterError: a number
        of stages in this process that is none."""
        object.__setattr__(self, "schedule", named(self.schedule))
        kind = find(self.schedule) if isinstance(self.schedule, str) else None
        for name in () if kind is None or kind.trains else OF_UPDATES:
            object.__setattr__(self, name, OF_UPDATES[name])
        if isinstance(self.cluster, str) and self.cluster.startswith("local:"):
            object.__setattr__(self, "cluster", cluster_of(self.cluster))
        if isinstance(self.parts, tuple) and self.parts:  # one for each stage
            object.__setattr__(self, "stages", self.stages or len(self.parts))
            if self.stages == len(self.parts) and len({*self.parts}) == 1:
                object.__setattr__(self, "parts", self.parts[0])

    @staticmethod
    def given(options: Mapping[str, Any]) -> Options:
        """The record of what a user gives, None where something that a plan records is not said.

        Raises:
            TypeError: there is no such option.
            ScheduleError: see `__post_init__`.
        """
        is_open = {name for name, row in ROWS.items() if row.is_open}
        there = {n: one for n, one in options.items() if one is not None or n not in is_open}
        return Options(**there, said=frozenset(there).intersection(is_open))

    def beside(self, held: Mapping[str, Held]) -> Options:
        """These options with as many stages and replicas as a model was split into before."""
        ranks = next((one.ranks for one in held.values()), ())
        counts = tuple(map(len, ranks))
        told = self.plan is not None or self.sources is not None
        new = replace(self, held=held, stages=self.stages if told else self.stages or len(ranks))
        if max(counts, default=1) > 1 and not told and "replicas" not in self.said:
            new = replace(new, replicas=counts)
        return new

    @property
    def stage_parts(self) -> int | tuple[int, ...]:
        """Parts of the stages, of one layout (see `layouts`)."""
        assert self.parts != "any"
        return self.parts

    @property
    def module_splits(self) -> tuple[tuple[str, SplitAxis], ...]:
        """Patterns and axes of modules that are divided otherwise than the rest."""
        if self.plan is not None:
            found: tuple[tuple[str, SplitAxis], ...] = self.plan.training.module_splits
            return found
        return tuple((o.pattern, o.axis) for o in self.constraints if isinstance(o, Split))

    @property
    def searches(self) -> bool:
        """True if the planner decides more than the cut."""
        return "auto" in (self.schedule, self.recompute) or self.replicas != 1
