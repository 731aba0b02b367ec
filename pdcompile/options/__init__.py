"""Options: the arguments of `pdcompile.compile`, validated once, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pdcompile.eager.optimizers import default_optimizer
from pdcompile.schedule.files import named
from pdcompile.schedule.registry import DEFAULT


@dataclass(frozen=True, slots=True)
class Options:
    """See `pdcompile.compile` for what each means; names and defaults are the same.

    The last ones are those of `pdcompile plan` alone, whose plans may use more than the runtime
    can do: they say what the planner decides besides the cut.
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
    outputs: Literal["none", "last", "everything", "all"] = "last"
    keep_model: bool = False
    max_staleness: int | Literal["any"] = 0
    time_limit: float | None = None
    plan: Any = None
    sources: Any = None
    allow_edited: bool = False
    weights: Any = None
    group: Any = None
    progress: bool | Literal["auto"] = "auto"
    replicas: int | tuple[int, ...] | Literal["1", "equal", "any"] = 1
    microbatch_counts: tuple[int, ...] | None = None  # to choose from; None: around the usual
    extra_warmup: tuple[int, ...] = (0, 1)  # see `SearchSpace`

    def __post_init__(self) -> None:
        """Raises ScheduleError: a file cannot be read, or is no schedule."""
        object.__setattr__(self, "schedule", named(self.schedule))

    @property
    def searches(self) -> bool:
        """Whether the planner decides more than the cut."""
        return "auto" in (self.schedule, self.recompute) or self.replicas != 1
