"""Options: the arguments of `pdcompile.compile`, validated once, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pdcompile.clusters import cluster_of
from pdcompile.schedule.registry import DEFAULT
from pdcompile.schedule.written import named

# Where None stands for "not said": a given plan then decides, else the default.
OPEN = (
    "schedule", "replicas", "recompute", "loss_reduction", "linear_lr_scaling", "seed", "outputs",
    "autocast", "grad_scaler", "max_grad_norm",
)  # fmt: skip
OUTPUTS = ("none", "evaluation", "last", "everything", "all")
# What people look for among the options, and where it is.
NOT_OPTIONS = {
    "lr": "it is the optimizer's: optimizer=partial(torch.optim.AdamW, lr=3e-4)",
    "batches": "the loop is yours: pipe.step(inputs, target=target) takes one minibatch a call",
    "batch_size": "it is that of the minibatch: example_inputs is a whole one",
}


def default_optimizer(parameters: Any) -> Any:
    """The default of `compile` and `reference`: AdamW at 3e-4."""
    import torch

    return torch.optim.AdamW(parameters, lr=3e-4)


class Held(NamedTuple):
    """Where a tensor is of a model that an earlier pipeline has split over ranks.

    `stages` of that pipeline hold it, the first is its owner; `ranks` are those of each stage.
    """

    stages: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    group: Any

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks that update it."""
        return self.ranks[self.stages[0]]

    @property
    def holders(self) -> frozenset[int]:
        """The ranks that have its values."""
        return frozenset(rank for stage in self.stages for rank in self.ranks[stage])


@dataclass(frozen=True, slots=True)
class Options:
    """See `pdcompile.compile` for what each means; the names are the same.

    The last but two are those of `pdcompile plan` alone, whose plans may use more than the runtime
    can do: they say what the planner decides besides the cut.  `said`: those of `OPEN` that the
    user gave; a plan does not replace them (see `of_plan`).
    """

    loss_fn: Callable[..., Any] | None = None
    optimizer: Callable[..., Any] | None = default_optimizer
    cluster: Any = "auto"
    stages: int | None = None
    schedule: str = DEFAULT  # a name, or the tasks of a file; a path is read at once
    recompute: bool | Literal["auto"] | Sequence[bool] = False
    microbatches: int | Literal["auto"] = "auto"
    memory: int | str | None = None  # per device
    constraints: Sequence[Any] = ()
    cut_tolerance: float | None = None  # None: as much as `preferred_cuts` has
    batch_dims: Any = 0
    loss_reduction: Literal["mean", "sum"] | Callable[..., Any] = "mean"
    autocast: Any = None
    grad_scaler: Any = None
    max_grad_norm: float | None = None
    linear_lr_scaling: bool = False
    seed: int = 0
    costs: Any = "measured"
    refine: bool | Literal["auto"] = "auto"
    verify: Literal["auto", "full", "blocks", "off"] = "auto"
    outputs: Literal["none", "evaluation", "last", "everything", "all"] = "last"
    keep_model: bool = False
    max_staleness: int | Literal["any"] = 0
    time_limit: float | None = None
    plan: Any = None
    sources: Any = None
    allow_edited: bool = False
    weights: Any = None
    resume: Any = None
    group: Any = None
    detect_nonfinite: bool = False
    stall_timeout: float | None = 30.0  # seconds, as the next
    progress_timeout: float | None = 300.0
    progress: bool | Literal["auto"] = "auto"
    replicas: int | tuple[int, ...] | Literal["1", "equal", "any"] = 1
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
        if isinstance(self.cluster, str) and self.cluster.startswith("local:"):
            object.__setattr__(self, "cluster", cluster_of(self.cluster))

    @staticmethod
    def given(options: Mapping[str, Any]) -> Options:
        """The record of what a user gives, None where something of `OPEN` is not said.

        Raises:
            TypeError: there is no such option.
            ScheduleError: see `__post_init__`.
        """
        there = {n: one for n, one in options.items() if one is not None or n not in OPEN}
        return Options(**there, said=frozenset(there).intersection(OPEN))

    def beside(self, held: Mapping[str, Held]) -> Options:
        """For a model that is split already: as many stages and replicas as it was split into."""
        ranks = next((one.ranks for one in held.values()), ())
        counts = tuple(map(len, ranks))
        told = self.plan is not None or self.sources is not None
        new = replace(self, held=held, stages=self.stages if told else self.stages or len(ranks))
        if max(counts, default=1) > 1 and not told and "replicas" not in self.said:
            new = replace(new, replicas=counts)
        return new

    @property
    def searches(self) -> bool:
        """Whether the planner decides more than the cut."""
        return "auto" in (self.schedule, self.recompute) or self.replicas != 1
