"""Rounding: a plan whose cuts lie between the parts of a model, found by solving again.

The problem that the planner solved is in the plan, with its costs and limits; it is solved again
with one more constraint, and all else as in the plan: as under `CutAt` of every part no cut lies
inside of one, and none before what runs between it and the next one (``x + tanh(layer(x))``), which
a model's own forward runs where the part is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdcompile.errors import InfeasibleError
from pdcompile.ir.graph import OpCost, OpGraph
from pdcompile.passes.export.model_parts import part_paths, parts_of_ops, views
from pdcompile.passes.partition.alternatives import seconds_of
from pdcompile.passes.planning.branch_and_bound import best_plan
from pdcompile.passes.planning.solved_problem import placed, space_of_cut
from pdcompile.passes.simulate import simulate
from pdcompile.passes.stages.kept_outputs import planned
from pdcompile.plan import Plan
from pdcompile.plan.embedded import problem_of
from pdcompile.problem import MemoryRule, PartitionProblem, StageLimits, Wish

WISH = "cuts between modules"


@dataclass(frozen=True, slots=True)
class Rounding:
    """A plan with rounded cuts, its objective and that of the plan before, and whether any moved:
    else it is that plan itself."""

    after: Plan
    before_seconds: float
    after_seconds: float
    moved: bool

    @property
    def percent(self) -> float:
        """Price of rounding: below 0 where the first plan was not the best one."""
        if self.before_seconds <= 0:
            return 0.0
        return 100 * (self.after_seconds / self.before_seconds - 1)


def rounded(
    plan: Plan, graph: OpGraph, *, time_limit: float | None = None, where: str = "plan.json"
) -> Rounding:
    """The best plan with cuts between parts alone; times are by the costs in the plan.

    Args:
        graph: of the model, in training.
        time_limit: of the search, in seconds; None: as `best_plan`.

    Raises:
        PlanError: the plan does not hold its problem, or tears apart what that keeps together.
        InfeasibleError: no such cut satisfies the plan's limits and constraints.
    """
    now = placed(plan, where)
    groups = _groups(graph, problem_of(plan, where))
    stage_of = now.stage_of
    if all(len({stage_of[i] for i in group}) == 1 for group in groups):
        return Rounding(plan, seconds_of(now), seconds_of(now), moved=False)
    try:
        found = _solved(plan, graph, groups, time_limit)
    except InfeasibleError as error:
        raise type(error)(
            f"no cut between modules is within the limits of the plan: {error.message}",
            where=error.where,
            remedy=f"{error.remedy or 'plan with fewer stages'}; modules between which cuts "
            f"may lie: {', '.join(part_paths(graph)[:8])}, …",
        ) from error
    found = replace(found, notes=tuple(dict.fromkeys((*plan.notes, *found.notes))))
    return Rounding(found, seconds_of(now), seconds_of(placed(found)), moved=True)


def _groups(graph: OpGraph, problem: PartitionProblem) -> list[tuple[int, ...]]:
    """Items that no cut may part: a part, and what runs after it before the next one begins.

    An item lies where its ops compute; views that it keeps beside them may be of the next part.
    """
    idle, part_of = views(graph), parts_of_ops(graph)
    begun: dict[str, int] = {}  # parts that have begun when an op runs, the one before it included
    last, count = "", 0
    for op in graph.ops:
        part = part_of[op.name] or last
        count += bool(last) and part != last
        last, begun[op.name] = part, count
    groups: dict[int, list[int]] = {}
    for i, item in enumerate(problem.items):
        busy = [name for name in item.ops if name not in idle] or item.ops
        groups.setdefault(min(begun[name] for name in busy), []).append(i)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _solved(
    plan: Plan, graph: OpGraph, groups: list[tuple[int, ...]], time_limit: float | None
) -> Plan:
    """The best plan that keeps these items together."""
    problem, training, count = problem_of(plan), plan.training, len(plan.stages)
    bound = replace(
        problem,
        together=tuple(dict.fromkeys((*problem.together, *groups))),
        wishes=(*problem.wishes, Wish(WISH, together=tuple(groups))),
        stages=(StageLimits(),) * count,
        memory=MemoryRule(in_flight=(1,) * count),
        scope=f"{problem.scope}; {WISH}",
    )
    costed = _costed(planned(graph, training), problem)
    found = best_plan(
        lambda _: costed,
        lambda _: bound,
        plan.machines,
        space_of_cut(plan),
        replace(training, warmup=()),
        time_limit=time_limit,
        seed=training.seed,
    )
    found = replace(found, fingerprint=plan.fingerprint)
    return replace(found, forecast=simulate(found, timeline=False).forecast)


def _costed(graph: OpGraph, problem: PartitionProblem) -> OpGraph:
    """The graph with the seconds of the problem: those of an item are its first op's, as all of
    them are on one stage."""
    none = OpCost(microbatch_size=graph.batch_size)
    costs = {
        item.ops[0]: replace(
            none, forward_seconds=item.forward_seconds, backward_seconds=item.backward_seconds
        )
        for item in problem.items
        if item.ops
    }
    ops = tuple(replace(op, cost=costs.get(op.name, none)) for op in graph.ops)
    return replace(graph, ops=ops)
