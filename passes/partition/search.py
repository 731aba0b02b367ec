"""The search for the best assignment: reduce, cut by dynamic program, improve, prove."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition.bounds import bounding_cost, simple_bound
from pdcompile.passes.partition.budget import Budget, OutOfTimeError
from pdcompile.passes.partition.chains import solve as best_chain
from pdcompile.passes.partition.cpsat import IntegerProgram, any_assignment
from pdcompile.passes.partition.known_paths import KnownPaths
from pdcompile.passes.partition.local_search import Groups, LocalSearch
from pdcompile.passes.partition.model import (
    Model,
    all_ideals,
    build,
    contracted,
    positions,
)
from pdcompile.passes.partition.round_trips import likely_groups
from pdcompile.passes.partition.segments import Segments
from pdcompile.passes.partition.space.straight import straight_bound
from pdcompile.plan.evaluate import Deployment, Evaluation
from pdcompile.plan.makespan import Path
from pdcompile.problem import Partition, PartitionProblem
from pdcompile.units import format_seconds

Progress = Callable[[str], None]
ALONG = "dynamic program over ranks, along a path"
NEWS = 1e-3  # relative, of a plan or bound that is better
EQUAL = 2e-7  # a relative gap up to this ends the search: CP-SAT works with rounded numbers


@dataclass(slots=True)
class Search:
    """The best assignment so far, the best bound so far, and who found the bound."""

    problem: PartitionProblem
    model: Model
    budget: Budget
    seed: int = 0
    progress: Progress = lambda _: None
    best: Partition | None = None
    groups: Groups = ()  # of the best
    bound: float = 0.0
    prover: str = "relaxation"
    impossible: bool = False  # proved
    starts: dict[Groups, float] = field(default_factory=dict)  # groups, and seconds
    known: KnownPaths = field(default_factory=KnownPaths)
    on: Deployment = field(init=False)
    paths: list[Path] = field(init=False)  # of `known`
    _line: str = ""
    _known: tuple[float, float] | None = None  # objective and bound at the last news

    def __post_init__(self) -> None:
        self.on = Deployment.straight(self.problem)
        self.paths = self.known.of(self.on)

    def offer(
        self, groups: Groups, model: Model | None = None, *, below: float | None = None
    ) -> float | None:
        """Seconds of an assignment of groups: None if it breaks a rule or is no better than the
        best, or than so many; where any will do, moves of groups may begin with it."""
        below = self.upper if below is None else below
        plan = Evaluation(self.problem, (model or self.model).items_of(groups))
        if any(plan.violations()) or self.known.seconds(plan, below) >= below:
            return None
        found, own = plan.partition(), self.model.groups_of(plan.stage_of)
        if below == math.inf:
            self.starts[own] = found.objective
        if found.objective < self.upper:
            self.best, self.groups = found, own
            self._tell()
        return found.objective

    def prove(self, bound: float, prover: str) -> None:
        """No assignment is better than `bound` seconds."""
        if bound > self.bound:
            self.bound, self.prover = bound, prover
            self._tell()

    @property
    def upper(self) -> float:
        return math.inf if self.best is None else self.best.objective

    @property
    def proved(self) -> bool:
        return self.best is not None and self.upper - self.bound <= EQUAL * self.upper

    @property
    def near(self) -> bool:
        """True where no better plan would be news."""
        return self.upper - self.bound < NEWS * self.upper

    def news(self) -> None:
        """Wait for what is better than the plan and the bound that there are now."""
        self._known = self.upper, self.bound
        self.budget.news()

    def _tell(self) -> None:
        if self.best is None:
            return
        bound = min(self.bound, self.upper)
        known = self._known
        if known and known[0] - self.upper + self.bound - known[1] >= NEWS * self.upper:
            self.news()
        gap = 1 - bound / self.upper if self.upper > 0 else 0.0
        line = (
            f"plan {format_seconds(self.upper)}, bound {format_seconds(bound)}, "
            f"gap {100 * gap:.2g} %"
        )
        if line != self._line:
            self._line = line
            self.progress(line)


MAX_IDEALS = 1_500  # pairs of ideals are matrices: 1,500² of 8 bytes are 18 MB
MAX_COARSE = 600  # groups of the coarse model of a very large problem
FIRST = 200  # groups of the model that gives the first plan
MOVING = 0.5  # of the time that is left
LIKELY = 1.1  # starts that take so many times as long as the fastest, at most
MAX_VARIABLES = 60_000  # groups x stages; larger problems keep the relaxation's bound
SOLVABLE = 2_000  # of them for a second of patience: of more paths CP-SAT says nothing in that time


def solve(
    problem: PartitionProblem,
    budget: Budget,
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> Search:
    """The best assignment that is found and the best bound.

    Raises InfeasibleError: constraints contradict each other.
    """
    model = build(problem)
    search = Search(problem, model, budget, seed, progress)
    search.prove(simple_bound(model), "relaxation")
    cut_coarsely(search)
    bound(search)
    if not (search.paths and search.near):
        cut_by_program(search)
    find_any(search)
    bound(search)
    search.news()  # patience begins where plan and bound are those of a whole search
    for step in (improve, prove):
        if search.best is not None and not search.proved and not search.budget.late:
            step(search)
    return search


def any_assignment_of(
    problem: PartitionProblem, budget: Budget, seed: int
) -> tuple[int, ...] | None:
    """The stage of every item in some assignment; None: there is none.

    Raises:
        OutOfTimeError: neither was found in time.
    """
    if budget.late:
        raise OutOfTimeError
    try:
        straight = replace(problem, objective="bottleneck")  # its program is the quickest
        search = Search(straight, build(straight), budget, seed)
    except InfeasibleError:
        return None
    for step in (cut_coarsely, cut_by_program, find_any):
        if search.best is None:
            step(search)
    if search.best is None and not search.impossible:
        raise OutOfTimeError
    return None if search.best is None else search.best.stage_of


def cut_coarsely(search: Search) -> None:
    """Dynamic program on a coarse model, for the first plan of a large problem."""
    if search.model.num_groups > FIRST:
        quick = contracted(search.model, FIRST, FIRST)
        run_program(search, Segments(quick, positions(quick)), None)


def cut_by_program(search: Search) -> None:
    """Dynamic program: exact over all ideals when they are few, else a start."""
    model, budget = search.model, search.budget
    small = contracted(model, MAX_IDEALS - 1, MAX_COARSE)
    ideals = all_ideals(small, MAX_IDEALS, lambda: budget.late)
    if ideals is None and model.num_groups > FIRST and search.best is not None:
        return
    segments = Segments(small, ideals or positions(small), complete=ideals is not None)
    with suppress(OutOfTimeError):
        run_program(search, segments, None if search.best is None else budget)


def run_program(search: Search, segments: Segments, budget: Budget | None) -> None:
    """Offer the plans of dynamic programs; the value of the first is a bound when the ideals are
    complete, those that are likely the fastest come after it.

    Raises:
        OutOfTimeError: `budget` ended first.
    """
    model = search.model
    found = best_chain(segments, bounding_cost(segments), budget)
    complete = segments.complete and segments.model is model
    if found is None:
        search.impossible |= complete  # the matrices never overstate what a stage needs
        return
    value, groups = found
    search.offer(groups, segments.model, below=math.inf)
    if complete:
        # Differences of sums lose digits relative to the total, not to the difference.
        total = sum(model.forward) + sum(model.backward)
        search.prove(value - 1e-13 * total, "dynamic program over all ideals")
    if search.budget.late and len(segments.ideals) > FIRST:
        return
    if likely := likely_groups(segments, search.on, budget=budget):
        search.offer(likely, segments.model, below=math.inf)


def find_any(search: Search) -> None:
    """Looks for any plan by CP-SAT, where there is none yet."""
    model = search.model
    if search.best or search.impossible or search.budget.late or _too_large(model):
        return
    with suppress(OutOfTimeError):
        groups = any_assignment(model, search.budget, search.seed)
        search.impossible = groups is None
        if groups is not None:
            search.offer(groups, below=math.inf)


def bound(search: Search) -> None:
    """Bounds the objective along the heaviest path, once there is a plan."""
    if search.best is None or search.proved or search.prover == ALONG or search.budget.late:
        return
    found = straight_bound(search.model, search.bound, search.upper, lambda: search.budget.late)
    search.prove(min(found, search.upper), ALONG)


def improve(search: Search) -> None:
    """Local search from each start, and from near the best where known paths make that cheap (not
    for streams), as long as there is news to find; half of the patience is left."""
    until = search.budget.spent + MOVING * search.budget.left
    patience = search.budget.patience / 2

    def ends() -> bool:
        late = search.budget.spent > until or search.budget.waits < patience
        return late or search.near or search.budget.late

    local = LocalSearch(
        search.model,
        lambda groups: Evaluation(search.problem, search.model.items_of(groups)),
        lambda groups, below: search.offer(groups, below=below),
        ends,
        search.known,
    )
    least = min(search.starts.values())
    for seconds, start in sorted((seconds, start) for start, seconds in search.starts.items()):
        if seconds <= LIKELY * least:
            local.climb(start, seconds)
    if search.paths:
        local.go_on(lambda: (search.groups, search.upper), random.Random(search.seed))


def prove(search: Search) -> None:
    """CP-SAT until the bound meets the best plan or time is up."""
    seconds = search.budget.waits if search.paths else math.inf
    if _too_large(search.model, seconds) or search.upper <= 0:
        return
    program = IntegerProgram(search.model, search.upper)
    for path in search.paths:
        program.add_path(path)
    while not search.proved and not search.budget.late:
        limit = search.upper * (1 - 1e-7)  # nothing is said of what lies between this and upper
        program.below(limit)
        known = search._known
        visited: list[tuple[int, ...]] = []

        def bounded(bound: float, limit: float = limit) -> None:
            search.prove(min(bound, limit), "CP-SAT")

        bound, groups = program.solve(search.budget, search.seed, visited.append, bounded)
        for one in visited:
            search.offer(one)
        bounded(min(bound, search.upper))
        if bound == math.inf or (groups is None and search._known is known):
            return
        if groups is None:  # a bound that was news left it more time
            continue
        # Where no path bounds what an assignment costs (long hops, half duplex), forbid it: it has
        # been evaluated.
        if not sum(map(program.add_path, search.paths)):
            program.forbid(groups)


def _too_large(model: Model, seconds: float = math.inf) -> bool:
    return model.num_groups * model.num_stages > min(MAX_VARIABLES, SOLVABLE * seconds)
