"""Explain: what a plan and its embedded problem say about why the stages are what they are."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from pdcompile.errors import PdcompileError
from pdcompile.passes.partition.alternatives import (
    Boundary,
    Relaxation,
    Relaxed,
    StageUse,
    bottleneck,
    boundaries,
    broken,
    critical,
    relax,
    relaxations,
    stage_uses,
)
from pdcompile.passes.schedules import memory_rule, warmup
from pdcompile.plan import Plan, Training
from pdcompile.plan.embedded import assignment, problem_of, refuse_replicas
from pdcompile.plan.evaluate import measure
from pdcompile.problem import MemoryRule, PartitionProblem

DEFAULT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything in seconds of the objective: a step with a flush, else a microbatch.

    `transfer_seconds` are those of links on the critical path (0 without a flush).  `edited`:
    the plan's certificate claims another objective than its stages now have.
    """

    objective_seconds: float
    flush: bool
    bottleneck: int
    stages: tuple[StageUse, ...]
    transfer_seconds: float
    boundaries: tuple[Boundary, ...]
    relaxed: tuple[Relaxed, ...]
    broken: tuple[str, ...] = ()  # limits that the stages break as they are
    edited: bool = False
    names: tuple[str, ...] = ()  # of the items
    seconds: float = 0.0  # wall time of explaining


def explain(
    plan: Plan, *, time_limit: float | None = None, where: str = "plan.json"
) -> Explanation:
    """Measure the plan's stages on its problem, its neighbours, and the problem with less limits.

    Args:
        time_limit: wall seconds for looser limits, which are solved anew; None: 10.  Where the
            plan itself took the planner longer, none is tried.

    Raises:
        PlanError: the plan holds no problem, its stages tear an item apart, are replicated or
            recompute.
    """
    begin = time.monotonic()
    refuse_replicas(plan, where)
    problem = problem_of(plan, where)
    stage_of = assignment(plan, where)
    uses = stage_uses(problem, stage_of)
    objective = measure(problem, stage_of).objective
    claimed = plan.certificate.objective_seconds
    edited = not math.isclose(objective, claimed, rel_tol=1e-6, abs_tol=1e-300)
    flush = problem.objective == "flush"
    limit = DEFAULT_SECONDS if time_limit is None else time_limit
    wanted = tuple(relaxations(problem, _deeper(problem, plan.training)))
    if plan.certificate.seconds > limit:
        wanted = tuple(_too_long(one, plan.certificate.seconds) for one in wanted)
    return Explanation(
        objective_seconds=objective,
        flush=flush,
        bottleneck=bottleneck(problem, uses),
        stages=uses if edited else with_ledgers(plan, uses),
        transfer_seconds=critical(problem, stage_of)[1] if flush else 0.0,
        boundaries=boundaries(problem, stage_of),
        relaxed=relax(problem, stage_of, wanted, time_limit=limit, seed=plan.training.seed),
        broken=tuple(broken(problem, stage_of)),
        edited=edited,
        names=tuple(item.name for item in problem.items),
        seconds=time.monotonic() - begin,
    )


def with_ledgers(plan: Plan, uses: tuple[StageUse, ...]) -> tuple[StageUse, ...]:
    """The stages with the bytes of the schedule's ledger, where that exceeds the formula."""
    if plan.forecast is None or len(plan.forecast.ledgers) != plan.num_columns:
        return uses
    found = []
    for use, stage in zip(uses, plan.stages, strict=True):
        totals = [plan.forecast.ledgers[rank].total_bytes for rank in stage.ranks]
        found.append(replace(use, memory_bytes=max([use.memory_bytes, *totals])))
    return tuple(found)


def _deeper(problem: PartitionProblem, training: Training) -> MemoryRule | None:
    """The schedule's memory rule with one more microbatch in flight a boundary, where it can."""
    try:
        depths = warmup(training.schedule, len(problem.stages), problem.num_microbatches, extra=1)
        rule = memory_rule(
            training.schedule,
            depths,
            problem.num_microbatches,
            clipping=training.max_grad_norm is not None,
            optimizer_factor=problem.memory.optimizer_factor,
        )
    except PdcompileError:
        return None  # a schedule that has no deeper form
    return rule if sum(rule.in_flight) > sum(problem.memory.in_flight) else None


def _too_long(one: Relaxation, seconds: float) -> Relaxation:
    reason = f"planning took {seconds:.0f} s; --time-limit {math.ceil(2 * seconds)} tries it"
    return replace(one, problem=None, reason=one.reason or reason)
