"""Why no assignment exists, in words, with the least that would help."""

from __future__ import annotations

import math
from itertools import pairwise

from pdcompile.errors import CostError, InfeasibleError, NotFoundError, PlanError
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.conflict import Conflict, Oracle, conflict
from pdcompile.passes.partition.limits import listed
from pdcompile.passes.partition.model import Model, build
from pdcompile.passes.partition.remedies import cheaper, remedies_of
from pdcompile.problem import PartitionProblem
from pdcompile.units import format_bytes

EXPLAIN_SECONDS = 5.0


def validate(problem: PartitionProblem) -> None:
    """Refuse what no solver can work on.

    Raises:
        CostError: a time or size is negative or not finite, or a link or device has no speed.
        PlanError: an index does not exist, or microbatches in flight do not fit the stages.
        InfeasibleError: no items or no stages.
    """
    if not problem.stages:
        raise InfeasibleError("a pipeline of 0 stages", remedy="ask for 1 or more stages")
    if not problem.items:
        raise InfeasibleError("the graph has no ops to place", remedy="give a model that computes")
    for item in problem.items:
        for name in ("forward_seconds", "backward_seconds", "parameter_bytes", "trainable_bytes",
                     "saved_bytes", "workspace_bytes"):  # fmt: skip
            _check(getattr(item, name), f"{name} of {item.name!r}")
        if item.trainable_bytes > item.parameter_bytes:
            raise CostError(
                f"{item.name!r} has {item.trainable_bytes} trainable bytes of "
                f"{item.parameter_bytes} in all"
            )
    for value in problem.traffic:
        _check(value.forward_bytes, f"forward_bytes of {value.value!r}")
        _check(value.backward_bytes, f"backward_bytes of {value.value!r}")
    for parameter in problem.shared:
        _check(parameter.bytes, f"bytes of {parameter.fqn!r}")
    for s, stage in enumerate(problem.stages):
        _check(stage.latency_seconds, f"latency of stage {s}")
        if not (stage.speed > 0 and stage.bytes_per_second > 0 and math.isfinite(stage.speed)):
            raise CostError(
                f"stage {s} has speed {stage.speed!r} and {stage.bytes_per_second!r} bytes/s"
            )
    _check_indices(problem)
    in_flight = problem.memory.in_flight
    if in_flight and len(in_flight) != len(problem.stages):
        raise PlanError(f"{len(in_flight)} counts in flight for {len(problem.stages)} stages")
    if any(a < b for a, b in pairwise(in_flight)) or min(in_flight, default=1) < 1:
        raise PlanError(
            f"microbatches in flight {list(in_flight)} would deadlock",
            remedy="they must not increase from stage to stage, and be at least 1",
        )
    if problem.max_stages is not None and problem.max_stages < 1:
        raise PlanError(f"at most {problem.max_stages} stages")
    if problem.num_microbatches < 1:
        raise PlanError(f"{problem.num_microbatches} microbatches")


def _check(number: float, what: str) -> None:
    if not (math.isfinite(number) and number >= 0):
        raise CostError(f"{what} is {number!r}", remedy="give a finite number from 0")


def _check_indices(problem: PartitionProblem) -> None:
    n = len(problem.items)
    used = [i for t in problem.traffic for i in (t.producer, *t.consumers)]
    used += [i for pair in (*problem.order, *problem.apart) for i in pair]
    used += [i for group in problem.together for i in group]
    used += [i for i, _ in (*problem.pins, *problem.forbidden)]
    used += [i for parameter in problem.shared for i in parameter.items]
    for i in used:
        if not 0 <= i < n:
            raise PlanError(f"there is no item {i}: the problem has {n}")


def unknown(model: Model) -> InfeasibleError:
    """The error when time was up before there was a plan or a proof that there is none."""
    for reason in (_too_many_stages, _item_too_large, _sum_too_large):
        if error := reason(model):
            return error
    return NotFoundError(
        "no plan was found within the time limit, and it is not proved that there is none",
        remedy="raise time_limit",
    )


def refuse_contradictions(problem: PartitionProblem) -> None:
    """Raise InfeasibleError when constraints contradict each other whatever the memory is.

    Only what shows without a search; `partition` finds the rest.
    """
    try:
        build(problem)
    except InfeasibleError as contradiction:
        raise explain(problem, Budget(EXPLAIN_SECONDS), 0, contradiction) from None


def explain(
    problem: PartitionProblem,
    budget: Budget,
    seed: int = 0,
    contradiction: InfeasibleError | None = None,
) -> InfeasibleError:
    """The error to raise: why, which limits conflict, and the least that would help.

    Takes at most `EXPLAIN_SECONDS`, and says less when they are over.
    """
    seconds = min(EXPLAIN_SECONDS, max(1.0, budget.left))
    oracle = Oracle(Budget(seconds, within=budget), seed)
    found = conflict(problem, oracle)
    memory, remedies = remedies_of(problem, found, oracle)
    reason = contradiction
    message = "" if reason is None else reason.message
    if reason is None:
        model = build(problem)
        reasons = (_too_many_stages, _item_too_large, _sum_too_large)
        reason = next((error for why in reasons if (error := why(model))), None)
        message = _in_words(model, found) if reason is None else reason.message
        if any(limit.stage is not None for limit in found.limits):
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


def _too_many_stages(model: Model) -> InfeasibleError | None:
    n, count = model.num_groups, model.num_stages
    if n >= count or model.problem.allow_empty:
        return None
    return InfeasibleError(
        f"{count} stages for {n} items that can be separated",
        remedy=f"ask for at most {n} stages",
    )


def _alone(model: Model, group: int, stage: int) -> int:
    """Bytes that a group needs on a stage, alone."""
    copies = sum(
        copy.held_bytes + (copy.updated_bytes if copy.ends == (group,) else 0)
        for copy in model.copies
        if group in copy.ends
    )
    return (
        math.ceil(model.fixed_bytes[group] + copies)
        + model.in_flight(stage) * model.saved_bytes[group]
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
            f"{format_bytes(need)} ({_rule(model)}, {model.in_flight(stage)} in flight)",
            where=f"stage {stage}",
        )
    return None


def _sum_too_large(model: Model) -> InfeasibleError | None:
    limits = [stage.memory_bytes for stage in model.problem.stages]
    if any(limit is None for limit in limits):
        return None
    total = sum(limit for limit in limits if limit is not None)
    copies = sum(copy.held_bytes + copy.updated_bytes for copy in model.copies)
    least = min(model.in_flight(s) for s in range(model.num_stages))
    need = math.ceil(sum(model.fixed_bytes) + copies) + least * sum(model.saved_bytes)
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
    versions = "1 weight version" if rule.versions == 1 else f"{rule.versions} weight versions"
    buffers = "1 gradient" if rule.gradient_buffers == 1 else f"{rule.gradient_buffers} gradients"
    optimizer = f"optimizer {rule.optimizer_factor:g} times the weights"
    return f"by the planner's formula: {versions}, {buffers}, {optimizer}"
