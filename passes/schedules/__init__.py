"""Schedules: the compute order of each, its warm-up depths and what it holds in memory."""

from __future__ import annotations

from pdcompile.errors import ScheduleError
from pdcompile.passes.layout import SCHEDULES
from pdcompile.passes.schedules.stream import Stream, evaluation, make_stream
from pdcompile.problem import MemoryRule

__all__ = ["SCHEDULES", "Stream", "evaluation", "make_stream", "memory_rule", "warmup"]


def warmup(
    name: str,
    num_stages: int,
    num_microbatches: int,
    replicas: tuple[int, ...] = (),
    extra: int | tuple[int, ...] = 0,
) -> tuple[int, ...]:
    """Warm-up depth w_s of a replica of each stage: forwards before its first backward − 1.

    The minimum that keeps balanced stages busy when nothing is sent is N − 1 − s, with
    replicas ⌊(R − 1 − Σ_{i<s} r_i)/r_s⌋ (PipeDream's 1F1B-RR).  Transfers need more.

    Args:
        replicas: r_s, one each when empty.
        extra: an int e multiplies the minimum by 1 + e (1 hides transfers up to a stage's own
            time); a tuple adds to each stage.

    Returns:
        gpipe: all microbatches; 1f1b: at most a replica's microbatches − 1; 2bw: at most
        ⌊m/r_s⌋, because a forward needs all backwards of the minibatch before the last.

    Raises:
        ScheduleError: unknown name, or counts that do not fit.
    """
    counts = replicas or (1,) * num_stages
    if name not in SCHEDULES:
        raise ScheduleError(
            f"schedule {name!r} is not one of {', '.join(SCHEDULES)}", remedy='schedule="1f1b"'
        )
    if num_stages < 1 or num_microbatches < 1 or len(counts) != num_stages or min(counts) < 1:
        raise ScheduleError(
            f"{num_stages} stages, {num_microbatches} microbatches, replicas {counts}"
        )
    if isinstance(extra, tuple) and (len(extra) != num_stages or min(extra) < 0):
        raise ScheduleError(f"extra warm-up {extra} for {num_stages} stages")
    depths = []
    for stage, count in enumerate(counts):
        own = -(-num_microbatches // count)
        depth = (sum(counts[stage:]) - 1) // count
        depth = depth + extra[stage] if isinstance(extra, tuple) else depth * (1 + extra)
        if name == "gpipe":
            depth = own - 1
        elif name == "1f1b":
            depth = min(depth, own - 1)
        else:
            depth = min(depth, num_microbatches // count)
        depths.append(depth)
    return tuple(depths)


def memory_rule(
    name: str,
    warmup: tuple[int, ...],
    num_microbatches: int,
    *,
    clipping: bool = False,
    optimizer_factor: float = 2.0,
    replicas: tuple[int, ...] = (),
) -> MemoryRule:
    """What a stage holds: weight versions, gradient buffers, microbatches in flight.

    Gradient buffers are 2 where a stream updates late (clipping or replicas): the gradient of
    a minibatch waits while the next one's is summed.  Raises ScheduleError for an unknown name.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule {name!r} is not one of {', '.join(SCHEDULES)}")
    lag, versions = SCHEDULES[name]
    counts = replicas or (1,) * len(warmup)
    in_flight = tuple(depth + 1 for depth in warmup)
    if not lag:
        in_flight = tuple(
            min(depth, -(-num_microbatches // count))
            for depth, count in zip(in_flight, counts, strict=True)
        )
    late = bool(lag) and (clipping or max(counts) > 1)
    return MemoryRule(versions, 2 if late else 1, optimizer_factor, in_flight)
