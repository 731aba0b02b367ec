"""Explain: what a plan and its embedded problem say about why the stages are what they are."""

from __future__ import annotations

import math
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path

from pdcompile.cluster import Cluster
from pdcompile.errors import PdcompileError
from pdcompile.passes.partition import partition
from pdcompile.passes.partition.alternatives import (
    Boundary,
    Breaks,
    Relaxed,
    StageUse,
    bottleneck,
    boundaries,
    broken,
    chained,
    critical,
    relax,
    relaxations,
    seconds_of,
    stage_uses,
)
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.planning.graph_free import (
    MOST_INSTRUCTIONS,
    ledgers_of,
    plan_of,
    straight_plan_of,
)
from pdcompile.passes.planning.memory_limits import excess, planned_within
from pdcompile.passes.planning.search.freed_choices import Freed, freed, more_microbatches
from pdcompile.passes.planning.solved_problem import placed, setting_of
from pdcompile.passes.schedules import rule_of, warmup
from pdcompile.plan import Certificate, Plan, Training
from pdcompile.plan.embedded import assignment, problem_of
from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem import MemoryRule, Partition, PartitionProblem
from pdcompile.problem.constraints import KINDS
from pdcompile.units import format_bytes

DEFAULT_SECONDS = 10.0
FREEING = 0.3  # of the time, for choices that were fixed


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything in seconds of the objective: a step with a flush, else a microbatch.

    `transfer_seconds` are those of links on the critical path, which is known of a flush and of
    stages with a rank each (`chained`).  `edited`: the plan's certificate claims another objective
    than its stages now have.  `fastest_seconds`: of the fastest plan found under these limits,
    which this one may be preferred to for its cuts.
    """

    objective_seconds: float
    fastest_seconds: float
    flush: bool
    chained: bool
    num_microbatches: int
    bottleneck: int
    stages: tuple[StageUse, ...]
    transfer_seconds: float
    boundaries: tuple[Boundary, ...]
    relaxed: tuple[Relaxed, ...]
    broken: tuple[str, ...] = ()  # limits that the stages break as they are
    edited: bool = False
    names: tuple[str, ...] = ()  # of the items
    seconds: float = 0.0  # wall time of explaining
    freed: tuple[Freed, ...] = ()  # of the choices that were fixed, those that cost much
    more_than_cut: bool = False  # the planner chose more than a cut, and no limit is eased here
    commands: tuple[str, ...] = ()  # that plan again, each with a limit less


def explain(
    plan: Plan, *, time_limit: float | None = None, where: str = "plan.json"
) -> Explanation:
    """Measure the plan's stages on its problem, its neighbours, and the problem with less limits.

    Args:
        time_limit: wall seconds for looser limits, which are solved anew, each with its share of
            what is left, and for choices that were fixed; None: 10.

    Raises:
        PlanError: the plan holds no problem, or its stages tear an item apart.
    """
    begin = time.monotonic()
    problem, found = problem_of(plan, where), placed(plan, where)
    uses, objective = stage_uses(found), seconds_of(found)
    claimed = plan.certificate.objective_seconds
    edited = not math.isclose(objective, claimed, rel_tol=1e-6, abs_tol=1e-300)
    limit = DEFAULT_SECONDS if time_limit is None else time_limit
    cluster = Cluster.from_toml(plan.cluster, where=f"{where}: cluster")
    costs_much = (
        freed(plan, found, cluster, Budget(FREEING * limit)),
        more_microbatches(plan, found),
    ) if limit > 0 else ()  # fmt: skip
    breaks = _by_ledger(plan, found)
    return Explanation(
        objective_seconds=objective,
        fastest_seconds=objective if edited else plan.certificate.fastest_seconds or objective,
        flush=found.deployment.flush,
        chained=chained(found),
        num_microbatches=found.m,
        bottleneck=bottleneck(uses),
        stages=uses if edited else with_ledgers(plan, uses),
        transfer_seconds=critical(found)[1] if chained(found) else 0.0,
        boundaries=boundaries(found, breaks, uses),
        relaxed=() if found.placed else _relaxed(
            plan, found, cluster, limit - (time.monotonic() - begin)
        ),
        broken=tuple(broken(found)),
        edited=edited,
        names=tuple(item.name for item in problem.items),
        seconds=time.monotonic() - begin,
        freed=tuple(one for one in costs_much if one is not None),
        more_than_cut=found.placed,
        commands=_commands(plan, where) if found.placed else (),
    )  # fmt: skip


def _relaxed(
    plan: Plan, found: Evaluation, cluster: Cluster, time_limit: float
) -> tuple[Relaxed, ...]:
    """A straight plan's problem with each limit eased, and memory kept as `whatif` keeps it."""
    deeper, warm = _deeper(found.problem, plan.training) or (None, plan.training)

    def planned(problem: PartitionProblem, stage_of: tuple[int, ...], claim: Certificate) -> Plan:
        training = warm if problem.memory == deeper else plan.training
        return straight_plan_of(problem, stage_of, claim, training, cluster, plan)

    def breaks(one: Evaluation) -> list[str]:
        if (wrong := broken(one)) or not any(one.deployment.limits):
            return wrong
        own = planned(one.problem, tuple(one.stage_of), plan.certificate)
        over = excess(one.problem, own) if own.forecast is not None else {}
        return [f"stage {s} exceeds its memory by {format_bytes(n)}" for s, n in over.items()]

    def solve(
        problem: PartitionProblem, *, time_limit: float, seed: int
    ) -> tuple[Partition, Certificate]:
        if all(stage.memory_bytes is None for stage in problem.stages):
            return partition(problem, time_limit=time_limit, seed=seed)
        end = time.monotonic() + time_limit

        def once(limited: PartitionProblem) -> tuple[Plan, Partition]:
            left = max(0.0, end - time.monotonic())
            best, claim = partition(limited, time_limit=left, seed=seed)
            return planned(problem, best.stage_of, claim), best

        best = planned_within(problem, once)
        return Evaluation(problem, assignment(best)).partition(), best.certificate

    return relax(
        tuple(relaxations(found, deeper)),
        breaks, solve, time_limit=time_limit, seed=plan.training.seed,
    )  # fmt: skip


def _commands(plan: Plan, where: str) -> tuple[str, ...]:
    """The command that made the plan without each of its limits, recomputation among them."""
    limits = {"--memory", "--recompute", *(f"--{name.replace('_', '-')}" for name in KINDS)}
    file = Path(where)
    again = ["-o", str(file.with_name(f"{file.stem}.again.json"))]
    return tuple(
        shlex.join(["pdcompile", "plan", *plan.command[:i], *plan.command[i + 1 :], *again])
        for i, word in enumerate(plan.command)
        if i and word.partition("=")[0] in limits
    )


def _by_ledger(plan: Plan, found: Evaluation) -> Breaks:
    """`broken`, and memory by how much the ledger differs from that of the plan itself."""
    forecast, limits = plan.forecast, [stage.memory_bytes for stage in problem_of(plan).stages]
    work = 2 * len(plan.stages) * plan.training.num_microbatches
    if forecast is None or not any(limits) or work > MOST_INSTRUCTIONS:
        return broken

    def estimated(one: Evaluation) -> list[int]:
        return [own.total_bytes for own in ledgers_of(plan_of(one, plan.training))]

    known = [own.total_bytes for own in forecast.ledgers]
    known = [there - own for there, own in zip(known, estimated(found), strict=True)]

    def breaks(one: Evaluation) -> list[str]:
        wrong, on = broken(one), one.deployment
        if wrong or not any(on.limits):
            return wrong
        held = [there + own for there, own in zip(known, estimated(one), strict=True)]
        for s, (ranks, limit) in enumerate(zip(on.ranks, on.limits, strict=True)):
            over = max(held[rank] for rank in ranks) - (limit or math.inf)
            if over > 0:
                more = format_bytes(int(over))
                wrong.append(f"stage {s} would need {more} more memory, by its schedule's ledger")
        return wrong

    return breaks


def with_ledgers(plan: Plan, uses: tuple[StageUse, ...]) -> tuple[StageUse, ...]:
    """The stages with the bytes of the schedule's ledger, where that exceeds the formula."""
    if plan.forecast is None or len(plan.forecast.ledgers) != plan.num_columns:
        return uses
    found = []
    for use, stage in zip(uses, plan.stages, strict=True):
        totals = [plan.forecast.ledgers[rank].total_bytes for rank in stage.ranks]
        found.append(replace(use, memory_bytes=max([use.memory_bytes, *totals])))
    return tuple(found)


def _deeper(problem: PartitionProblem, training: Training) -> tuple[MemoryRule, Training] | None:
    """The schedule's memory rule with one more microbatch in flight a boundary, where it can."""
    try:
        depths = warmup(training.schedule, len(problem.stages), problem.num_microbatches, extra=1)
        rule = rule_of(setting_of(training), depths)
    except PdcompileError:
        return None  # a schedule that has no deeper form
    more = sum(rule.in_flight) > sum(problem.memory.in_flight)
    return (rule, replace(training, warmup=depths)) if more else None
