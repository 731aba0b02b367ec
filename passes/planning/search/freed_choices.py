"""What a plan would gain if a choice that was fixed were left to the planner.

From the plan's own problem, with the costs of its microbatches: likely plans of the larger space,
by the one evaluator, and memory as graph-free plans hold it.  So a gain is a hint, not a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pdcompile.cluster import Cluster
from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition.alternatives import broken
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.space.candidates import describe
from pdcompile.passes.partition.space.line_plans import LinePlans
from pdcompile.passes.partition.space.pipelines import PreparedProblem, limited, timed
from pdcompile.passes.planning.solved_problem import scaled, setting_of
from pdcompile.passes.schedules import rule_of, warmup
from pdcompile.plan import Plan
from pdcompile.plan.embedded import plain
from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem import BY_RULE
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from pdcompile.schedule.registry import KINDS, kind_of

MUCH = 1.1  # times as fast, from which it is worth a line
MORE = (2, 4)  # times as many microbatches
MUCH_MORE = 1.25  # times as fast at most: what small microbatches cost nobody knows
ALMOST = 0.97  # of what all choices, or most microbatches, gain: then one of them is named


@dataclass(frozen=True, slots=True)
class Freed:
    """What would be left to the planner, how many times as fast that is, and the plan in words."""

    choice: str
    times: float
    plan: str
    at_most: bool = False  # costs are assumed that nobody knows

    def __str__(self) -> str:
        if self.at_most:
            times = f"would be up to {math.ceil(10 * self.times) / 10:g} times"
        else:  # a plan that was found: there may be better ones
            times = f"would allow a plan that is {math.floor(10 * self.times) / 10:g} times"
        return f"{self.choice} {times} as fast: {self.plan}"


def freed(plan: Plan, found: Evaluation, cluster: Cluster, budget: Budget) -> Freed | None:
    """The gain of what costs most of what was fixed; None where nothing costs much.

    `found`: the plan as its evaluator sees it.
    """
    kind, problem = kind_of(plan.training.schedule), found.problem
    last = len(problem.stages) - 1
    numbered = problem.forbidden or any(s != last for _, s in problem.pins)
    if kind.updates_each or kind.written or numbered or len(cluster.devices) < 2:
        return None
    prepared, seconds = PreparedProblem(problem, 1), found.seconds
    seconds *= found.m if kind.stream else 1
    each: list[Freed] = []
    for choice, space in _spaces(plan):
        least, best = _least(prepared, space, cluster, plan, budget)
        if best is not None and least < seconds / MUCH:
            sure = ", if its memory, which is estimated, fits" * limited(cluster)
            each.append(Freed(choice, seconds / least, describe(best) + sure))
    most = max((one.times for one in each), default=0.0)
    return next((one for one in each if one.times >= ALMOST * most), None)


def more_microbatches(plan: Plan, found: Evaluation) -> Freed | None:
    """The gain of more microbatches for the same stages, where a rule said how many there are.

    A plan has costs of one size: a sample is taken to need as long in smaller microbatches, which
    need longer if anything.  So of fewer microbatches nothing is said.
    """
    training = plan.training
    if BY_RULE not in plan.certificate.scope or not plain(plan):
        return None
    kind, size = kind_of(training.schedule), -(-training.batch_size // training.num_microbatches)

    def seconds(m: int) -> float:
        """Of a step of so many."""
        depths = warmup(training.schedule, len(plan.stages), m)
        setting = replace(setting_of(training), num_microbatches=m)
        problem = replace(
            scaled(found.problem, -(-training.batch_size // m) / size),
            memory=rule_of(setting, depths),
            num_microbatches=m,
        )
        one = Evaluation(problem, found.stage_of)
        return math.inf if broken(one) else one.seconds * (m if kind.stream else 1)

    counts = [training.num_microbatches * factor for factor in MORE]
    tried = {m: seconds(m) for m in counts if m <= training.batch_size}
    now = found.seconds * (found.m if kind.stream else 1)
    enough = min(tried.values(), default=math.inf) / ALMOST
    few = min((m for m, one in tried.items() if one <= enough), default=0)
    if not few or tried[few] >= now / MUCH_MORE:
        return None
    near = ",".join(map(str, dict.fromkeys((*training.near_counts, few))))
    return Freed(
        f"--microbatches {few}",
        now / tried[few],
        "these stages idle less, if a sample needs no longer in smaller microbatches; "
        f"--microbatches {near} compares",
        at_most=True,
    )


def _spaces(plan: Plan) -> Iterator[tuple[str, SearchSpace]]:
    """Each choice alone, then all of them; of those that were not open already."""
    open_, training = plan.certificate.scope, plan.training
    recomputes = tuple(stage.recompute for stage in plan.stages)
    widths, stages = tuple(stage.replicas for stage in plan.stages), len(plan.stages)
    fixed = SearchSpace(
        "1" if set(widths) == {1} else widths, tuple(sorted(set(recomputes))),
        (training.schedule,), (training.num_microbatches,), stages=stages,
        recomputed=recomputes if len(set(recomputes)) > 1 else (),
    )  # fmt: skip
    kinds = KINDS.values()
    alone = [k.name for k in kinds if k.by_planner and k.usual == 1 and not k.stream]
    schedules = tuple(dict.fromkeys((training.schedule, *alone)))
    wider: dict[str, dict[str, Any]] = {
        "replicas='any'": {"replicas": "any", "stages": None, "recomputed": ()},
        "recompute='auto'": {"recompute": (False, True), "recomputed": ()},
        "schedule='auto'": {"schedules": schedules, "extra_warmup": (0, 1)},
    }
    if "replicas any" in open_:
        del wider["replicas='any'"]
    if "recomputation by stage" in open_ or True not in recomputes:
        del wider["recompute='auto'"]
    if f"schedules {', '.join(alone)}" in open_:
        del wider["schedule='auto'"]
    for name, change in wider.items():
        yield name, replace(fixed, **change)
    if len(wider) > 1:
        together = {key: value for change in wider.values() for key, value in change.items()}
        yield ", ".join(wider), replace(fixed, **together)


def _least(
    prepared: PreparedProblem, space: SearchSpace, cluster: Cluster, plan: Plan, budget: Budget
) -> tuple[float, Candidate | None]:
    """The least seconds of a step among likely plans of the space."""
    plans, training = LinePlans(prepared, space, cluster), plan.training
    best: list[tuple[float, Candidate | None]] = [(math.inf, None)]

    def take(setting: Setting, candidate: Candidate) -> bool:
        below = best[-1][0] / setting.scale
        seconds, fits = timed(prepared.problem, cluster, candidate, below)
        if fits and seconds < below:
            best.append((seconds * setting.scale, candidate))
        return fits

    def below(setting: Setting) -> float:
        return best[-1][0] / setting.scale

    late: Callable[[], bool] = partial(getattr, budget, "late")
    for schedule in space.schedules:
        for extra in space.extra_warmup:
            setting = replace(setting_of(training), schedule=schedule, extra_warmup=extra)
            for menus in plans.menus()[:2]:
                for counts in menus:
                    try:
                        plans.offer(
                            setting, counts, partial(below, setting), late, partial(take, setting)
                        )
                    except InfeasibleError:
                        return math.inf, None
    return best[-1]
