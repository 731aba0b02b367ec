"""partition(): reduce, cut by dynamic program, improve, prove, and check the answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from pdcompile.errors import PlanError
from pdcompile.passes.partition import dynamic_program
from pdcompile.passes.partition.bounds import crude_upper, flush_bound, seed_paths, simple_bound
from pdcompile.passes.partition.coarse import contracted
from pdcompile.passes.partition.enumerate import chains
from pdcompile.passes.partition.evaluate import measure, path_of, violations
from pdcompile.passes.partition.ideals import all_ideals, prefixes
from pdcompile.passes.partition.infeasible import explain, validate
from pdcompile.passes.partition.integer_program import IntegerProgram
from pdcompile.passes.partition.model import Model, build
from pdcompile.passes.partition.segments import Segments
from pdcompile.plan import Certificate
from pdcompile.problem import Partition, PartitionProblem

final_violations = violations  # the last word on every answer
MAX_IDEALS = 1_500  # pairs of ideals are matrices: 1,500² of 8 bytes are 18 MB
MAX_COARSE = 600  # groups of the coarse model of a very large problem
MAX_CHAINS = 150  # evaluated one by one
MAX_VARIABLES = 60_000  # groups x stages; larger problems keep the relaxation's bound
DEFAULT_SECONDS = 20.0
Progress = Callable[[str], None]


@dataclass(slots=True)
class Search:
    """The best assignment so far, the best bound so far, and who found the bound."""

    problem: PartitionProblem
    model: Model
    deadline: float
    seed: int
    progress: Progress
    best: Partition | None = None
    groups: tuple[int, ...] = ()  # of the best
    bound: float = 0.0
    prover: str = "relaxation"
    impossible: bool = False  # proved
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def offer(self, groups: tuple[int, ...], model: Model | None = None) -> bool:
        """Evaluate an assignment of groups; True when it is the best so far."""
        stage_of = (model or self.model).items_of(groups)
        if stage_of in self.seen:
            return False
        self.seen.add(stage_of)
        if violations(self.problem, stage_of):
            return False
        found = measure(self.problem, stage_of)
        if found.objective >= self.upper:
            return False
        self.best = found
        self.groups = tuple(stage_of[group[0]] for group in self.model.members)
        self.progress(f"a plan of {found.objective:.6g} s")
        return True

    def prove(self, bound: float, prover: str) -> None:
        if bound > self.bound:
            self.bound, self.prover = bound, prover

    @property
    def upper(self) -> float:
        return math.inf if self.best is None else self.best.objective

    @property
    def proved(self) -> bool:
        return self.best is not None and self.upper - self.bound <= 1e-9 * self.upper

    @property
    def late(self) -> bool:
        return time.monotonic() >= self.deadline


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
        time_limit: seconds for improving and proving after the dynamic program; 0: only that.
            None: until proved, at most 20.
        seed: of the random linear orders and of CP-SAT; equal seeds give equal answers as long
            as the time limit is not reached.
        progress: called with a line of text at every improvement.
        scope: inside which scope the certificate holds; default: the problem's.

    Raises:
        InfeasibleError: no assignment satisfies the limits; names those that conflict, and the
            least that would help.  Also when none was found within the time limit (it says so).
        CostError: a cost is negative or not finite.
    """
    begin = time.monotonic()
    validate(problem)
    seconds = DEFAULT_SECONDS if time_limit is None else time_limit
    model = build(problem)
    search = Search(problem, model, begin + seconds, seed, progress or (lambda _: None))
    search.prove(simple_bound(model), "relaxation")
    segments = _cut(search)
    if search.best is None:
        _find(search)
    if search.best is None:
        raise explain(model, segments, proved=search.impossible)
    for step in (_improve, _look, _prove):
        if not search.proved and not search.late:
            step(search, segments)
    return _answer(search, begin, scope)


def _cut(search: Search) -> Segments:
    """Dynamic program: exact over all ideals when they are few, else a start."""
    model, problem = search.model, search.problem
    small = contracted(model, MAX_IDEALS - 1, MAX_COARSE)
    ideals = all_ideals(small, MAX_IDEALS)
    complete = ideals is not None and small is model
    segments = Segments.build(small, ideals or prefixes(small, MAX_IDEALS, search.seed))
    exact = segments.load if problem.objective == "bottleneck" else flush_bound(segments)
    found = dynamic_program.solve(segments, exact)
    if found is None:
        search.impossible = complete  # the matrices never overstate what a stage needs
        return segments
    value, groups = found
    search.offer(groups, small)
    if complete:
        # Differences of sums lose digits relative to the total, not to the difference.
        total = sum(model.forward) + sum(model.backward)
        search.prove(value - 1e-13 * total, "dynamic program over all ideals")
    if problem.objective == "flush":
        for cost in dynamic_program.flush_costs(segments):
            found = dynamic_program.solve(segments, cost)
            if found:
                search.offer(found[1], small)
    return segments


def _find(search: Search) -> None:
    """No plan yet: let CP-SAT look for any."""
    if search.impossible or search.late:
        return
    program = IntegerProgram(search.model, crude_upper(search.model))
    for _ in range(20):  # rounding of bytes can let through a plan that does not fit
        bound, groups = program.solve(search.deadline, search.seed, search.offer)
        if bound == math.inf:
            search.impossible = True
        if groups is None or search.best is not None:
            return
        program.forbid(groups)


def _look(search: Search, segments: Segments) -> None:
    """Evaluate every assignment that the bound leaves, when there are few."""
    if segments.model is not search.model or all_ideals(search.model, MAX_IDEALS) is None:
        return
    flush = search.problem.objective == "flush"
    cost = flush_bound(segments) if flush else segments.load
    upper = search.upper * (1 - 1e-9)
    if len(list(islice(chains(segments, cost, lambda: upper), MAX_CHAINS + 1))) > MAX_CHAINS:
        return
    for groups in chains(segments, cost, lambda: search.upper * (1 - 1e-9)):
        if search.late:
            return
        search.offer(groups)
    search.prove(search.upper, "brute force over what the bound leaves")


def _improve(search: Search, _: Segments) -> None:
    """Move single groups across a boundary as long as that helps."""
    improved, left = True, 200
    while improved and left > 0 and not search.late:
        improved = False
        for groups in _neighbours(search.model, search.groups):
            left -= 1
            if search.offer(groups):
                improved = True
                break
            if left <= 0:
                return


def _neighbours(model: Model, groups: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    before: list[list[int]] = [[] for _ in groups]
    after: list[list[int]] = [[] for _ in groups]
    for a, b in model.arcs:
        before[b].append(a)
        after[a].append(b)
    for v, s in enumerate(groups):
        if s < model.highest[v] and all(groups[u] > s for u in after[v]):
            yield (*groups[:v], s + 1, *groups[v + 1 :])
        if s > model.lowest[v] and all(groups[u] < s for u in before[v]):
            yield (*groups[:v], s - 1, *groups[v + 1 :])


def _prove(search: Search, _: Segments) -> None:
    """CP-SAT until the bound meets the best plan or time is up."""
    if search.model.num_groups * search.model.num_stages > MAX_VARIABLES or search.upper <= 0:
        return
    program = IntegerProgram(search.model, search.upper, search.groups)
    if search.problem.objective == "flush":
        for path in seed_paths(search.model):
            program.add_path(path)
        program.add_path(path_of(search.problem, search.model.items_of(search.groups)))
    while not search.proved and not search.late:
        program.below(search.upper * (1 - 1e-7))
        visited: list[tuple[int, ...]] = []
        bound, groups = program.solve(search.deadline, search.seed, visited.append)
        for one in visited:
            search.offer(one)
        search.prove(min(bound, search.upper), "CP-SAT")
        if bound == math.inf or groups is None:
            return
        # Where no path tells the model what an assignment costs (long hops, half duplex), it has
        # been evaluated all the same: go on without it.
        told = 0
        if search.problem.objective == "flush":
            stages = map(search.model.items_of, visited)
            told = sum(program.add_path(path_of(search.problem, one)) for one in stages)
        if not told:
            program.forbid(groups)


def _answer(search: Search, begin: float, scope: str | None) -> tuple[Partition, Certificate]:
    best = search.best
    assert best is not None
    for wrong in final_violations(search.problem, best.stage_of):
        raise PlanError(f"internal error: the planner's answer fails its own check: {wrong}")
    bound = min(search.bound, best.objective)
    gap = (best.objective - bound) / best.objective if best.objective > 0 else 0.0
    return best, Certificate(
        objective_seconds=best.objective,
        bound_seconds=bound,
        status="optimal" if gap <= 1e-5 else "feasible",
        prover=search.prover,
        seconds=time.monotonic() - begin,
        scope=search.problem.scope if scope is None else scope,
    )
