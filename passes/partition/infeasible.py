"""Why no assignment exists, in words, with the least that would help."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pdcompile.errors import CostError, InfeasibleError, PlanError
from pdcompile.passes.partition import dynamic_program
from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.segments import Segments
from pdcompile.problem import PartitionProblem
from pdcompile.units import format_bytes


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
    used += [i for i, _ in problem.pins]
    used += [i for parameter in problem.shared for i in parameter.items]
    for i in used:
        if not 0 <= i < n:
            raise PlanError(f"there is no item {i}: the problem has {n}")


def explain(model: Model, segments: Segments, *, proved: bool) -> InfeasibleError:
    """The error to raise: simple reasons first, then how much memory would do."""
    for reason in (_too_many_stages, _item_too_large, _sum_too_large):
        if error := reason(model):
            return error
    if not proved:
        return InfeasibleError(
            "no plan was found within the time limit, and none was proved impossible",
            remedy="raise time_limit",
        )
    return _not_contiguously(model, segments)


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
    copies = sum(b for ends, b in model.copies if group in ends)
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
            remedy=f"give the device {need} bytes{_cheaper(model)}",
        )
    return None


def _sum_too_large(model: Model) -> InfeasibleError | None:
    limits = [stage.memory_bytes for stage in model.problem.stages]
    if any(limit is None for limit in limits):
        return None
    total = sum(limit for limit in limits if limit is not None)
    copies = sum(num_bytes for _, num_bytes in model.copies)
    least = min(model.in_flight(s) for s in range(model.num_stages))
    need = math.ceil(sum(model.fixed_bytes) + copies) + least * sum(model.saved_bytes)
    if need <= total:
        return None
    return InfeasibleError(
        f"all {len(limits)} stages together have {format_bytes(total)} of memory, and the model "
        f"needs {format_bytes(need)} ({_rule(model)})",
        remedy=f"{need} bytes in all, more stages{_cheaper(model)}",
    )


def _not_contiguously(model: Model, segments: Segments) -> InfeasibleError:
    free = replace(
        model.problem,
        stages=tuple(replace(stage, memory_bytes=None) for stage in model.problem.stages),
    )
    relaxed = replace(segments, model=replace(segments.model, problem=free))
    found = dynamic_program.solve(relaxed, dynamic_program.memory_cost(segments))
    if found is None or found[0] <= 1 or not model.limited:
        return InfeasibleError(
            "the constraints contradict each other: no assignment keeps precedence, pins, "
            f"together and apart with {model.num_stages} stages",
            remedy="drop a pin or an apart, or ask for fewer stages",
        )
    share = np.ceil(found[0] * 1000) / 1000
    return InfeasibleError(
        "the model fits into the memory of all stages in sum, but not cut into "
        f"{model.num_stages} pieces along the flow of data ({_rule(model)})",
        remedy=f"{share:g} times the memory would do{_cheaper(model)}",
    )


def _rule(model: Model) -> str:
    rule = model.problem.memory
    versions = "1 weight version" if rule.versions == 1 else f"{rule.versions} weight versions"
    buffers = "1 gradient" if rule.gradient_buffers == 1 else f"{rule.gradient_buffers} gradients"
    return f"{versions}, {buffers}, optimizer {rule.optimizer_factor:g} times the weights"


def _cheaper(model: Model) -> str:
    rule = model.problem.memory
    hints = []
    if rule.versions > 1:
        hints.append('a schedule with one weight version ("1f1b")')
    if rule.optimizer_factor >= 2:
        hints.append("an optimizer with less state")
    if max(rule.in_flight, default=1) > 1 and any(model.saved_bytes):
        hints.append("smaller microbatches")
    return "".join(f", or {hint}" for hint in hints)
