"""partition(): the best assignment of a problem, or the error that says why there is none."""

from __future__ import annotations

import math
from dataclasses import replace

from pdcompile.errors import CostError, InfeasibleError, PlanError
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.search import Progress, solve
from pdcompile.passes.partition.space.no_plan import no_assignment
from pdcompile.plan import NOT_CERTIFIED, Certificate
from pdcompile.plan.embedded import unusable_numbers
from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem import Partition, PartitionProblem

DEFAULT_SECONDS, PATIENCE = 20.0, 2.0


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
    for name in ("items", "traffic", "shared", "stages", "in_flight", "holdings"):
        for path, message, remedy in unusable_numbers(getattr(problem, name), f"problem.{name}"):
            raise CostError(message, where=path, remedy=remedy)


def partition(
    problem: PartitionProblem,
    *,
    time_limit: float | None = None,
    patience: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Partition, Certificate]:
    """The best assignment of items to stages, and how far it is from the optimum at most.

    Ctrl-C ends the search with the best plan so far and its gap; a second one, or one before
    there is a plan, raises KeyboardInterrupt.

    Args:
        time_limit: seconds after which the best plan so far is returned; 0: the first plan.
            None: until proved, at most 20.
        patience: seconds of work after which a search ends without news, a plan or bound that is
            0.1 % better, if all before took no longer.  None: 2, or no limit where there is one.
        seed: of CP-SAT; equal seeds give equal answers as long as the time limit is not reached.
        progress: called with a line of text, plan, bound and gap, when one of them improves.

    Raises:
        InfeasibleError: no assignment satisfies the limits; names those that conflict, and what
            would help.  Also when none was found within the time limit (it says so).
        CostError: a cost is negative or not finite.
    """
    validate(problem)
    if patience is None:
        patience = PATIENCE if time_limit is None else math.inf
    seconds = DEFAULT_SECONDS if time_limit is None else time_limit
    with Budget(seconds, patience=patience) as budget:
        try:
            search = solve(problem, budget, seed, progress or (lambda _: None))
        except InfeasibleError as contradiction:
            raise no_assignment(problem, budget, seed, contradiction) from None
        if search.best is None:
            if budget.stopped and not search.impossible:
                raise KeyboardInterrupt
            raise no_assignment(problem, budget, seed, proved=search.impossible)
        for wrong in Evaluation(problem, search.best.stage_of).violations():
            raise PlanError(f"internal error: the planner's answer fails its own check: {wrong}")
        found = replace(
            NOT_CERTIFIED, prover=search.prover, seconds=budget.spent, scope=problem.scope
        )
        return search.best, claimed(found, search.best.objective, search.bound)


def claimed(
    certificate: Certificate, objective: float, bound: float, fastest: float | None = None
) -> Certificate:
    """The certificate for these seconds, which are optimal where objective and bound meet."""
    found = replace(
        certificate,
        objective_seconds=objective,
        bound_seconds=min(bound, objective),
        fastest_seconds=fastest,
    )
    return replace(found, status="optimal" if found.gap == 0 else "feasible")
