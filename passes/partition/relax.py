"""Looser limits, one at a time: what each of them holds back at most.

Each relaxation is the same problem with one limit gone or eased, solved again within a time
limit.  The current assignment stays allowed in every one of them and is measured there too, so
a search that ends early never makes a looser limit look worse than the plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition.search import partition
from pdcompile.plan.evaluate import measure, violations
from pdcompile.problem import OUTPUT_WISH, MemoryRule, PartitionProblem, StageLimits, Wish

MORE_MEMORY = 1.1
FASTER = 2.0


@dataclass(frozen=True, slots=True)
class Relaxation:
    """A problem with one limit less; `problem` is None where the limit cannot be taken back."""

    kind: Literal["memory", "bandwidth", "warm-up", "constraint"]
    text: str
    problem: PartitionProblem | None
    reason: str = ""  # why there is no problem


@dataclass(frozen=True, slots=True)
class Relaxed:
    """What a relaxation would give: `objective_seconds` was found, nothing is below the bound.

    `status` "not tried": time was up, or `reason` says why it cannot be told.
    """

    kind: str
    text: str
    status: Literal["optimal", "feasible", "not tried"]
    objective_seconds: float | None = None
    bound_seconds: float | None = None
    stage_of: tuple[int, ...] = ()
    reason: str = ""


def relaxations(
    problem: PartitionProblem, deeper: MemoryRule | None = None
) -> Iterator[Relaxation]:
    """Memory, links, warm-up (`deeper`: the rule of a deeper one), and each of the user's wishes.

    A limit that is not there is not eased.
    """
    if any(stage.memory_bytes is not None for stage in problem.stages):
        yield Relaxation("memory", "no memory limit", _stages(problem, _unlimited))
        text = f"{100 * (MORE_MEMORY - 1):.0f} % more memory on every device"
        yield Relaxation("memory", text, _stages(problem, _roomier))
    if any(_costs(stage) for stage in problem.stages) and len(problem.stages) > 1:
        yield Relaxation("bandwidth", "links without cost", _stages(problem, _free))
        text = f"links {FASTER:g} times as fast"
        yield Relaxation("bandwidth", text, _stages(problem, _faster))
    if deeper is not None and deeper != problem.memory:
        text = f"a deeper warm-up, {list(deeper.in_flight)} microbatches in flight"
        yield Relaxation("warm-up", text, replace(problem, memory=deeper))
    for wish in problem.wishes:
        if wish.text == OUTPUT_WISH:
            continue
        loose = without(problem, wish)
        reason = "" if loose else "what it asks for holds without it"
        yield Relaxation("constraint", f"without {wish.text}", loose, reason)


def without(problem: PartitionProblem, wish: Wish) -> PartitionProblem | None:
    """The problem without one of its wishes; what other wishes ask for too stays.

    None where the problem has no entry of the wish.
    """
    others = [one for one in problem.wishes if one is not wish]

    def left(name: str) -> tuple[tuple[int, ...], ...]:
        kept = {entry for other in others for entry in getattr(other, name)}
        gone = set(getattr(wish, name)) - kept
        return tuple(entry for entry in getattr(problem, name) if entry not in gone)

    lists = {name: left(name) for name in ("pins", "together", "apart", "forbidden")}
    loose = replace(problem, **lists)  # type: ignore[arg-type]
    if wish.max_stages is not None:
        counts = [n for one in others if (n := one.max_stages) is not None]
        empty = any(n < len(problem.stages) for n in counts)
        loose = replace(loose, max_stages=min(counts, default=None), allow_empty=empty)
    return None if loose == problem else replace(loose, wishes=tuple(others))


def relax(
    problem: PartitionProblem,
    stage_of: Sequence[int],
    wanted: Sequence[Relaxation],
    *,
    time_limit: float,
    seed: int = 0,
) -> tuple[Relaxed, ...]:
    """Solve each in turn; those for which no time is left are "not tried".

    Args:
        time_limit: wall seconds for all; a dynamic program that was begun is not interrupted.
    """
    end = time.monotonic() + time_limit
    found = []
    for i, one in enumerate(wanted):
        left = end - time.monotonic()
        if one.problem is None or left <= 0:
            reason = one.reason or "no time was left"
            found.append(Relaxed(one.kind, one.text, "not tried", reason=reason))
        else:
            found.append(_solved(one, one.problem, stage_of, left / (len(wanted) - i), seed))
    return tuple(found)


def _solved(
    one: Relaxation, problem: PartitionProblem, stage_of: Sequence[int], seconds: float, seed: int
) -> Relaxed:
    here = None if violations(problem, stage_of) else measure(problem, stage_of)
    try:
        best, certificate = partition(problem, time_limit=seconds, seed=seed)
    except InfeasibleError:
        # A deeper warm-up may not fit, or nothing was found in time.
        if here is None:
            return Relaxed(one.kind, one.text, "not tried", reason="no plan of it was found")
        return Relaxed(one.kind, one.text, "feasible", here.objective, 0.0, here.stage_of)
    bound = certificate.bound_seconds
    if here is not None and here.objective <= best.objective:
        best = here
    optimal = math.isclose(best.objective, bound, rel_tol=1e-5) or best.objective <= bound
    status: Literal["optimal", "feasible"] = "optimal" if optimal else "feasible"
    return Relaxed(one.kind, one.text, status, best.objective, bound, best.stage_of)


def _stages(
    problem: PartitionProblem, change: Callable[[StageLimits], StageLimits]
) -> PartitionProblem:
    return replace(problem, stages=tuple(map(change, problem.stages)))


def _costs(stage: StageLimits) -> bool:
    return math.isfinite(stage.bytes_per_second) or stage.latency_seconds > 0


def _unlimited(stage: StageLimits) -> StageLimits:
    return replace(stage, memory_bytes=None)


def _roomier(stage: StageLimits) -> StageLimits:
    limit = stage.memory_bytes
    return replace(stage, memory_bytes=None if limit is None else int(limit * MORE_MEMORY))


def _free(stage: StageLimits) -> StageLimits:
    return replace(stage, bytes_per_second=math.inf, latency_seconds=0.0)


def _faster(stage: StageLimits) -> StageLimits:
    return replace(
        stage,
        bytes_per_second=stage.bytes_per_second * FASTER,
        latency_seconds=stage.latency_seconds / FASTER,
    )
