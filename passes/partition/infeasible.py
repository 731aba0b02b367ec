"""Why no assignment exists, in words, with the smallest relaxations that would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np

from pdcompile.errors import CostError, InfeasibleError, NotFoundError
from pdcompile.passes.partition.budget import Budget, OutOfTimeError
from pdcompile.passes.partition.conflict import (
    Conflict,
    Limit,
    Oracle,
    conflict,
    keeping,
    limits_of,
    listed,
)
from pdcompile.passes.partition.dynamic_program import Cost
from pdcompile.passes.partition.model import Model, build
from pdcompile.passes.partition.segments import Matrix, Segments
from pdcompile.plan.embedded import unusable_numbers
from pdcompile.plan.evaluate import memory
from pdcompile.problem import PartitionProblem
from pdcompile.schedule.registry import DEFAULT
from pdcompile.units import format_bytes, three_digits

EXPLAIN_SECONDS = 5.0


def validate(problem: PartitionProblem) -> None:
    """Refuse what no solver can work on.

    Raises:
        CostError: a time or size is negative or not finite, or a link or device has no speed.
        InfeasibleError: no items or no stages.
    """
    if not problem.stages:
        raise InfeasibleError("a pipeline of 0 stages", remedy="ask for 1 or more stages")
    if not problem.items:
        raise InfeasibleError("the graph has no ops to place", remedy="give a model that computes")
    for name in ("items", "traffic", "shared", "stages", "memory"):
        for path, message, remedy in unusable_numbers(getattr(problem, name), f"problem.{name}"):
            raise CostError(message, where=path, remedy=remedy)


def refuse_contradictions(problem: PartitionProblem) -> None:
    """Raise InfeasibleError when constraints contradict each other whatever the memory is.

    Only what shows without a search; `partition` finds the rest.
    """
    try:
        build(problem)
    except InfeasibleError as contradiction:
        raise no_assignment(problem, Budget(EXPLAIN_SECONDS), 0, contradiction) from None


def no_assignment(
    problem: PartitionProblem,
    budget: Budget,
    seed: int = 0,
    contradiction: InfeasibleError | None = None,
    *,
    proved: bool = True,
) -> InfeasibleError:
    """The error to raise: what does not fit, which limits conflict, and the least that would help.

    Takes at most `EXPLAIN_SECONDS`, and says less when they are over.

    Args:
        contradiction: between constraints, where there is one.
        proved: a search proved that there is no assignment; else only what shows without a search
            does, and a NotFoundError says that time was up.
    """
    reason = contradiction or _simple_reason(problem)
    if reason is None and not proved:
        return NotFoundError(
            "no plan was found within the time limit, and it is not proved that there is none",
            remedy="raise time_limit",
        )
    seconds = min(EXPLAIN_SECONDS, max(1.0, budget.left))
    oracle = Oracle(Budget(seconds, within=budget), seed)
    found = conflict(problem, oracle)
    memory, remedies = remedies_of(problem, found, oracle)
    message = _in_words(build(problem), found) if reason is None else reason.message
    if contradiction is None and any(limit.stage is not None for limit in found.limits):
        remedies += cheaper(problem, oracle)
    named = listed(found.limits)
    if found.smallest:
        message += f"; the smallest conflict: {named}"
    elif found.minimal:
        message += f"; in conflict, and each needed for it: {named}"
    else:
        message += f"; which of these conflict was not found in time: {named}"
    known = memory or remedies
    if reason is not None and reason.remedy and (not known or reason is not contradiction):
        remedies = [reason.remedy, *remedies]
    error = InfeasibleError(
        message,
        where=None if reason is None else reason.where,
        remedy=", or ".join([*memory, *remedies]) or "drop one of these, or ask for fewer stages",
    )
    error.others = tuple(remedies)
    return error


def _simple_reason(problem: PartitionProblem) -> InfeasibleError | None:
    """Why no assignment fits, where that shows without a search."""
    model = build(problem)
    reasons = (_too_many_stages, _item_too_large, _sum_too_large)
    return next((error for why in reasons if (error := why(model))), None)


def _too_many_stages(model: Model) -> InfeasibleError | None:
    n, count = model.num_groups, model.num_stages
    if n >= count or model.problem.allow_empty:
        return None
    return InfeasibleError(
        f"{count} stages for {n} items that can be separated",
        remedy=f"ask for at most {n} stages (replicas='any' gives them several devices)",
    )


def _alone(model: Model, group: int, stage: int) -> int:
    """Bytes that a group needs on a stage, alone."""
    copies = sum(
        model.held_bytes(copy, stage)
        + (model.updated_bytes(copy, stage) if copy.ends == (group,) else 0)
        for copy in model.copies
        if group in copy.ends
    )
    return (
        math.ceil(model.fixed_bytes(group, stage) + copies)
        + model.saved(stage) * model.saved_bytes[group]
        + model.workspace_bytes[group]
    )


def _item_too_large(model: Model) -> InfeasibleError | None:
    problem = model.problem
    for v in range(model.num_groups):
        limits: list[tuple[int, int]] = []  # (bytes short, stage)
        for s in range(model.lowest[v], model.highest[v] + 1):
            limit = problem.stages[s].memory_bytes
            limits.append((0 if limit is None else _alone(model, v, s) - limit, s))
        short, stage = min(limits)
        if short <= 0:
            continue
        need, limit = _alone(model, v, stage), problem.stages[stage].memory_bytes
        largest = max(model.members[v], key=lambda i: problem.items[i].parameter_bytes)
        name = problem.items[largest].name
        extra = len(model.members[v]) - 1
        kept = f" and {extra} items kept with it" if extra else ""
        return InfeasibleError(
            f"stage memory {format_bytes(limit or 0)} cannot hold {name!r}{kept}: "
            f"{format_bytes(need)} ({_rule(model)}, {model.saved(stage)} in flight)",
            where=f"stage {stage}",
        )
    return None


def _sum_too_large(model: Model) -> InfeasibleError | None:
    limits = [stage.memory_bytes for stage in model.problem.stages]
    if any(limit is None for limit in limits):
        return None
    total = sum(limit for limit in limits if limit is not None)
    stages = range(model.num_stages)
    least = min(model.saved(s) for s in stages)
    need = min(map(model.all_fixed_bytes, stages)) + least * sum(model.saved_bytes)
    if need <= total:
        return None
    return InfeasibleError(
        f"all {len(limits)} stages together have {format_bytes(total)} of memory, and the model "
        f"needs {format_bytes(need)} ({_rule(model)})",
    )


def _in_words(model: Model, found: Conflict) -> str:
    """When nothing simpler explains it."""
    asked = any(limit.wish is not None for limit in found.limits)
    memory = any(limit.stage is not None for limit in found.limits)
    if memory and not asked:
        return (
            "the model fits into the memory of all stages in sum, but not cut into "
            f"{model.num_stages} pieces along the flow of data ({_rule(model)})"
        )
    if not memory:
        return "the constraints contradict each other or the flow of data"
    return f"memory and constraints contradict each other ({_rule(model)})"


def _rule(model: Model) -> str:
    rule = model.problem.memory
    versions = _counted(rule.versions, "weight version")
    buffers = _counted(rule.gradient_buffers, "gradient")
    optimizer = f"optimizer {rule.optimizer_factor:g} times the weights"
    return f"by the planner's formula: {versions}, {buffers}, {optimizer}"


def _counted(count: int | tuple[int, ...], what: str) -> str:
    """``1 gradient``, ``2 gradients``, ``3, 2, 1 gradients`` by stage."""
    if isinstance(count, tuple):
        return f"{', '.join(map(str, count))} {what}s by stage"
    return f"{count} {what}{'' if count == 1 else 's'}"


NAMED = 3  # stages for which memory alone is tried
CLOSE = 1e-3  # relative: how near the least memory a bisection goes


def remedies_of(
    problem: PartitionProblem, found: Conflict, oracle: Oracle
) -> tuple[list[str], list[str]]:
    """The least that would help, in words: each of them alone is enough.

    Memory of one stage alone and of all stages alike; leaving out wishes, fewer stages.
    """
    texts: list[str] = []
    others: list[str] = []
    try:
        stages = [limit.stage for limit in found.limits if limit.stage is not None]
        for s in stages[:NAMED]:
            if text := _of_one_stage(problem, s, oracle):
                texts.append(text)
        if stages and len(_limited(problem)) > 1 and (text := _of_all_stages(problem, oracle)):
            texts.append(text)
        others += _left_out(problem, found, oracle)
    except OutOfTimeError:
        pass
    return texts, others


def cheaper(problem: PartitionProblem, oracle: Oracle) -> list[str]:
    """Ways to train that need less memory: those that are enough alone, else all together."""
    rule = problem.memory
    changes: list[tuple[str, Callable[[PartitionProblem], PartitionProblem]]] = []
    if any(rule.versions_of(s) > 1 for s in range(len(problem.stages))):
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
    """True if it has a plan, with other sizes than the oracle has worked with, which it keeps."""
    return Oracle(oracle.budget, oracle.seed).feasible(problem)


def _ruled(problem: PartitionProblem, **changes: Any) -> PartitionProblem:
    return replace(problem, memory=replace(problem.memory, **changes))


def _halved(problem: PartitionProblem) -> PartitionProblem:
    """The problem with microbatches of half as many samples; what is sent is left as it is."""
    items = tuple(
        replace(item, saved_bytes=item.saved_bytes // 2, workspace_bytes=item.workspace_bytes // 2)
        for item in problem.items
    )
    return replace(problem, items=items)


def _of_one_stage(problem: PartitionProblem, stage: int, oracle: Oracle) -> str | None:
    """The least memory of one stage, the others being as they are."""
    free = problem.with_memory({stage: None})
    stage_of, proved = oracle.least(free, memory_cost({stage}))
    if stage_of is None:
        return None
    need = memory(problem, stage_of)[stage]
    text = f"{three_digits(need)[1]} of memory on stage {stage}"
    return text if proved else f"{text} (fewer may do)"


def _of_all_stages(problem: PartitionProblem, oracle: Oracle) -> str | None:
    """The least memory that is enough when every stage with a limit has as much."""
    limited = _limited(problem)
    least, sufficient, proved = least_memory(problem, oracle)
    if sufficient is None:
        return None
    where = "every stage" if len(limited) == len(problem.stages) else "every stage with a limit"
    text = f"{three_digits(sufficient)[1]} of memory on {where}"
    if not proved:
        never = three_digits(least, up=False)[1]
        text += f" (less than {never} cannot do)" if least else " (fewer may do)"
    return text


def least_memory(problem: PartitionProblem, oracle: Oracle) -> tuple[int, int | None, bool]:
    """(bytes below which nothing fits, bytes that are enough, whether they are the least).

    When every stage that has a limit has the same.
    """
    limited = _limited(problem)
    free = problem.with_memory(dict.fromkeys(limited))

    def largest(stage_of: tuple[int, ...]) -> int:
        needed = memory(problem, stage_of)
        return max(needed[s] for s in limited)

    stage_of, proved = oracle.least(free, memory_cost(limited))
    if stage_of is None and not proved:
        stage_of = oracle.assignment(free)
    if stage_of is None:
        return 0, None, True
    sufficient = largest(stage_of)
    if proved:
        return sufficient, sufficient, True
    least = 0
    try:
        while sufficient - least > CLOSE * sufficient:
            middle = (least + sufficient) // 2
            stage_of = oracle.assignment(problem.with_memory(dict.fromkeys(limited, middle)))
            if stage_of is None:
                least = middle + 1
            else:
                sufficient = largest(stage_of)
    except OutOfTimeError:
        pass
    return least, sufficient, least == sufficient


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


def _limited(problem: PartitionProblem) -> list[int]:
    return [s for s, stage in enumerate(problem.stages) if stage.memory_bytes is not None]
