"""What a person may leave to the planner besides the cut, and the space that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdcompile.errors import ConfigError
from pdcompile.ir.graph import SizeRange
from pdcompile.options import Options
from pdcompile.options.choices import Choices
from pdcompile.problem.space import SearchSpace
from pdcompile.schedule.registry import allowed

MOST_COUNTS = 5  # microbatch counts that "auto" tries
SPREAD = 4  # from a quarter of the usual count to four times


@dataclass(frozen=True, slots=True)
class Open:
    """The questions that are open.

    Args:
        replicas: ranks of a stage: "1", "equal" for all stages, or "any".
        recompute: False, True, or None: decided for each stage.
        microbatches: counts to choose from; None: around the usual one.
        extra_warmup: see `SearchSpace`.
        stages: how many, where the options do not say; None: any number.
    """

    replicas: Literal["1", "equal", "any"] = "1"
    recompute: bool | None = False
    microbatches: tuple[int, ...] | None = None
    extra_warmup: tuple[int, ...] = (0, 1)
    stages: int | None = None


def search_space(wish: Open, options: Options, chosen: Choices, sizes: SizeRange) -> SearchSpace:
    """The space of one model on one cluster.

    Args:
        sizes: microbatch sizes for which the capture is the model.

    Raises:
        ConfigError: no number of microbatches that is asked for can be had.
    """
    schedules: tuple[str, ...] = (chosen.schedule,)
    if options.schedule == "auto":
        schedules = allowed(options.max_staleness)
    return SearchSpace(
        replicas=wish.replicas,
        recompute=(False, True) if wish.recompute is None else (wish.recompute,),
        schedules=schedules,
        microbatches=_counts(wish, options, chosen, sizes),
        extra_warmup=wish.extra_warmup,
        stages=options.stages or wish.stages,
    )


def _counts(wish: Open, options: Options, chosen: Choices, sizes: SizeRange) -> tuple[int, ...]:
    batch = chosen.batch_size
    if wish.microbatches is not None:
        for m in wish.microbatches:
            if not 1 <= m <= batch or not _fits(batch, m, sizes):
                raise ConfigError(
                    f"{m} microbatches of a minibatch of {batch} samples",
                    where="--microbatches",
                    remedy=f"numbers from 1 to {batch}, whose microbatches the model takes",
                )
        return tuple(dict.fromkeys(wish.microbatches))
    usual = chosen.num_microbatches
    if options.microbatches != "auto" or options.costs not in ("measured", "estimated"):
        return (usual,)  # a saved profile is of one size
    near = [
        m
        for m in range(1, batch + 1)
        if batch % m == 0 and usual <= SPREAD * m <= SPREAD * SPREAD * usual
        if _fits(batch, m, sizes)
    ]
    while len(near) > MOST_COUNTS:  # thin out the side that has more of them
        below = sum(m < usual for m in near)
        near.pop(-2 if below * 2 < len(near) else 1)
    return tuple(dict.fromkeys((usual, *near)))


def _fits(batch: int, m: int, sizes: SizeRange) -> bool:
    """Both sizes that microbatches then have."""
    return sizes.holds(batch // m) and sizes.holds(-(-batch // m))
