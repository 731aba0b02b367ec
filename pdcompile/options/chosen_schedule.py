"""The schedule that options choose, and options that it refuses."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pdcompile.eager.loss_scale import scaler_of
from pdcompile.errors import ConfigError, did_you_mean
from pdcompile.options import Options
from pdcompile.schedule.registry import DEFAULT, KINDS, allowed, find, kind_of
from pdcompile.schedule_limits import JOINT, unfit


def counts_of(options: Options) -> tuple[int, ...]:
    """Replicas by stage, where that is given."""
    return options.replicas if isinstance(options.replicas, tuple) else ()


def chosen_schedule(options: Options) -> str:
    """The schedule by name.  Raises ConfigError for one that is not available."""
    if options.schedule == "auto":
        streams = [name for name in allowed(options.max_staleness) if KINDS[name].stream]
        return streams[0] if streams else DEFAULT
    said = options.schedule if isinstance(options.schedule, str) else ""
    if ":" not in said and find(said) is None:
        names = (*KINDS, "auto")
        raise ConfigError(
            f"schedule={options.schedule!r} is not available",
            remedy=f"{did_you_mean(str(options.schedule), names)}one of "
            f"{', '.join(map(repr, names))}, or the path of a .csv file",
        )
    kind = kind_of(options.schedule)
    scaled = scaler_of(options.grad_scaler) is not None
    asked: dict[str, Collection[Any]] = {
        "stages": {options.stages} - {None},
        "microbatches": {options.microbatches, *(options.microbatch_counts or ())} - {"auto"},
        "replicas": {options.replicas} - {"1"},
        "grad_scaler": [True] * scaled,
        "max_grad_norm": {options.max_grad_norm} - {None},
        "updates": {options.updates} - {"every", "auto"},
    }
    for name, other, why, remedy in unfit(kind, f"under schedule={kind.name!r}", asked):
        said = name if name in JOINT else f"{name}={other!r}"
        raise ConfigError(f"{said}{why}", remedy=remedy)
    if kind.dispatched and options.replicas not in (1, "1"):
        raise ConfigError(
            f"replicas={options.replicas!r} under schedule={options.schedule!r}, where every rank "
            "runs what comes to it next",
            remedy="leave replicas out: they follow from the numbers of stages and ranks",
        )
    unlike = options.replicas == "any" or len({*counts_of(options)}) > 1
    if kind.placed and kind.written is None and unlike:
        raise ConfigError(
            f"replicas={options.replicas!r} under schedule={options.schedule!r}, whose ranks hold "
            "several stages, and so as many replicas of each",
            remedy=f"replicas=2 or 'equal', or schedule={DEFAULT!r}",
        )
    return options.schedule


def microbatches_of(options: Options) -> Any:
    """The number that the user asks for, or has written a schedule for; else "auto"."""
    kind = find(options.schedule)
    return kind.written.num_microbatches if kind and kind.written else options.microbatches


def updates_each(options: Options) -> bool:
    """True if every microbatch is a minibatch with an update of its own."""
    return options.schedule != "auto" and kind_of(options.schedule).updates_each
