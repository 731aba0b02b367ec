"""The schedule that options choose, and options that it refuses."""

from __future__ import annotations

from typing import Any

from pdcompile.eager.loss_scale import scaler_of
from pdcompile.errors import ConfigError, did_you_mean
from pdcompile.options import Options
from pdcompile.schedule.registry import (
    DEFAULT,
    KINDS,
    ScheduleKind,
    allowed,
    find,
    kind_of,
    one_age_streams,
    with_replicas,
)
from pdcompile.schedule.written import Written


def counts_of(options: Options) -> tuple[int, ...]:
    """Replicas by stage, where that is given."""
    return options.replicas if isinstance(options.replicas, tuple) else ()


def chosen_schedule(options: Options) -> str:
    """The schedule by name.  Raises ConfigError for one that is not available."""
    if options.schedule == "auto":
        streams = [name for name in allowed(options.max_staleness) if KINDS[name].stream]
        return streams[0] if streams else DEFAULT
    written = isinstance(options.schedule, str) and ":" in options.schedule
    if not written and options.schedule not in KINDS:
        names = (*KINDS, "auto")
        raise ConfigError(
            f"schedule={options.schedule!r} is not available",
            remedy=f"{did_you_mean(str(options.schedule), names)}one of "
            f"{', '.join(map(repr, names))}, or the path of a .csv file",
        )
    kind = kind_of(options.schedule)
    if kind.updates_each:
        _refuse_several(options, kind)
    unlike = options.replicas == "any" or len({*counts_of(options)}) > 1
    if kind.written is not None:
        _refuse_other_counts(options, kind.name, kind.written)
    elif kind.placed and unlike:
        raise ConfigError(
            f"replicas={options.replicas!r} under schedule={options.schedule!r}, whose ranks hold "
            "several stages, and so as many replicas of each",
            remedy=f"replicas=2 or 'equal', or schedule={DEFAULT!r}",
        )
    return options.schedule


def _refuse_other_counts(options: Options, name: str, written: Written) -> None:
    """Raise ConfigError for stages, microbatches or replicas that a written schedule has not."""
    counts: dict[str, tuple[int, set[Any]]] = {
        "stages": (len(written.placement), {options.stages} - {None}),
        "microbatches": (
            written.num_microbatches,
            {options.microbatches, *(options.microbatch_counts or ())} - {"auto"},
        ),
        "replicas": (1, {options.replicas} - {"1"}),
    }
    for option, (has, asked) in counts.items():
        for other in asked - {has}:
            raise ConfigError(
                f"{option}={other!r}, and the schedule {name!r} is written for {has}",
                remedy=f"leave {option} out, or write the schedule for that",
            )


def _refuse_several(options: Options, kind: ScheduleKind) -> None:
    """Raise ConfigError for what needs several microbatches, replicas or stages in one update."""
    asked = f"under schedule={kind.name!r}"
    scaled = scaler_of(options.grad_scaler) is not None
    if (options.max_grad_norm is not None or scaled) and not kind.one_age:
        raise ConfigError(
            f"{'grad_scaler' if scaled else 'max_grad_norm'} {asked} needs the gradients of all "
            "stages at one time, and they are of weights of unlike age",
            remedy=f"use schedule={one_age_streams()}"
            + (", or autocast='bfloat16'" if scaled else ", or clip per stage in the optimizer"),
        )
    if options.microbatches not in ("auto", 1) or set(options.microbatch_counts or ()) - {1}:
        several = options.microbatch_counts or options.microbatches
        raise ConfigError(
            f"microbatches={several!r} {asked}, where every microbatch is a minibatch with an "
            "update of its own",
            remedy="microbatches=1, and smaller minibatches",
        )
    counts = options.replicas if isinstance(options.replicas, tuple) else (options.replicas,)
    if not kind.takes_replicas and any(count not in ("1", 1) for count in counts):
        raise ConfigError(
            f"replicas={options.replicas!r} {asked}, where all stages run on one version of the "
            "weights: stages of unlike counts update at unlike times",
            remedy=f"one replica a stage, or a schedule of {with_replicas()}",
        )


def microbatches_of(options: Options) -> Any:
    """The number that the user asks for, or has written a schedule for; else "auto"."""
    kind = find(options.schedule)
    return kind.written.num_microbatches if kind and kind.written else options.microbatches


def updates_each(options: Options) -> bool:
    """True if every microbatch is a minibatch with an update of its own."""
    return options.schedule != "auto" and kind_of(options.schedule).updates_each
