"""Why no plan fits into the memory, and the smallest memory that would help."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdcompile.passes.published.pipedream.memory import LimitedOutermost, Worker, ceiling
from pdcompile.passes.published.pipedream.recursion import Level
from pdcompile.passes.published.pipedream.states import Segments
from pdcompile.passes.published.pipedream.threshold import Cut
from pdcompile.passes.published.pipedream_file import HierarchyProblem
from pdcompile.units import format_bytes

EXACT = 1e-9  # relative: the smallest memory is named up to this


def unfit(problem: HierarchyProblem, levels: Sequence[Level], segments: Segments) -> str | None:
    """Why no chain of these states fits, or None when one does, as far as this test sees.

    Only the workers behind a stage matter to memory, not how they are joined, so every plan
    over several levels is also one over a single level with all workers.
    """
    limit = problem.memory_bytes
    assert limit is not None
    if _stages(levels, segments, limit) is not None:
        return None
    least = _least(levels, segments, limit)
    workers = problem.workers
    help_text = f"at least {format_bytes(least)} ({math.ceil(least)} bytes) would be needed"
    heaviest = max(problem.graph.nodes, key=lambda n: n.activation_bytes + n.parameter_bytes)
    single = heaviest.activation_bytes + heaviest.parameter_bytes
    if single > limit:
        return (
            f"{heaviest.id} ({heaviest.description.split('(')[0]}) keeps {format_bytes(single)} "
            f"of activations and parameters for one minibatch, a worker has {format_bytes(limit)}; "
            + help_text
        )
    total = math.fsum(n.activation_bytes + n.parameter_bytes for n in problem.graph.nodes)
    return (
        f"{format_bytes(total)} of activations and parameters cannot be divided over {workers} "
        f"workers of {format_bytes(limit)}, where a stage also keeps those of the minibatches "
        "under way behind it; " + help_text
    )


def _flat(levels: Sequence[Level], segments: Segments, limit: float) -> LimitedOutermost:
    workers = math.prod(level.count for level in levels)
    level = Level(workers, math.inf, 1, levels[0].straight, math.inf)
    return LimitedOutermost(level, Worker(segments, limit), segments, sound=True)


def _stages(levels: Sequence[Level], segments: Segments, limit: float) -> tuple[Cut, ...] | None:
    return _flat(levels, segments, limit).decide(ceiling(levels, segments))


def _least(levels: Sequence[Level], segments: Segments, low: float) -> float:
    """The smallest limit with stages; `low` has none, and one worker for everything is some."""
    high = float(segments.held[0, -1])
    while high - low > 2 * EXACT * high:
        middle = high * (1 - EXACT) if high - low <= 1e-3 * high else (low + high) / 2
        stages = _stages(levels, segments, middle)
        if stages is None:
            low = middle
        else:
            high = min(middle, _needed(stages, segments))
    return high


def _needed(stages: Sequence[Cut], segments: Segments) -> float:
    behind = [sum(s.replicas for s in stages[k:]) for k in range(len(stages))]
    return max(
        -(-after // stage.replicas) * float(segments.held[stage.i, stage.j])
        for after, stage in zip(behind, stages, strict=True)
    )
