"""Schedules: warm-up depths and the programs of successive calls; one file a schedule."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import gcd

from pdcompile.errors import ScheduleError
from pdcompile.passes.schedules.stream import Stream, evaluation, make_stream
from pdcompile.problem.deployment import StageDeployment
from pdcompile.schedule.instruction import most_held
from pdcompile.schedule.registry import ScheduleKind, StageWork, kind_of

__all__ = ["Stream", "evaluation", "make_stream", "warmup"]


def warmup(
    name: str,
    num_stages: int,
    num_microbatches: int,
    replicas: tuple[int, ...] = (),
    extra: int = 0,
    placement: tuple[int, ...] = (),
) -> tuple[int, ...]:
    """Warm-up depth w_s of a replica of each stage: forwards before its first backward − 1.

    The least that keeps balanced stages busy when nothing is sent is N − 1 − s; with r_s
    replicas w_s = ⌈(w_{s+1} + 1)·r_{s+1} / r_s⌉ from w_{N−1} = 0, because strict alternation on
    many replicas needs more in flight than a round trip takes (PipeDream's 1F1B-RR depth,
    ⌊(R − 1 − Σ_{i<s} r_i)/r_s⌋, leaves [1, 4, 1] at 7.5 seconds a microbatch instead of 3).
    Where replicas take whole minibatches in turn, those of a stage go on together, after the
    update that all of them wait for: between stages of unlike counts that takes
    r_s + r_{s+1} − 2 gcd(r_s, r_{s+1}) microbatches more.  Transfers need more.

    Args:
        replicas: r_s, one each when empty.
        extra: e puts 1 + e in place of the 1 (1 hides transfers up to a stage's own time); not
            where each replica makes updates alone, whose turns decide.
        placement: the rank of each stage, where ranks hold several: their order then leaves no
            choice, and the depth is what a stage holds at most, counted from it, less one.

    Returns:
        With a flush all microbatches but one at most, or just that where all go forward first.
        A stream's forward needs all backwards of an earlier minibatch; too deep ones are scaled
        together: two neighbours of equal depth would take turns instead of overlapping.

    Raises:
        ScheduleError: unknown name, or counts that do not fit.
    """
    counts = replicas or (1,) * num_stages
    kind = kind_of(name)
    if num_stages < 1 or num_microbatches < 1 or len(counts) != num_stages or min(counts) < 1:
        raise ScheduleError(
            f"{num_stages} stages, {num_microbatches} microbatches, replicas {counts}"
        )
    if extra < 0:
        raise ScheduleError(f"extra warm-up {extra} is negative")
    most = [kind.most_warmup(num_microbatches, count) for count in counts]
    if kind.warmup == "all":
        return tuple(most)
    if kind.written is not None and placement == kind.written.placement:
        return kind.written.warmup
    if placement and len(placement) != num_stages:
        raise ScheduleError(f"{num_stages} stages on ranks {list(placement)}")
    if len({*placement}) < len(placement) and kind.trains:
        share = StageDeployment(counts[0]).share(num_microbatches)
        return tuple(count - 1 for count in _held(kind, share, placement))
    depths = [0] * num_stages
    if kind.alone:  # a run of turns of all stages that follow, and one of its own
        return tuple(sum(counts[s + 1 :]) + r - 1 for s, r in enumerate(counts))
    for stage in range(num_stages - 2, -1, -1):
        here, there = counts[stage], counts[stage + 1]
        together = here + there - 2 * gcd(here, there) if kind.updates_each else 0
        depths[stage] = -(-((depths[stage + 1] + 1 + extra) * there + together) // here)
    depths = [depth + (kind.extra or 0) for depth in depths]
    return tuple(map(min, depths, most)) if kind.drains else _scaled(depths, most)


@lru_cache(maxsize=256)
def _held(kind: ScheduleKind, share: int, placement: tuple[int, ...]) -> tuple[int, ...]:
    """The most microbatches between forward and backward of each stage, by the ranks' orders."""
    count, tasks = len(placement), []
    for rank in sorted(set(placement)):
        held = [stage for stage in range(count) if placement[stage] == rank]
        own = [StageWork(stage, range(share), num_stages=count) for stage in held]
        tasks += [(task.stage, task.action) for task in kind.order(own)]
    return most_held(tasks, count)


def _scaled(depths: list[int], caps: list[int]) -> tuple[int, ...]:
    """Depths of at most their caps, in proportion (rounded); nothing changes when all fit."""
    ratio = min(
        (Fraction(cap, depth) for cap, depth in zip(caps, depths, strict=True) if depth > cap),
        default=Fraction(1),
    )
    return tuple(
        min(cap, int(depth * ratio + Fraction(1, 2)))
        for depth, cap in zip(depths, caps, strict=True)
    )
