"""Limits of schedules: what options and plans may not ask of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pdcompile.schedule.registry import DEFAULT, ScheduleKind, names, one_age_streams

#: options of updates that wait for all stages, and what to do instead
JOINT = {"grad_scaler": "autocast='bfloat16'", "max_grad_norm": "clip per stage in the optimizer"}


def elsewhere(kind: ScheduleKind, hosts: int) -> Iterator[tuple[str, str]]:
    """Reasons why a schedule cannot run on so many hosts, and what to do."""
    if kind.dispatched and hosts > 1:
        why = f"{hosts} hosts, and under {kind.name!r} all ranks of one host run all stages in turn"
        yield why, f"one host; or schedule={DEFAULT!r}, where each stage has ranks of its own"


def unfit(
    kind: ScheduleKind, under: str, asked: Mapping[str, Iterable[Any]]
) -> Iterator[tuple[str, Any, str, str]]:
    """Limits that are exceeded: an option, its value, why it cannot be, and what to do.

    Args:
        under: the schedule, in words.
        asked: values by option, none where that is left open.
    """
    if kind.written is not None:
        has = {"stages": len(kind.written.placement), "microbatches": kind.written.num_microbatches}
        for name, count in (has | {"replicas": 1}).items():
            why = f", and the schedule {kind.name!r} is written for {count}"
            remedy = f"leave {name} out, or write the schedule for that"
            yield from ((name, other, why, remedy) for other in asked[name] if other != count)
    if not kind.updates_each:
        return
    for name, instead in JOINT.items() if not kind.one_age else ():
        why = f" {under} needs the gradients of all stages at one time, and they are of weights of "
        remedy = f"use schedule {one_age_streams()}, or {instead}"
        yield from ((name, value, f"{why}unlike age", remedy) for value in asked[name])
    for m in asked["microbatches"]:
        if m != 1:
            why = f" {under}, where every microbatch is a minibatch with an update of its own"
            yield "microbatches", m, why, "one (microbatches=1), and smaller minibatches"
    for where in asked["updates"]:
        each = "is of one replica's minibatch alone" if kind.alone else (
            "averages a minibatch of each replica"
        )  # fmt: skip
        remedy = "updates='every', or another schedule"
        yield "updates", where, f" {under}, where an update {each}", remedy
    for replicas in asked["replicas"] if not kind.takes_replicas else ():
        if {*(replicas if isinstance(replicas, tuple) else (replicas,))} != {1}:
            why = f" {under}, where all stages run on one version of the weights: stages of unlike "
            others = ", ".join(names(lambda k: k.trains and k.takes_replicas))
            remedy = f"one replica a stage, or a schedule of {others}"
            yield "replicas", replicas, f"{why}counts update at unlike times", remedy
