"""Pipelines of which the seconds of hops are known, without links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from pdcompile.cluster import Level
from pdcompile.plan.times import Message, PipelineTimes
from pdcompile.plan.wires import DIRECTIONS, StagePair
from pdcompile.schedule.registry import DEFAULT

SECONDS = Level("seconds", 1, 1.0)  # a link on which a message takes as long as it has bytes


def of_hops(
    forward: Sequence[float],
    backward: Sequence[float],
    *hops: Mapping[StagePair, float],
    schedule: str = DEFAULT,
    again: Sequence[float] = (),
) -> PipelineTimes:
    """Stages of one rank each; seconds of forward, backward and final hops."""
    count, listed = len(forward), list[Message]()
    for kind, table in zip(DIRECTIONS, hops, strict=False):
        listed += [Message(kind, a, b, cast(int, size)) for (a, b), size in table.items()]
    return PipelineTimes(
        forward, backward, [(rank,) for rank in range(count)], listed, lambda a, b: SECONDS,
        [False] * count, [0] * count, schedule=schedule, again=again,
    )  # fmt: skip
