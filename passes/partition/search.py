"""partition(): reduce, cut by dynamic program, improve, prove, and check the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pdcompile.errors import InfeasibleError, PlanError
from pdcompile.passes.partition import dynamic_program
from pdcompile.passes.partition.evaluate import evaluate, violations
from pdcompile.passes.partition.ideals import all_ideals, prefixes
from pdcompile.passes.partition.model import Model, build
from pdcompile.passes.partition.segments import Segments
from pdcompile.plan import Certificate
from pdcompile.problem import Partition, PartitionProblem

MAX_IDEALS = 1_500  # pairs of ideals are matrices: 1,500² of 8 bytes are 18 MB
Progress = Callable[[str], None]


@dataclass(slots=True)
class Search:
    """The best assignment so far, the best bound so far, and who found the bound."""

    problem: PartitionProblem
    model: Model
    deadline: float
    progress: Progress
    best: Partition | None = None
    bound: float = 0.0
    prover: str = "relaxation"
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def offer(self, groups: Iterable[int], model: Model | None = None) -> bool:
        """Evaluate an assignment of groups; keep it when it is the best. True if it is."""
        stage_of = (model or self.model).items_of(tuple(groups))
        if stage_of in self.seen:
            return False
        self.seen.add(stage_of)
        if violations(self.problem, stage_of):
            return False
        found = evaluate(self.problem, stage_of)
        if self.best is not None and found.objective >= self.best.objective:
            return False
        self.best = found
        self.progress(f"a plan of {found.objective:.6g} s")
        return True

    def prove(self, bound: float, prover: str) -> None:
        if bound > self.bound:
            self.bound, self.prover = bound, prover

    @property
    def proved(self) -> bool:
        best = self.best
        return best is not None and best.objective - self.bound <= 1e-6 * best.objective

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline


def partition(
    problem: PartitionProblem,
    *,
    time_limit: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    scope: str | None = None,
) -> tuple[Partition, Certificate]:
    """The best assignment of items to stages, and how far it is from the optimum at most.

    Args:
        time_limit: seconds for improving and proving; 0: the first plan found. None: until
            proved, at most a minute.
        seed: of the random linear orders and of CP-SAT; equal seeds give equal answers as long
            as the time limit is not reached.
        progress: called with a line of text at every improvement.
        scope: inside which scope the certificate holds; default: the problem's.

    Raises:
        InfeasibleError: no assignment satisfies the limits; names those that conflict.
    """
    begin = time.monotonic()
    model = build(problem)
    deadline = begin + (60.0 if time_limit is None else time_limit)
    search = Search(problem, model, deadline, progress or (lambda _: None))
    _cut(search, seed)
    if search.best is None:
        raise InfeasibleError("no assignment satisfies the limits")
    return _answer(search, begin, scope)


def _cut(search: Search, seed: int) -> None:
    model = search.model
    ideals = all_ideals(model, MAX_IDEALS)
    complete = ideals is not None
    segments = Segments.build(model, ideals or prefixes(model, MAX_IDEALS, seed))
    found = dynamic_program.solve(segments, segments.load)
    if found is None:
        return
    value, groups = found
    search.offer(groups)
    if search.problem.objective == "bottleneck":
        if complete:
            search.prove(value, "dynamic program over all ideals")
        return
    for cost in dynamic_program.flush_costs(segments):
        found = dynamic_program.solve(segments, cost)
        if found:
            search.offer(found[1])


def _answer(search: Search, begin: float, scope: str | None) -> tuple[Partition, Certificate]:
    best = search.best
    if best is None or violations(search.problem, best.stage_of):
        raise PlanError("internal error: the planner's answer fails its own check")
    bound = min(search.bound, best.objective)
    certificate = Certificate(
        objective_seconds=best.objective,
        bound_seconds=bound,
        status="feasible",
        prover=search.prover,
        seconds=time.monotonic() - begin,
        scope=search.problem.scope if scope is None else scope,
    )
    if certificate.gap == 0:
        certificate = Certificate(
            best.objective, bound, "optimal", search.prover, certificate.seconds, certificate.scope
        )
    return best, certificate
