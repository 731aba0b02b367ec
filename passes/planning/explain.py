"""Explain: what a plan and its embedded problem say about why the stages are what they are."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pdcompile.passes.partition.alternatives import (
    Boundary,
    StageUse,
    bottleneck,
    boundaries,
    broken,
    critical,
    seconds_of,
    stage_uses,
)
from pdcompile.passes.planning.solved_problem import placed
from pdcompile.plan import Plan
from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem.constraints import KINDS


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything in seconds of the objective: a step with a flush, else a microbatch.

    `transfer_seconds` are those of links on the critical path, which is known of a flush and of
    stages with a rank each (`chained`).  `edited`: the plan's certificate claims another objective
    than its stages now have.  `commands` tell what is gained without each limit.
    """

    objective_seconds: float
    flush: bool
    chained: bool
    num_microbatches: int
    bottleneck: int
    stages: tuple[StageUse, ...]
    transfer_seconds: float
    boundaries: tuple[Boundary, ...]
    broken: tuple[str, ...] = ()  # limits that the stages break as they are
    edited: bool = False
    commands: tuple[str, ...] = ()


def explain(plan: Plan, *, where: str = "plan.json") -> Explanation:
    """Measure the plan's stages on its problem.

    Raises:
        PlanError: the plan holds no problem, or its stages tear an item apart.
    """
    found = placed(plan, where)
    uses, objective = stage_uses(found), seconds_of(found)
    claimed = plan.certificate.objective_seconds
    edited = not math.isclose(objective, claimed, rel_tol=1e-6, abs_tol=1e-300)
    return Explanation(
        objective_seconds=objective,
        flush=found.deployment.flush,
        chained=found.chained,
        num_microbatches=found.m,
        bottleneck=bottleneck(uses),
        stages=uses if edited else with_ledgers(plan, uses),
        transfer_seconds=critical(found)[1] if found.chained else 0.0,
        boundaries=boundaries(found),
        broken=tuple(broken(found)),
        edited=edited,
        commands=(*_looser(plan, found, where), *_again(plan, where)),
    )


def _looser(plan: Plan, found: Evaluation, where: str) -> Iterator[str]:
    """`whatif` without limits of machines, and without recomputation."""
    asked, stages = ["pdcompile", "whatif", *plan.command[:1], where], found.problem.stages
    if not plan.command:
        return
    if any(one.memory_bytes is not None for one in stages):
        yield shlex.join([*asked, "--memory", "none"])
    if any(math.isfinite(one.bytes_per_second) or one.latency_seconds for one in stages[1:]):
        yield shlex.join([*asked, "--bandwidth", "unlimited", "--latency", "0s"])
    if any(stage.recompute for stage in plan.stages):
        yield shlex.join([*asked, "--recompute", "off"])


def _again(plan: Plan, where: str) -> Iterator[str]:
    """The command that made the plan without each of its constraints."""
    limits = {f"--{name.replace('_', '-')}" for name in KINDS}
    file = Path(where)
    target, *made = plan.command or ("",)
    left: dict[tuple[str, ...], str] = {}
    for word in made:
        name = word.partition("=")[0]
        if name in limits:
            joined = name == "--cut-at"  # where cuts may lie, all of these say together
            gone = {one for one in made if joined and one.startswith(f"{name}=")} | {word}
            left[tuple(one for one in made if one not in gone)] = " ".join(sorted(gone))
    for n, (words, option) in enumerate(left.items(), 1):
        output = file.with_name(f"{file.stem}.again{f'-{n}' if n > 1 else ''}.json")
        command = shlex.join(["pdcompile", "plan", target, *words, "-o", str(output)])
        yield f"{command}  # without {option}"


def with_ledgers(plan: Plan, uses: tuple[StageUse, ...]) -> tuple[StageUse, ...]:
    """The stages with the bytes of the schedule's ledger, where that exceeds the formula."""
    if plan.forecast is None or len(plan.forecast.ledgers) != plan.num_columns:
        return uses
    found = []
    for use, stage in zip(uses, plan.stages, strict=True):
        totals = [plan.forecast.ledgers[rank].total_bytes for rank in stage.ranks]
        found.append(replace(use, memory_bytes=max([use.memory_bytes, *totals])))
    return tuple(found)
