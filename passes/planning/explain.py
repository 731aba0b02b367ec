"""Explain: what a plan and its embedded problem say about why the stages are what they are."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pdcompile.cluster import Cluster
from pdcompile.errors import InfeasibleError, PdcompileError
from pdcompile.passes.partition.alternatives import (
    Boundary,
    Breaks,
    StageUse,
    bottleneck,
    boundaries,
    broken,
    chained,
    critical,
    seconds_of,
    stage_uses,
)
from pdcompile.passes.planning.graph_free import MOST_INSTRUCTIONS, ledgers_of, plan_of
from pdcompile.passes.planning.solved_problem import placed, setting_of
from pdcompile.passes.planning.whatif import solved_again
from pdcompile.passes.schedules import rule_of, warmup
from pdcompile.plan import Plan, Training
from pdcompile.plan.embedded import problem_of
from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem import OUTPUT_WISH, PartitionProblem, StageLimits, Wish
from pdcompile.problem.constraints import KINDS
from pdcompile.units import format_bytes

DEFAULT_SECONDS = 10.0
MORE_MEMORY = 1.1
FASTER = 2.0


@dataclass(frozen=True, slots=True)
class Relaxed:
    """The plan's problem with a limit less: what was found, and the bound of any plan then.

    `status` "not tried": time was up, or for the `reason` given.
    """

    text: str
    status: Literal["optimal", "feasible", "not tried"]
    objective_seconds: float | None = None
    bound_seconds: float | None = None
    reason: str = ""


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
    more_than_cut: bool = False  # the planner chose more than a cut, and no limit is eased here
    commands: tuple[str, ...] = ()  # that plan again, each with a limit less


def explain(
    plan: Plan, *, time_limit: float | None = None, where: str = "plan.json"
) -> Explanation:
    """Measure the plan's stages on its problem, its neighbours, and the problem with less limits.

    Args:
        time_limit: wall seconds for looser limits, which are solved anew, each with its share of
            what is left; None: 10.

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
        relaxed=() if found.placed else tuple(_relaxed(plan, found, cluster, limit)),
        broken=tuple(broken(found)),
        edited=edited,
        names=tuple(item.name for item in problem.items),
        seconds=time.monotonic() - begin,
        more_than_cut=found.placed,
        commands=_commands(plan, where) if found.placed else (),
    )


def _relaxed(
    plan: Plan, found: Evaluation, cluster: Cluster, time_limit: float
) -> Iterator[Relaxed]:
    """A straight plan's problem with each limit eased, solved again as `whatif` does."""
    end, wanted = time.monotonic() + time_limit, list(relaxations(found, plan.training))
    for i, (text, problem, training) in enumerate(wanted):
        left = end - time.monotonic()
        if problem is None or left <= 0:
            reason = "no time was left" if problem else "what it asks for holds without it"
            yield Relaxed(text, "not tried", reason=reason)
            continue
        share = left / (len(wanted) - i)
        try:
            answer = solved_again(plan, problem, training, cluster, time_limit=share)
        except InfeasibleError:  # a deeper warm-up may not fit, or nothing was found in time
            yield Relaxed(text, "not tried", reason="no plan of it was found")
            continue
        claim = answer.plan.certificate
        yield Relaxed(text, claim.status, claim.objective_seconds, claim.bound_seconds)


def relaxations(
    found: Evaluation, training: Training
) -> Iterator[tuple[str, PartitionProblem | None, Training]]:
    """Yields, by a limit in words, the problem without it (None: it is the same) and its training.

    Memory, links, a deeper warm-up, and each of the user's constraints; a limit that is not there
    is not eased.
    """
    problem = found.problem

    def eased(change: Callable[[StageLimits], StageLimits]) -> PartitionProblem:
        return replace(problem, stages=tuple(map(change, problem.stages)))

    if any(stage.memory_bytes is not None for stage in problem.stages):
        yield "no memory limit", eased(lambda one: replace(one, memory_bytes=None)), training
        text = f"{100 * (MORE_MEMORY - 1):.0f} % more memory on every device"
        yield text, eased(_roomier), training
    costs = any(
        math.isfinite(one.bytes_per_second) or one.latency_seconds for one in problem.stages
    )
    if costs and len(problem.stages) > 1:
        yield "links without cost", eased(lambda one: _faster(one, math.inf)), training
        yield f"links {FASTER:g} times as fast", eased(lambda one: _faster(one, FASTER)), training
    if deeper := _deeper(problem, training):
        text = f"{list(deeper[0].memory.in_flight)} microbatches in flight"
        yield f"a deeper warm-up (--warmup 1), {text}", *deeper
    for wish in problem.wishes:
        if wish.text != OUTPUT_WISH:
            yield f"without {wish.text}", without(problem, wish), training


def _roomier(stage: StageLimits) -> StageLimits:
    limit = stage.memory_bytes
    return replace(stage, memory_bytes=None if limit is None else int(limit * MORE_MEMORY))


def _faster(stage: StageLimits, factor: float) -> StageLimits:
    rate, latency = stage.bytes_per_second * factor, stage.latency_seconds / factor
    return replace(stage, bytes_per_second=rate, latency_seconds=latency)


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


def _deeper(
    problem: PartitionProblem, training: Training
) -> tuple[PartitionProblem, Training] | None:
    """With one more microbatch in flight a boundary; None where the schedule cannot."""
    try:
        depths = warmup(training.schedule, len(problem.stages), problem.num_microbatches, extra=1)
        rule = rule_of(setting_of(training), depths)
    except PdcompileError:
        return None  # a schedule that has no deeper form
    if sum(rule.in_flight) <= sum(problem.memory.in_flight):
        return None
    return replace(problem, memory=rule), replace(training, warmup=depths)
