"""The smallest relaxations that make an infeasible problem feasible, each with its figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np

from pdcompile.passes.partition.conflict import Conflict, Oracle
from pdcompile.passes.partition.dynamic_program import Cost, OutOfTimeError
from pdcompile.passes.partition.limits import Limit, keeping, limits_of, listed
from pdcompile.passes.partition.segments import Matrix, Segments
from pdcompile.plan.evaluate import memory
from pdcompile.problem import PartitionProblem
from pdcompile.schedule.registry import DEFAULT
from pdcompile.units import format_bytes

NAMED = 3  # stages for which memory alone is tried
CLOSE = 1e-3  # relative: how near the least memory a bisection goes


def remedies_of(
    problem: PartitionProblem, found: Conflict, oracle: Oracle
) -> tuple[list[str], list[str]]:
    """In words, the least that would help: each of them alone is enough.

    Memory of one stage alone and of all stages alike; leaving out wishes, fewer stages.
    """
    texts: list[str] = []
    others: list[str] = []
    try:
        stages = [limit.stage for limit in found.limits if limit.stage is not None]
        for s in stages[:NAMED]:
            if text := _alone(problem, s, oracle):
                texts.append(text)
        if stages and len(_limited(problem)) > 1 and (text := _alike(problem, oracle)):
            texts.append(text)
        others += _left_out(problem, found, oracle)
    except OutOfTimeError:
        pass
    return texts, others


def cheaper(problem: PartitionProblem, oracle: Oracle) -> list[str]:
    """Ways to train that need less memory: those that are enough alone, else all together."""
    rule = problem.memory
    changes: list[tuple[str, Callable[[PartitionProblem], PartitionProblem]]] = []
    if rule.versions > 1:
        changes.append(
            (f'a schedule with one weight version ("{DEFAULT}")', lambda p: _ruled(p, versions=1))
        )
    if rule.optimizer_factor > 0:
        changes.append(
            ("an optimizer without state (plain SGD)", lambda p: _ruled(p, optimizer_factor=0.0))
        )
    if any(item.saved_bytes or item.workspace_bytes for item in problem.items):
        changes.append(("microbatches of half the size", _halved))
    try:
        alone = [text for text, change in changes if _feasible(change(problem), oracle)]
        if alone or len(changes) < 2:
            return alone
        for _, change in changes:
            problem = change(problem)
        if _feasible(problem, oracle):
            return [" together with ".join(text for text, _ in changes)]
    except OutOfTimeError:
        pass
    return []


def _feasible(problem: PartitionProblem, oracle: Oracle) -> bool:
    """With other sizes than the oracle has worked with, which it keeps."""
    return Oracle(oracle.budget, oracle.seed).feasible(problem)


def _ruled(problem: PartitionProblem, **changes: Any) -> PartitionProblem:
    return replace(problem, memory=replace(problem.memory, **changes))


def _halved(problem: PartitionProblem) -> PartitionProblem:
    """With microbatches of half as many samples; what is sent is left as it is."""
    items = tuple(
        replace(item, saved_bytes=item.saved_bytes // 2, workspace_bytes=item.workspace_bytes // 2)
        for item in problem.items
    )
    return replace(problem, items=items)


def _alone(problem: PartitionProblem, stage: int, oracle: Oracle) -> str | None:
    """The least memory of one stage, the others being as they are."""
    free = with_memory(problem, {stage: None})
    stage_of, proved = oracle.least(free, memory_cost({stage}))
    if stage_of is None:
        return None
    need = memory(problem, stage_of)[stage]
    return f"{size(need)} of memory on stage {stage}" + ("" if proved else " (fewer may do)")


def _alike(problem: PartitionProblem, oracle: Oracle) -> str | None:
    """The least memory that is enough when every stage with a limit has as much."""
    limited = _limited(problem)
    least, enough, proved = least_memory(problem, oracle)
    if enough is None:
        return None
    where = "every stage" if len(limited) == len(problem.stages) else "every stage with a limit"
    text = f"{size(enough)} of memory on {where}"
    if not proved:
        text += f" (less than {size(least)} cannot do)" if least else " (fewer may do)"
    return text


def least_memory(problem: PartitionProblem, oracle: Oracle) -> tuple[int, int | None, bool]:
    """(bytes below which nothing fits, bytes that are enough, whether they are the least).

    When every stage that has a limit has the same.
    """
    limited = _limited(problem)
    free = with_memory(problem, dict.fromkeys(limited))

    def largest(stage_of: tuple[int, ...]) -> int:
        needed = memory(problem, stage_of)
        return max(needed[s] for s in limited)

    stage_of, proved = oracle.least(free, memory_cost(limited))
    if stage_of is None and not proved:
        stage_of = oracle.assignment(free)
    if stage_of is None:
        return 0, None, True
    enough = largest(stage_of)
    if proved:
        return enough, enough, True
    least = 0
    try:
        while enough - least > CLOSE * enough:
            middle = (least + enough) // 2
            stage_of = oracle.assignment(with_memory(problem, dict.fromkeys(limited, middle)))
            if stage_of is None:
                least = middle + 1
            else:
                enough = largest(stage_of)
    except OutOfTimeError:
        pass
    return least, enough, least == enough


def _left_out(problem: PartitionProblem, found: Conflict, oracle: Oracle) -> list[str]:
    """Limits other than memory whose absence is enough: one of them, or the fewest together."""
    limits = limits_of(problem)
    texts = []
    for limit in found.limits:
        if limit.stage is None:
            rest = [other for other in limits if other != limit]
            stage_of = oracle.assignment(keeping(problem, rest))
            if stage_of is not None:
                texts.append(_without(limit, stage_of))
    if texts:
        return texts
    together = [one for one in found.helps if all(limit.stage is None for limit in one)]
    return [f"leave out {listed(together[0])}"] if together else []


def _without(limit: Limit, stage_of: tuple[int, ...]) -> str:
    if limit.empty:
        used = len(set(stage_of))
        return f"ask for fewer stages ({used} of them can hold everything)"
    return f"leave out {limit.text}"


def memory_cost(stages: Collection[int]) -> Callable[[Segments], Cost]:
    """Bytes of these stages, nothing of the others."""

    def of(segments: Segments) -> Cost:
        def cost(stage: int) -> Matrix:
            if stage in stages:
                return segments.memory(stage)
            return np.zeros(segments.subset.shape)

        return cost

    return of


def with_memory(problem: PartitionProblem, limits: dict[int, int | None]) -> PartitionProblem:
    """The problem with other memory limits on some stages."""
    return replace(
        problem,
        stages=tuple(
            replace(stage, memory_bytes=limits.get(s, stage.memory_bytes))
            for s, stage in enumerate(problem.stages)
        ),
    )


def size(num_bytes: int) -> str:
    """To be pasted, and with three digits to be read."""
    exact = f"{num_bytes} bytes"
    return exact if num_bytes < 10_000 else f"{exact} ({format_bytes(math.ceil(num_bytes))})"


def _limited(problem: PartitionProblem) -> list[int]:
    return [s for s, stage in enumerate(problem.stages) if stage.memory_bytes is not None]
